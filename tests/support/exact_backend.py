"""A fake backend with exact arithmetic and samplers that have a state, as the real ones.

The next token depends on the last two, so replies repeat themselves, and on everything that a
sampler can be asked for: temperature and seed, penalties, biases, a grammar, log probabilities,
a state that does not follow from the tokens.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from rekindle.errors import InvalidRequest
from rekindle.generation.events import TokenLogprobs, TokenSampled
from rekindle.generation.request import Sampling
from tests.support.fake_backend import END, FakeBackend, FakeSampler

N_VOCAB = 24


@cache
def score(*what: object) -> float:
    """Return a number from 0 to 10 that only depends on the arguments."""
    return zlib.crc32(repr(what).encode()) % 10_000 / 1000


class ExactSampler(FakeSampler):
    """Its grammar lets even and odd tokens alternate, and ends after an even one."""

    def __init__(
        self,
        sampling: Sampling,
        reply: Sequence[int],
        n_top: int | None,
        state: tuple[float, ...],
    ) -> None:
        # With Mirostat, tokens also depend on the scores of those before.
        super().__init__(state=state or (0.0,) * bool(sampling.mirostat))
        self._sampling = sampling
        self._n_top = n_top
        self._position = 0
        self._counts: Counter[int] = Counter()
        self._parity = 0
        for token in reply:
            self._accept(token)

    def sample(self, last: tuple[int, ...]) -> TokenSampled:
        assert not self.closed
        scores = {token: self._score(last, token) for token in range(N_VOCAB)}
        if self._sampling.grammar is not None:
            allowed = [token for token in scores if token and token % 2 == self._parity]
            scores = {token: scores[token] for token in (*allowed, *([0] * (not self._parity)))}
        token = max(scores, key=lambda each: (scores[each], each))
        self._accept(token)
        self.state = tuple((each + int(scores[token])) % 3 for each in self.state)
        logprobs = None
        if self._n_top is not None:
            best = sorted(scores, key=lambda each: -scores[each])[: self._n_top]
            logprobs = TokenLogprobs(scores[token], tuple((each, scores[each]) for each in best))
        return TokenSampled(token, logprobs, sampler_state=self.state)

    def _score(self, last: tuple[int, ...], token: int) -> float:
        sampling = self._sampling
        found = score(last, token) - 3.0 * (token == END)
        found += dict(sampling.logit_bias).get(token, 0.0)
        found -= sampling.frequency_penalty * self._counts[token]
        found += 0.02 * score(token, *self.state) if self.state else 0.0
        if sampling.temperature:
            found += sampling.temperature * score(sampling.seed, self._position, token)
        return found

    def _accept(self, token: int) -> None:
        assert token != END or not self.closed
        self._position += 1
        self._counts[token] += 1
        self._parity = 1 - token % 2


class ExactBackend(FakeBackend):
    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> ExactSampler:
        if sampling.grammar is not None and sampling.grammar.source == "bad":
            raise InvalidRequest("bad grammar")
        reply = tokens[len(tokens) - n_reply :]
        sampler = ExactSampler(sampling, reply, n_top_logprobs, state)
        self.samplers.append(sampler)
        return sampler

    def _sample_after(self, sampler: Any, held: list[int]) -> TokenSampled | Exception:
        if held[-1] in self.fail_sampling_of:
            return ValueError("no token fits")
        sampled: TokenSampled = sampler.sample(tuple(held[-2:]))
        return sampled
