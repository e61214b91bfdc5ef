"""Penalties on the tokens of the last part of prompt and reply, with llama.cpp's formula.

llama.cpp counts the window one token at a time and visits every candidate at each token. Here
only the logits of the window's tokens are touched.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.request import Sampling

ABSENT = -1
MOST_REPEAT = 1e30  # with a larger factor, or its inverse, logits leave the range of a float


class Penalties:
    """The counted window. `tokens` are the prompt and the reply so far."""

    def __init__(self, sampling: Sampling, tokens: Sequence[int], n_vocab: int) -> None:
        n_window = sampling.repeat_last_n
        self._repeat = np.float32(min(max(sampling.repeat_penalty, 1 / MOST_REPEAT), MOST_REPEAT))
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        window = tokens[-n_window:]
        self._window = deque(window, maxlen=n_window)
        # The distinct tokens of the window, in no order, and how often each stands in it.
        counts = np.bincount(np.fromiter(window, dtype=np.int64, count=len(window)))
        distinct = np.flatnonzero(counts)
        self._n_distinct = len(distinct)
        capacity = min(n_vocab, n_window)
        self._tokens: NDArray[np.int64] = np.empty(capacity, dtype=np.int64)
        self._counts: NDArray[np.float32] = np.empty(capacity, dtype=np.float32)
        self._tokens[: self._n_distinct] = distinct
        self._counts[: self._n_distinct] = counts[distinct]
        self._places = np.full(n_vocab, ABSENT, dtype=np.int32)  # by token
        self._places[distinct] = np.arange(self._n_distinct)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change the logits of the window's tokens, in place."""
        tokens, counts = self._tokens[: self._n_distinct], self._counts[: self._n_distinct]
        values = logits[tokens]
        if self._repeat != 1.0:
            values = np.where(values <= 0, values * self._repeat, values / self._repeat)
        values -= counts * self._frequency + self._presence
        logits[tokens] = values

    def accept(self, token: int) -> None:
        if len(self._window) == self._window.maxlen:
            self._drop(self._window[0])
        self._window.append(token)
        place = self._places[token]
        if place == ABSENT:
            self._places[token] = place = self._n_distinct
            self._tokens[place], self._counts[place] = token, 1
            self._n_distinct += 1
        else:
            self._counts[place] += 1

    def _drop(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        # The last one takes its place.
        self._n_distinct -= 1
        last = self._n_distinct
        moved = self._tokens[last]
        self._tokens[place], self._counts[place] = moved, self._counts[last]
        self._places[moved] = place
        self._places[token] = ABSENT
