"""A table of hashed n-grams: the place behind the last occurrence of n tokens.

The table has a fixed size. Two n-grams with the same slot overwrite each other, so the caller
compares the tokens at a place that it was given (why: docs/decisions/0041).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SLOT_BYTES = 4
_FACTOR = 0x9E3779B97F4A7C15  # odd, without a pattern in its bits
_MASK = 2**64 - 1


class NgramTable:
    """Places are numbers from 0 to 2**32 - 2. `n_slots` is a power of two."""

    def __init__(self, n: int, n_slots: int) -> None:
        assert n_slots.bit_count() == 1
        self.n = n
        self.n_slots = n_slots
        self._shift = 64 - (n_slots.bit_length() - 1)
        self._places: NDArray[np.uint32] = np.zeros(n_slots, dtype=np.uint32)  # plus 1; 0: empty
        self._view = self._places.data  # an item is an int, without numpy's detour

    @property
    def n_bytes(self) -> int:
        return self.n_slots * SLOT_BYTES

    def put(self, last: Sequence[int], place: int, seed: int = 0) -> None:
        self._view[self._slot(last, seed)] = place + 1

    def replace(self, last: Sequence[int], place: int) -> int | None:
        """Put the n-gram. Return what `find` would have returned before."""
        slot = self._slot(last, 0)
        before = self._view[slot]
        self._view[slot] = place + 1
        return before - 1 if before else None

    def find(self, last: Sequence[int], seed: int = 0) -> int | None:
        """Return the place behind the n-gram, or behind another one with the same slot."""
        place = self._view[self._slot(last, seed)]
        return place - 1 if place else None

    def put_all(
        self, tokens: NDArray[np.uint64], first_place: int, seed: int = 0, *, spare: bool = False
    ) -> None:
        """Put every n-gram of `tokens`. The one that ends before index i has place first_place + i.

        `spare`: used slots keep what they have.
        """
        n_grams = len(tokens) - self.n + 1
        if n_grams <= 0:
            return
        hashed = np.full(n_grams, seed, dtype=np.uint64)
        for offset in range(self.n):
            hashed = (hashed ^ tokens[offset : offset + n_grams]) * np.uint64(_FACTOR)
            hashed ^= hashed >> np.uint64(32)
        slots = (hashed * np.uint64(_FACTOR)) >> np.uint64(self._shift)
        first = first_place + self.n + 1
        places = np.arange(first, first + n_grams, dtype=np.uint32)
        if spare:
            is_free = self._places[slots] == 0
            slots, places = slots[is_free], places[is_free]
        self._places[slots] = places

    def _slot(self, last: Sequence[int], seed: int) -> int:
        hashed = seed
        for token in last:
            hashed = (hashed ^ token) * _FACTOR & _MASK
            hashed ^= hashed >> 32
        return (hashed * _FACTOR & _MASK) >> self._shift
