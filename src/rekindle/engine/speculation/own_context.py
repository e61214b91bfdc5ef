"""Finds where the last tokens of a sequence occurred before, in the sequence itself."""

from collections.abc import Sequence

import numpy as np

from rekindle.cache.drafts.ngrams import NgramTable

N = 3  # tokens that must agree
TOKENS_PER_STEP = 2048  # of a prompt that are read in one step: up to a few milliseconds
MIN_SLOTS = 1024
FEW = 8  # n-grams that are faster to put one by one


class OwnContext:
    """`tokens` is shared with the sequence, which only ever appends to it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._n_read = 0  # n-grams that end before this position are in the table
        self._table = _table_for(len(tokens))

    @property
    def n_bytes(self) -> int:
        return self._table.n_bytes

    def find(self) -> int | None:
        """Return the position behind the last earlier occurrence of the last N tokens."""
        tokens = self._tokens
        if not self._catch_up():
            return None
        last = tokens[-N:]
        place = self._table.replace(last, len(tokens))
        self._n_read = len(tokens)
        if place is None or place >= len(tokens) or tokens[place - N : place] != last:
            return None
        return place

    def _catch_up(self) -> bool:
        """Read what is new but for the last token. Return False if more is left than one step's."""
        n_tokens = len(self._tokens)
        if 4 * n_tokens > self._table.n_slots:
            self._table, self._n_read = _table_for(2 * n_tokens), 0
        stop = min(n_tokens - 1, self._n_read + TOKENS_PER_STEP)
        if stop < N:
            return False
        if stop <= self._n_read + FEW:
            for end in range(max(self._n_read + 1, N), stop + 1):
                self._table.put(self._tokens[end - N : end], end)
        else:
            start = max(self._n_read + 1 - N, 0)
            tokens = np.array(self._tokens[start:stop], dtype=np.uint64)
            self._table.put_all(tokens, start)
        self._n_read = max(stop, self._n_read)
        return stop == n_tokens - 1


def _table_for(n_tokens: int) -> NgramTable:
    """Return a table in which at most one place in five is overwritten by another n-gram."""
    return NgramTable(N, max(MIN_SLOTS, 1 << (4 * n_tokens).bit_length()))
