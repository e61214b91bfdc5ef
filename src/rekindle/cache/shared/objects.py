"""The operations of a shared object store: named bytes, and groups of short names.

`redis_objects` and `s3_objects` implement them; `tier` knows what the bytes mean. Any thread may
call. Every call takes a bounded time and raises TierFailed.
"""

from collections.abc import Sequence
from typing import Protocol

from rekindle.generation.model_state import Payload


class ObjectStore(Protocol):
    @property
    def reads_are_dear(self) -> bool:
        """Whether each name read costs a round trip of its own, as with S3."""
        ...

    @property
    def place(self) -> str:
        """The store's address without its password, for people to read."""
        ...

    def read(self, names: Sequence[str], *, first_bytes: int | None = None) -> list[bytes | None]:
        """Return the objects, whole or their first bytes; None for each that is missing."""
        ...

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        """Write or replace an object, all of it or nothing. Raises TierFull if there is no room."""
        ...

    def add(self, group: str, member: str) -> None:
        """Add a member to a group."""
        ...

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        """Return the members of each group, at most `limit`, in no order."""
        ...

    def touch(self, names: Sequence[str]) -> list[bool]:
        """Extend the objects' expiry, if the store has one. Return which of them exist."""
        ...

    def remove(self, names: Sequence[str]) -> None: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...
