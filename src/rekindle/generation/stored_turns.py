"""Protocol of a store for turns: `chat` remembers them, `cache` keeps their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.generation.forgetting import Owner, Tombstone


@dataclass(frozen=True, slots=True)
class StoredTurn:
    id: bytes  # 16 bytes, equal for equal turns
    keys: tuple[bytes, ...]  # lookup keys, 16 bytes each; several turns may share one
    data: bytes
    owner: Owner


class TurnStore(Protocol):
    """Any thread may call it. A lost or unreadable turn is a miss."""

    def find(self, keys: Sequence[bytes], *, namespace: str = "") -> list[StoredTurn]:
        """Return every turn that has one of the keys, most recently used first. Blocks briefly.

        Keys differ between namespaces. Only a store with a place for each namespace needs the name.
        """
        ...

    def keep(self, turn: StoredTurn) -> None:
        """Store the turn and return at once. Lookups find the turn now; the disk has it soon.

        A turn whose owner is covered by a deletion is not stored.
        """
        ...

    def touch(self, ids: Sequence[bytes]) -> None:
        """Mark turns as used. Returns at once."""
        ...

    def forget(self, tombstone: Tombstone) -> int:
        """Delete the turns that it covers, also unwritten ones. Return how many. Blocks.

        Raises TierFailed if some of them may still be on disk.
        """
        ...

    def close(self) -> None:
        """Finish pending writes."""
        ...
