"""Moves the rows of slots to the lowest free cells, within the device's own memory.

Attention reads all cells up to the highest used one. On a GPU a free cell below that costs as
much as a used one, for every token. A CPU skips free cells in tiles of 64, at an eighth of the
cost.
"""

from rekindle.errors import DecodeFailed, EngineError
from rekindle.llama.devices import free_bytes, gpus
from rekindle.llama.state import ON_DEVICE, SlotMemory

PIECE_ROWS = 512  # rows that exist twice during a move; picked
ROOM_FACTOR = 4  # pieces that must fit into free memory, or llama.cpp may abort; picked


class Compactor:
    """Compacts models whose memory is attention rows and nothing else."""

    def __init__(self, memory: SlotMemory, row_bytes: int) -> None:
        self._memory = memory
        self._devices = gpus()
        self._room_bytes = ROOM_FACTOR * PIECE_ROWS * row_bytes

    @property
    def has_room(self) -> bool:
        return all(free_bytes(device) > self._room_bytes for device in self._devices)

    def move_down(self, slot: int, start: int) -> None:
        """Move the slot's rows from `start` on. Shared cells would be duplicated."""
        n_rows = self._memory.n_positions(slot)
        try:
            for first in range(start, n_rows, PIECE_ROWS):
                self._move(slot, first, min(first + PIECE_ROWS, n_rows))
        except EngineError as error:
            message = f"The rows of a slot were lost while moving them: {error.message}"
            raise DecodeFailed(message, rows_intact=False) from error

    def _move(self, slot: int, start: int, stop: int) -> None:
        memory = self._memory
        memory.copy(slot, memory.scratch, start, stop)
        rows = memory.read(memory.scratch, ON_DEVICE)  # the blob only says where the rows are
        memory.clear(slot, start, stop)
        memory.write(memory.scratch, rows.data, ON_DEVICE)
        memory.move_from_scratch(slot, start, stop)
