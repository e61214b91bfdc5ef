"""What a store that several servers use has to do: named bytes, and groups of short names.

`redis_objects` and `s3_objects` do it; `shared` knows what the bytes are. Any thread may call.
Every verb waits for a bounded time and raises TierFailed.
"""

from collections.abc import Sequence
from typing import Protocol

from rekindle.generation.model_state import Payload


class ObjectStore(Protocol):
    @property
    def reads_are_dear(self) -> bool:
        """Whether each name that is read costs a round trip of its own, as with S3."""
        ...

    @property
    def place(self) -> str:
        """For people to read: where it is, without a password."""
        ...

    def read(self, names: Sequence[str], *, first_bytes: int | None = None) -> list[bytes | None]:
        """All at once, each whole or as far as asked for; None: it is not there."""
        ...

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        """All of it or nothing, over what was there. Raises TierFull where there is no room."""
        ...

    def add(self, group: str, member: str) -> None: ...

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        """Of each group at most so many, in no order."""
        ...

    def touch(self, names: Sequence[str]) -> list[bool]:
        """They were used: they stay longer, where the store forgets. Which of them are there."""
        ...

    def remove(self, names: Sequence[str]) -> None: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...
