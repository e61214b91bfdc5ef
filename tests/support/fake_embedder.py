"""An Embedder without a model, and a journal of its calls."""

from collections.abc import Callable, Sequence

import numpy as np

from rekindle.errors import RekindleError


def vector_of(tokens: Sequence[int]) -> bytes:
    return np.array([len(tokens), sum(tokens)], dtype="<f4").tobytes()


class FakeEmbedder:
    n_dimensions = 2
    ranks = False

    def __init__(
        self,
        *,
        n_ctx: int = 64,
        n_part: int = 4,
        on_part: Callable[[], object] = lambda: None,
    ) -> None:
        self.n_ctx = n_ctx
        self.journal: list[tuple[int, ...] | str] = []  # the tokens of each part, and "rest"
        self.failures: list[RekindleError | Exception] = []  # of the next parts
        self._n_part = n_part
        self.on_part = on_part
        self._tokens: tuple[int, ...] = ()
        self._n_done = 0

    def begin(self, tokens: Sequence[int]) -> None:
        assert 0 < len(tokens) <= self.n_ctx
        self._tokens, self._n_done = tuple(tokens), 0

    def advance(self) -> bytes | None:
        assert self._n_done < len(self._tokens)
        self.on_part()
        if self.failures:
            raise self.failures.pop(0)
        stop = min(self._n_done + self._n_part, len(self._tokens))
        self.journal.append(self._tokens[self._n_done : stop])
        self._n_done = stop
        return vector_of(self._tokens) if stop == len(self._tokens) else None

    def rest(self) -> None:
        self.journal.append("rest")
