"""The seam between `chat`, which remembers turns, and `cache`, which keeps their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredTurn:
    id: bytes  # 16 bytes, equal for equal turns
    keys: tuple[bytes, ...]  # what it is found by, 16 bytes each; several turns may share one
    data: bytes


class TurnStore(Protocol):
    """Any thread may call it. What it loses or cannot read is a miss."""

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        """Every turn that has one of the keys, most recently used first. Blocks for a moment."""
        ...

    def keep(self, turn: StoredTurn) -> None:
        """Returns at once; the turn is found from now on, and is on disk soon."""
        ...

    def touch(self, ids: Sequence[bytes]) -> None:
        """They were used once more. Returns at once."""
        ...

    def close(self) -> None:
        """Writes what is still on its way."""
        ...
