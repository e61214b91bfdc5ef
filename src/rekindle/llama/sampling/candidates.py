"""The candidates for one token: llama.cpp's array of tokens, logits and probabilities."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.llama.library import holding_gil

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class _TokenDataArray(ctypes.Structure):
    """llama_token_data_array, with the pointer as a number."""

    _fields_ = (
        ("data", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


_apply = holding_gil("llama_sampler_apply")
_apply.argtypes = [ctypes.c_void_p, ctypes.POINTER(_TokenDataArray)]


class Candidates:
    """A buffer that is filled for each token. Samplers sort it, and drop what they filter out."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.empty(n_vocab, dtype=_TOKEN_DATA)
        self._address = self._data.ctypes.data
        self._array = _TokenDataArray()
        self._reference = ctypes.byref(self._array)

    def fill(self, logits: NDArray[np.float32]) -> None:
        """Take the logits of all tokens. Tokens that are ruled out (-inf) are no candidates."""
        ids = self._ids
        if logits.min() == -np.inf:
            ids = np.flatnonzero(logits > -np.inf).astype(np.int32)
            logits = logits[ids]
        data = self._data[: len(ids)]
        data["id"], data["logit"], data["p"] = ids, logits, 0
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._address, len(ids), -1, False

    def apply(self, sampler: Any) -> None:
        _apply(sampler, self._reference)

    @property
    def selected(self) -> int:
        """The index of the chosen candidate."""
        selected: int = self._array.selected
        return selected

    @property
    def tokens(self) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = self._rest["id"]
        return tokens

    @property
    def logits(self) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._rest["logit"]
        return logits

    @property
    def probabilities(self) -> NDArray[np.float32]:
        probabilities: NDArray[np.float32] = self._rest["p"]
        return probabilities

    @property
    def _rest(self) -> NDArray[Any]:
        # A sampler may drop the first candidates by moving the pointer.
        start = (self._array.data - self._address) // _TOKEN_DATA.itemsize
        return self._data[start : start + self._array.size]

    def __len__(self) -> int:
        size: int = self._array.size
        return size
