"""Protocol of a store for turns: `chat` remembers them, `cache` keeps their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredTurn:
    id: bytes  # 16 bytes, equal for equal turns
    keys: tuple[bytes, ...]  # lookup keys, 16 bytes each; several turns may share one
    data: bytes


class TurnStore(Protocol):
    """Any thread may call it. A lost or unreadable turn is a miss."""

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        """Return every turn that has one of the keys, most recently used first. Blocks briefly."""
        ...

    def keep(self, turn: StoredTurn) -> None:
        """Store the turn and return at once. Lookups find the turn now; the disk has it soon."""
        ...

    def touch(self, ids: Sequence[bytes]) -> None:
        """Mark turns as used. Returns at once."""
        ...

    def close(self) -> None:
        """Finish pending writes."""
        ...
