"""llama.cpp's samplers in the order that a request asks for.

Only for requests with more than the usual samplers: `sampler` has a faster way for those.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.request import SamplerName, Sampling
from rekindle.llama.library import holding_gil, lib
from rekindle.llama.sampling.candidates import Candidates
from rekindle.llama.sampling.choosers import State, chooser_of, free_sampler
from rekindle.llama.sampling.draws import draw_seed
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.penalties import MOST_REPEAT
from rekindle.llama.tokenizer.vocabulary import Vocabulary

MOST_INFILL = 100  # candidates of the infill sampler; picked
LOWEST_TEMPERATURE = 1e-5  # below it, logits / temperature overflow a float
# With the chooser's random number, XTC would remove the likeliest tokens of some draws only.
XTC_STREAM = 0x58544300

_new_xtc = holding_gil("llama_sampler_init_xtc")
_accept = holding_gil("llama_sampler_accept")


class SamplerChain:
    """The samplers of one reply, without grammar, biases and the penalties that come first.

    `tokens` are the prompt and the reply so far. `state` is that of the chain which sampled the
    last of them.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: Vocabulary,
        dry: DrySamplers,
        *,
        tokens: Sequence[int],
        state: State,
    ) -> None:
        self._sampling = sampling
        self._candidates = Candidates(vocabulary.n_vocab)
        self._chooser = chooser_of(sampling, vocabulary.n_vocab, state)
        self._steps: list[Any | None] = []  # None: XTC, which is new for each token
        self._followers: list[Any] = []  # steps that depend on earlier tokens
        for step, n_window in _steps(sampling, vocabulary, dry):
            self._steps.append(step)
            if n_window:
                self._followers.append(step)
                for token in tokens[-n_window:]:
                    lib.llama_sampler_accept(step, token)
        self._chosen: int | None = None

    @property
    def state(self) -> State:
        return self._chooser.state

    def choose(self, logits: NDArray[np.float32], seed: int, position: int) -> int:
        """Return a token for the reply's `position`. May be called again with other logits."""
        candidates = self._candidates
        candidates.fill(logits)
        if not len(candidates):
            return int(logits.argmax())
        for step in self._steps:
            if step is None:
                self._apply_xtc(draw_seed(seed ^ XTC_STREAM, position))
            else:
                candidates.apply(step)
        self._chooser.choose(candidates, draw_seed(seed, position))
        self._chosen = int(candidates.tokens[candidates.selected])
        if logits[self._chosen] == -np.inf:  # infill ends a reply even where that is forbidden
            self._chosen = None
            return int(logits.argmax())
        return self._chosen

    def accept(self, token: int) -> None:
        """Take the reply's next token, chosen or forced."""
        if token == self._chosen:
            self._chooser.accept()
        self._chosen = None
        for step in self._followers:
            _accept(step, token)

    def best(self, n: int) -> Iterator[tuple[int, float]]:
        """Yield the `n` likeliest candidates of the last choice, with their probabilities."""
        tokens, probabilities = self._candidates.tokens, self._candidates.probabilities
        for index in np.argsort(-probabilities, kind="stable")[:n]:
            if probabilities[index] > 0:
                yield int(tokens[index]), float(probabilities[index])

    def probability(self, token: int) -> float:
        """Return the token's probability in the last choice."""
        [places] = np.nonzero(self._candidates.tokens == token)
        return float(self._candidates.probabilities[places[0]]) if len(places) else 0.0

    def close(self) -> None:
        for step in self._steps:
            if step is not None:
                free_sampler(step)
        self._steps, self._followers = [], []

    def _apply_xtc(self, seed: int) -> None:
        sampling = self._sampling
        step = _new_xtc(sampling.xtc_probability, sampling.xtc_threshold, sampling.min_keep, seed)
        self._candidates.apply(step)
        free_sampler(step)


def _steps(
    sampling: Sampling, vocabulary: Vocabulary, dry: DrySamplers
) -> Iterator[tuple[Any | None, int]]:
    """Yield samplers that have an effect, each with the number of earlier tokens that it reads."""
    if sampling.mirostat:
        yield lib.llama_sampler_init_temp(_temperature(sampling)), 0
        return
    # `sampler` applies penalties that come first.
    n_done = 1 if sampling.has_penalties else 0
    for name in sampling.samplers[n_done:]:
        match name:
            case SamplerName.PENALTIES if sampling.repeat_last_n:
                yield _penalties(sampling, vocabulary), sampling.repeat_last_n
            case SamplerName.DRY if sampling.dry_multiplier and sampling.dry_penalty_last_n:
                yield dry.new(sampling), sampling.dry_penalty_last_n
            case SamplerName.TOP_N_SIGMA if sampling.top_n_sigma > 0:
                yield lib.llama_sampler_init_top_n_sigma(sampling.top_n_sigma), 0
            case SamplerName.TOP_K if sampling.top_k > 0:
                yield lib.llama_sampler_init_top_k(min(sampling.top_k, vocabulary.n_vocab)), 0
            case SamplerName.TYPICAL_P if sampling.typical_p < 1:
                yield lib.llama_sampler_init_typical(sampling.typical_p, sampling.min_keep), 0
            case SamplerName.TOP_P if sampling.top_p < 1:
                yield lib.llama_sampler_init_top_p(sampling.top_p, sampling.min_keep), 0
            case SamplerName.MIN_P if sampling.min_p > 0:
                yield lib.llama_sampler_init_min_p(sampling.min_p, sampling.min_keep), 0
            case SamplerName.XTC if sampling.has_xtc:
                yield None, 0
            case SamplerName.TEMPERATURE:
                yield _temp_ext(sampling), 0
            case SamplerName.INFILL if _can_end(vocabulary):
                # It compares all candidates with each other.
                yield lib.llama_sampler_init_top_k(MOST_INFILL), 0
                yield lib.llama_sampler_init_infill(vocabulary.handle), 0


def _can_end(vocabulary: Vocabulary) -> bool:
    """Return whether the vocabulary has a token that ends a text: infill needs one."""
    ends = lib.llama_vocab_eot(vocabulary.handle), lib.llama_vocab_eos(vocabulary.handle)
    return any(token >= 0 for token in ends)


def _temperature(sampling: Sampling) -> float:
    return sampling.temperature if sampling.temperature >= LOWEST_TEMPERATURE else 0.0


def _temp_ext(sampling: Sampling) -> Any:
    spread = max(sampling.dynatemp_range, 0.0)
    return lib.llama_sampler_init_temp_ext(
        _temperature(sampling), spread, sampling.dynatemp_exponent
    )


def _penalties(sampling: Sampling, vocabulary: Vocabulary) -> Any:
    return lib.llama_sampler_init_penalties(
        vocabulary.n_vocab,
        sampling.repeat_last_n,
        min(max(sampling.repeat_penalty, 1 / MOST_REPEAT), MOST_REPEAT),
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
