"""The last step of the sampling: chooses one of the candidates.

Each token gets a new sampler of llama.cpp, seeded for its position (see `draws`). What Mirostat
and adaptive-p remember is kept here, given to the new sampler, and sent along with each token: it
follows from probabilities, so the tokens of a reply cannot restore it.
"""

from typing import Any, Protocol

import numpy as np

from rekindle.generation.request import SamplerName, Sampling
from rekindle.llama.library import holding_gil
from rekindle.llama.sampling.candidates import Candidates

State = tuple[float, ...]
MIROSTAT_M = 100  # candidates from which Mirostat 1 estimates; llama-server's

free_sampler = holding_gil("llama_sampler_free")
_new_dist = holding_gil("llama_sampler_init_dist")
_new_mirostat = holding_gil("llama_sampler_init_mirostat")
_new_mirostat_v2 = holding_gil("llama_sampler_init_mirostat_v2")
_new_adaptive_p = holding_gil("llama_sampler_init_adaptive_p")


class Chooser(Protocol):
    state: State  # after the last accepted token

    def choose(self, candidates: Candidates, seed: int) -> None:
        """Select a candidate. `state` stays as it is."""
        ...

    def accept(self) -> None:
        """Take over the state that follows from the last choice."""
        ...


def chooser_of(sampling: Sampling, n_vocab: int, state: State) -> Chooser:
    """Return the request's chooser. `state` is that of an earlier one; empty: the first."""
    if sampling.mirostat:
        return Mirostat(sampling, n_vocab, state)
    if SamplerName.ADAPTIVE_P in sampling.samplers and sampling.adaptive_target >= 0:
        return AdaptiveP(sampling, state)
    return Dist()


class Dist:
    """Draws by the probabilities."""

    state: State = ()

    def choose(self, candidates: Candidates, seed: int) -> None:
        _apply_once(candidates, _new_dist(seed))

    def accept(self) -> None:
        pass


class Mirostat:
    """Version 1 or 2. The state is `mu`, the greatest surprise that a candidate may have."""

    def __init__(self, sampling: Sampling, n_vocab: int, state: State) -> None:
        self._version = sampling.mirostat
        self._n_vocab = n_vocab
        self._tau = np.float32(sampling.mirostat_tau)
        self._eta = np.float32(sampling.mirostat_eta)
        self.state = state or (float(2 * self._tau),)
        self._next = self.state

    def choose(self, candidates: Candidates, seed: int) -> None:
        (mu,) = self.state
        # A new sampler begins with mu at twice its tau.
        if self._version == 1:
            sampler = _new_mirostat(self._n_vocab, seed, mu / 2, 0.0, MIROSTAT_M)
        else:
            sampler = _new_mirostat_v2(seed, mu / 2, 0.0)
        _apply_once(candidates, sampler)
        surprise = -np.log2(candidates.probabilities[candidates.selected])
        mu_next = np.float32(mu) - self._eta * (surprise - self._tau)
        self._next = (float(mu_next),) if np.isfinite(mu_next) else self.state

    def accept(self) -> None:
        self.state = self._next


class AdaptiveP:
    """Prefers candidates near a probability. The state is a decaying average of those chosen."""

    def __init__(self, sampling: Sampling, state: State) -> None:
        self._target = np.float32(sampling.adaptive_target)
        self._decay = np.float32(sampling.adaptive_decay)
        one = np.float32(1)
        rest = one - self._decay
        self.state = state or (float(self._target / rest), float(one / rest))
        self._next = self.state

    def choose(self, candidates: Candidates, seed: int) -> None:
        weighted_sum, total_weight = map(np.float32, self.state)
        _apply_once(candidates, _new_adaptive_p(-1.0, 0.0, seed))  # off: computes probabilities
        original = candidates.probabilities.copy()
        adapted = np.clip(2 * self._target - weighted_sum / total_weight, 0, 1)
        # A new sampler without decay takes its target as it is.
        _apply_once(candidates, _new_adaptive_p(float(adapted), 0.0, seed))
        chosen = original[candidates.selected]
        self._next = (
            float(chosen + self._decay * weighted_sum),
            float(np.float32(1) + self._decay * total_weight),
        )

    def accept(self) -> None:
        self.state = self._next


def _apply_once(candidates: Candidates, sampler: Any) -> None:
    candidates.apply(sampler)
    free_sampler(sampler)
