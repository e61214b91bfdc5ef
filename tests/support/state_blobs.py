"""llama.cpp's state blobs without the order of their cells.

Rows restored into a context with holes are exported in another order of cells. They are the same
rows, and the same to attention apart from rounding.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.model_state import Payload
from rekindle.llama.state import HEADER_BYTES


def in_order_of_positions(blob: Payload, *, n_cell_bytes: int) -> bytes:
    """For a blob that begins with the rows of some cells; what follows them stays as it is."""
    return _Reader(bytes(blob), n_cell_bytes).read()


class _Reader:
    """The layout is that of `llama_kv_cache::state_write`, with values that are transposed."""

    def __init__(self, blob: bytes, n_cell_bytes: int) -> None:
        self._blob = blob
        self._n_cell_bytes = n_cell_bytes
        self._place = HEADER_BYTES
        self._parts: list[bytes] = []

    def read(self) -> bytes:
        n_streams, n_cells = self._numbers("<II")
        assert n_streams == 1
        if n_cells:
            cells = self._array(n_cells, self._n_cell_bytes)
            order = np.argsort(cells[:, :4].copy().view(np.int32).ravel())
            self._parts.append(cells[order].tobytes())
            is_transposed, n_layers = self._numbers("<II")
            assert is_transposed == 1
            for _ in range(n_layers):
                _, n_row_bytes = self._numbers("<iQ")
                self._parts.append(self._array(n_cells, n_row_bytes)[order].tobytes())
            for _ in range(n_layers):
                _, n_value_bytes, n_values = self._numbers("<iII")
                values = self._array(n_values, n_cells * n_value_bytes)
                values = values.reshape(n_values, n_cells, n_value_bytes)
                self._parts.append(values[:, order].tobytes())
        return b"".join([*self._parts, self._blob[self._place :]])

    def _numbers(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        part = self._blob[self._place : self._place + size]
        self._parts.append(part)
        self._place += size
        return struct.unpack(layout, part)

    def _array(self, n_rows: int, n_row_bytes: int) -> NDArray[np.uint8]:
        n_bytes = n_rows * n_row_bytes
        array = np.frombuffer(self._blob, np.uint8, n_bytes, self._place)
        self._place += n_bytes
        return array.reshape(n_rows, n_row_bytes)
