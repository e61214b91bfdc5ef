"""The operations of a shared object store: named bytes, and groups of short names.

`redis_objects` and `s3_objects` implement them; `tier` knows what the bytes mean. Any thread may
call. Every call takes a bounded time and memory, whatever the store answers, and raises TierFailed.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from rekindle.generation.model_state import Payload

KEEP_SECONDS = 7 * 24 * 3600  # after the last use; picked


class ObjectStore(Protocol):
    @property
    def reads_are_dear(self) -> bool:
        """Whether each name read costs a round trip of its own, as with S3."""
        ...

    @property
    def place(self) -> str:
        """The store's address without its password, for people to read."""
        ...

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        """Return the objects' first bytes; None for each that is missing."""
        ...

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        """Write or replace an object, all of it or nothing. Raises TierFull if there is no room."""
        ...

    def overwrite(self, name: str, start: Payload) -> None:
        """Replace the first bytes of an object that was read just now."""
        ...

    def add(self, group: str, member: str, *, keep_seconds: int = KEEP_SECONDS) -> None:
        """Add a member to a group, and keep the group for that long, if the store has expiry."""
        ...

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        """Return the members of each group, at most `limit`, in no order."""
        ...

    def touch(self, names: Sequence[str]) -> list[bool]:
        """Extend the objects' expiry, if the store has one. Return which of them exist."""
        ...

    def discard(self, group: str, members: Sequence[str]) -> None:
        """Remove members from a group."""
        ...

    def remove(self, names: Sequence[str]) -> None: ...

    def pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        """List the names of these kinds, each one letter, whose folder starts with `folder`.

        Only a deletion lists. A name may come twice. Each page takes a bounded time, but a hostile
        store may have pages without end.
        """
        ...

    def ping(self) -> None: ...

    def close(self) -> None: ...
