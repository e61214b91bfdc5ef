"""Exports the rows of a slot as bytes, and imports them, through llama.cpp's state API.

A state blob is `header | attention part | partial part`. The partial part cannot be cut at a
position: the sliding window, the recurrent state. Attention rows are moved in ranges through a
scratch sequence. The partial part is moved whole, as a checkpoint, and imported last.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import ContextFull, EngineError
from rekindle.generation.model_state import ModelClass, Payload
from rekindle.huge_pages import filled_buffer
from rekindle.llama.devices import pinned_memory
from rekindle.llama.host_memory import HostMemory
from rekindle.llama.library import lib, recent_errors

HEADER_BYTES = 8  # magic and sequence id
WHOLE, PARTIAL, ON_DEVICE = 0, 1, 2  # LLAMA_STATE_SEQ_FLAGS_*

_SPLIT = frozenset({ModelClass.SLIDING_WINDOW, ModelClass.HYBRID})


class SlotMemory:
    """The sequences of one context. Owned by the thread that owns the context.

    `scratch` is a sequence that no request uses. Callers that fill it also empty it.
    """

    def __init__(self, context: Any, *, scratch: int) -> None:
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self.scratch = scratch
        self.host_memory = HostMemory(pinned_memory())
        self._scratch_is_spent = False

    def n_positions(self, slot: int) -> int:
        last: int = lib.llama_memory_seq_pos_max(self._memory, slot)
        return last + 1

    def first_position(self, slot: int) -> int:
        """Return where the window starts, for models with one; -1 for an empty slot."""
        first: int = lib.llama_memory_seq_pos_min(self._memory, slot)
        return first

    def clear(self, slot: int, start: int = -1, stop: int = -1) -> bool:
        """Remove all rows, or those of a range. Return False if llama.cpp refuses.

        A range that ends before the last row is for models with attention alone.
        """
        self.empty_spent_scratch()
        return bool(lib.llama_memory_seq_rm(self._memory, slot, start, stop))

    def clear_all(self) -> None:
        self._scratch_is_spent = False
        # This also frees cells whose position is out of range; removing sequences does not.
        # The data is cleared too: a failed decode may have left a NaN. Attention without flash
        # multiplies masked cells by zero instead of skipping them.
        with_data = True
        lib.llama_memory_clear(self._memory, with_data)

    def copy(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        """Let the target share the source's cells. Ranges are for attention alone."""
        self.empty_spent_scratch()
        lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def move_from_scratch(self, slot: int, start: int, stop: int) -> None:
        """Move rows into the slot. Only for models with attention alone.

        The scratch is emptied later, or by the next write. In a plain llama.cpp, emptying walks
        over all cells, and a write does so too (see scripts/llama_cpp/cells.patch).
        """
        lib.llama_memory_seq_cp(self._memory, self.scratch, slot, start, stop)
        self._scratch_is_spent = True

    def empty_spent_scratch(self) -> None:
        """Empty the scratch after a move: it may still hold cells of a block that was cut."""
        if self._scratch_is_spent:
            self._scratch_is_spent = False
            self.clear(self.scratch)

    def read(self, slot: int, flags: int, n_bytes: int | None = None) -> NDArray[np.uint8]:
        """Return the slot's blob. Without `n_bytes`, llama.cpp counts its size first."""
        self.empty_spent_scratch()
        if n_bytes is None:
            n_bytes = lib.llama_state_seq_get_size_ext(self._context, slot, flags)

        def fill(view: memoryview) -> None:
            target = _pointer(np.frombuffer(view, dtype=np.uint8))
            written = lib.llama_state_seq_get_data_ext(self._context, target, n_bytes, slot, flags)
            if written != n_bytes:
                raise EngineError(f"llama.cpp exported {written} of {n_bytes} bytes of a slot.")

        pinned = self.host_memory.allocate(n_bytes)
        if pinned is None:
            return np.frombuffer(filled_buffer(n_bytes, fill), dtype=np.uint8)
        fill(pinned.data)
        return pinned

    def write(self, slot: int, blob: Payload, flags: int) -> None:
        """Replace the slot's content. If it raises, the slot must be cleared."""
        if slot == self.scratch:
            self._scratch_is_spent = False
        else:
            self.empty_spent_scratch()
        source = np.frombuffer(blob, dtype=np.uint8)
        recent_errors.clear()
        consumed = lib.llama_state_seq_set_data_ext(
            self._context, _pointer(source), source.nbytes, slot, flags
        )
        if 0 < consumed == source.nbytes:
            return
        if any("cells in kv cache" in line for line in recent_errors):
            raise ContextFull("No room in the context for the stored rows of a slot.")
        raise EngineError(f"llama.cpp read {consumed} of {source.nbytes} bytes of a stored slot.")


class StateAccess:
    """Rows and checkpoints of slots, for a model of a known class.

    `blank` is the smallest partial blob that replaces any other, for models with a partial part.
    """

    def __init__(self, memory: SlotMemory, model_class: ModelClass, blank: bytes = b"") -> None:
        assert bool(blank) == (model_class in _SPLIT)
        self._memory = memory
        self._model_class = model_class
        self.has_rows = model_class is ModelClass.DENSE or model_class in _SPLIT
        self.has_checkpoints = model_class is not ModelClass.DENSE
        self._blank = blank
        self._blank_tail_bytes = len(blank[HEADER_BYTES:])
        self._empty_tail = memory.read(memory.scratch, PARTIAL)[HEADER_BYTES:] if blank else None
        self._bytes_of_rows: dict[int, int] = {}  # size of a blob by its number of rows

    def expect_exports(self, n_rows: int) -> None:
        """Prepare memory for exports of this size.

        Each row adds the same number of bytes, so two known sizes give all others.
        """
        sizes = sorted(self._bytes_of_rows.items())
        if len(sizes) < 2:
            return
        (few, few_bytes), (more, more_bytes) = sizes[:2]
        n_bytes = few_bytes + (n_rows - few) * (more_bytes - few_bytes) // (more - few)
        self._memory.host_memory.expect(n_bytes)

    def export_rows(self, slot: int, start: int, stop: int) -> memoryview:
        """Return a blob with the attention rows of [start, stop) and an empty partial part."""
        assert self.has_rows
        memory = self._memory
        n_bytes = self._bytes_of_rows.get(stop - start)
        memory.copy(slot, memory.scratch, start, stop)
        try:
            if self._blank:
                # Otherwise each block would contain the window or the recurrent state, which may
                # be ten times as large.
                memory.write(memory.scratch, self._blank, PARTIAL)
            blob = memory.read(memory.scratch, WHOLE, n_bytes)
        finally:
            memory.clear(memory.scratch)
        self._bytes_of_rows[stop - start] = len(blob)
        if self._empty_tail is not None:
            end = len(blob) - self._blank_tail_bytes
            blob = blob[: end + len(self._empty_tail)]
            blob[end:] = self._empty_tail
        return blob.data.toreadonly()

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        """Append rows to those of the slot. Ranges must come in position order."""
        assert self.has_rows
        memory = self._memory
        try:
            memory.write(memory.scratch, rows, WHOLE)
        except EngineError:
            memory.clear(memory.scratch)
            memory.clear(slot)
            raise
        if self._model_class is ModelClass.DENSE:
            memory.move_from_scratch(slot, start, stop)
        else:
            memory.copy(memory.scratch, slot, start, stop)
            memory.clear(memory.scratch)

    def export_checkpoint(self, slot: int) -> memoryview:
        """Return the state that only exists at the slot's last position."""
        assert self.has_checkpoints
        memory = self._memory
        if self._model_class is ModelClass.OPAQUE:
            # Some opaque models copy sequences only at the next decode, so scratch cannot be used.
            return memory.read(slot, WHOLE).data.toreadonly()
        # Blobs contain their sequence id. Through the scratch, equal states give equal bytes.
        memory.copy(slot, memory.scratch)
        try:
            return memory.read(memory.scratch, PARTIAL).data.toreadonly()
        finally:
            memory.clear(memory.scratch)

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        """Import a checkpoint, as the last step of a restore: importing rows resets this part."""
        assert self.has_checkpoints
        flags = WHOLE if self._model_class is ModelClass.OPAQUE else PARTIAL
        try:
            self._memory.write(slot, checkpoint, flags)
        except EngineError:
            self._memory.clear(slot)
            raise


def _pointer(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
