"""The rows of a slot as bytes, and back: llama.cpp's state API in the call order that works.

A state blob is `header | attention part | partial part`. The partial part is what cannot be
cut at a position: the sliding window, the recurrent state. Attention rows travel as ranges
through a scratch sequence; the partial part travels whole, as a checkpoint, and goes in last.
"""

import ctypes
from typing import Any

import numpy as np

from rekindle.errors import EngineError
from rekindle.llama.library import lib

_HEADER_BYTES = 8  # magic and sequence id
_WHOLE, _PARTIAL = 0, 1  # LLAMA_STATE_SEQ_FLAGS_*


class StateAccess:
    """Reads and writes slots of one context. Owned by the thread that owns the context."""

    def __init__(self, context: Any, *, scratch: int, has_rows: bool, has_partial: bool) -> None:
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._scratch = scratch
        self._has_rows = has_rows
        self._has_partial = has_partial
        self._remove(scratch)
        self._header = self._get(scratch, _WHOLE)[:_HEADER_BYTES]
        self._empty_partial = (
            self._get(scratch, _PARTIAL)[_HEADER_BYTES:] if has_rows and has_partial else b""
        )

    def export_rows(self, slot: int, start: int, stop: int) -> bytes:
        """The attention rows of positions [start, stop); empty for a recurrent model."""
        if not self._has_rows:
            return b""
        lib.llama_memory_seq_cp(self._memory, slot, self._scratch, start, stop)
        whole = self._get(self._scratch, _WHOLE)
        n_partial = self._size(self._scratch, _PARTIAL) - _HEADER_BYTES if self._has_partial else 0
        self._remove(self._scratch)
        return whole[_HEADER_BYTES : len(whole) - n_partial]

    def import_rows(self, slot: int, start: int, stop: int, rows: bytes) -> None:
        """Adds rows behind those the slot holds. Ranges must come in position order."""
        if not self._has_rows:
            return
        self._put(self._scratch, self._header + rows + self._empty_partial, _WHOLE, slot)
        lib.llama_memory_seq_cp(self._memory, self._scratch, slot, start, stop)
        self._remove(self._scratch)

    def export_checkpoint(self, slot: int) -> bytes:
        """What only exists at the slot's last position; empty for a dense model."""
        if not self._has_partial:
            return b""
        # Blobs name their sequence: through the scratch slot equal states give equal bytes.
        lib.llama_memory_seq_cp(self._memory, slot, self._scratch, -1, -1)
        checkpoint = self._get(self._scratch, _PARTIAL)
        self._remove(self._scratch)
        return checkpoint

    def import_checkpoint(self, slot: int, checkpoint: bytes) -> None:
        """The last step of a restore: copying rows from the scratch slot resets this part."""
        if self._has_partial:
            self._put(slot, checkpoint, _PARTIAL, slot)

    def _size(self, slot: int, flags: int) -> int:
        size: int = lib.llama_state_seq_get_size_ext(self._context, slot, flags)
        return size

    def _get(self, slot: int, flags: int) -> bytes:
        buffer = np.empty(self._size(slot, flags), dtype=np.uint8)
        written = lib.llama_state_seq_get_data_ext(
            self._context, _pointer(buffer.ctypes.data), buffer.nbytes, slot, flags
        )
        if written != buffer.nbytes:
            raise EngineError(f"llama.cpp exported {written} of {buffer.nbytes} bytes of a slot.")
        return buffer.tobytes()

    def _put(self, target: int, blob: bytes, flags: int, slot: int) -> None:
        source = np.frombuffer(blob, dtype=np.uint8)
        consumed = lib.llama_state_seq_set_data_ext(
            self._context, _pointer(source.ctypes.data), len(blob), target, flags
        )
        # A failed put leaves undefined rows behind, so both sequences go.
        if consumed != len(blob):
            self._remove(self._scratch)
            self._remove(slot)
            raise EngineError(f"llama.cpp took {consumed} of {len(blob)} bytes of a stored slot.")

    def _remove(self, slot: int) -> None:
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)


def _pointer(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
