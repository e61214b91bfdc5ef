"""Chooses a token from a row of logits: greedy and penalties in numpy, the rest in llama.cpp.

The usual samplers run in one call of llama.cpp on its own logits. `chain` has all others.
"""

import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.events import TokenLogprobs
from rekindle.generation.request import Sampling
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.grammar.shortest_end import EndFinder
from rekindle.llama.library import holding_gil, lib, sample_holding_gil
from rekindle.llama.sampling.candidates import Candidates
from rekindle.llama.sampling.chain import LOWEST_TEMPERATURE, SamplerChain
from rekindle.llama.sampling.choosers import State
from rekindle.llama.sampling.draws import draw_seed
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.landing import END_OF_TURN, Lander
from rekindle.llama.sampling.penalties import Penalties
from rekindle.llama.sampling.reasoning import ReasoningBudget
from rekindle.llama.tokenizer.vocabulary import Vocabulary

Logits = NDArray[np.float32]

LOWEST_LOGPROB = -1e4  # JSON cannot carry -inf
MAX_REFUSED = 64  # tokens that would open the reasoning again, at one position; picked

# Called for every sampled token.
new_dist = holding_gil("llama_sampler_init_dist")
add_sampler = holding_gil("llama_sampler_chain_add")
remove_sampler = holding_gil("llama_sampler_chain_remove")
free_sampler = holding_gil("llama_sampler_free")


class RowPlace(NamedTuple):
    context: Any
    batch_index: int


class LlamaSampler:
    """The sampling state of one sequence: penalties, random numbers, grammar.

    `tokens` are the prompt and the reply so far; the last `n_reply` of them are the reply's. The
    state is the one that a sampler has after sampling these itself. `sampling.repeat_last_n` is a
    count here, as is `dry_penalty_last_n`: the caller has replaced -1 by the context's length.
    `finder` None: the grammar may be cut off after `n_left` more tokens.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: Vocabulary,
        dry: DrySamplers,
        *,
        grammar: Matcher | LazyGrammar | None,
        finder: EndFinder | None = None,
        n_top_logprobs: int | None,
        tokens: Sequence[int],
        n_reply: int,
        n_left: int = 0,
        is_landing: bool = False,
        state: State = (),
    ) -> None:
        self._matcher: Matcher | None = None
        self._lazy_grammar = grammar if isinstance(grammar, LazyGrammar) else None
        self._finder = finder
        self._lander: Lander | None = None
        self._n_left = n_left + n_reply
        self._n_top_logprobs = n_top_logprobs
        self._bias_tokens, self._bias_values = _biases(sampling, vocabulary)
        self._eog_tokens = vocabulary.eog_tokens
        self._end_tokens = np.array(sorted(vocabulary.eog_tokens), dtype=np.int64)
        self._penalties: Penalties | None = None
        if sampling.has_penalties:
            self._penalties = Penalties(sampling, tokens, vocabulary.n_vocab)
        self._budget: ReasoningBudget | None = None
        if sampling.reasoning_limit is not None:
            self._budget = ReasoningBudget(sampling.reasoning_limit, vocabulary)
        self._only_argmax = (
            _is_greedy(sampling)
            and sampling.is_usual
            and self._penalties is None
            and n_top_logprobs is None
            and not len(self._bias_tokens)
        )
        self.is_plain_greedy = self._is_plain_greedy()
        self._position = n_reply  # of the next token, in the reply
        if isinstance(grammar, Matcher):
            self._begin_grammar(grammar)
        if n_reply:
            self._continue(tokens[-n_reply:])
        if self._lander is not None:
            self._lander.is_landing = is_landing
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._seed = seed & 0xFFFFFFFF
        self._others: SamplerChain | None = None
        if not sampling.is_usual:
            self._others = SamplerChain(sampling, vocabulary, dry, tokens=tokens, state=state)
        self._shows_choice = sampling.post_sampling_probs
        self._chain = _build_chain(sampling, vocabulary)
        # llama.cpp's typical sampler adds 0 * log(0) to the entropy for each excluded token.
        self._takes_whole_rows = sampling.typical_p >= 1.0
        self._n_filters = 0 if self._chain is None else lib.llama_sampler_chain_n(self._chain) - 1

    @property
    def is_landing(self) -> bool:
        """Whether the last token was forced, so that a call ends in time."""
        return self._lander is not None and self._lander.is_landing

    @property
    def state(self) -> State:
        """The state that does not follow from the tokens, for a sampler that continues."""
        return self._others.state if self._others is not None else ()

    def sample(
        self, logits: Logits, place: RowPlace | None = None
    ) -> tuple[int, TokenLogprobs | None]:
        """Return the next token. The logits are changed.

        `place` is where they are in a context; None: they are a copy.
        """
        n_top = self._n_top_logprobs
        raw = logits.copy() if n_top is not None and not self._shows_choice else None
        forced = self._forced(logits)
        token = self._choose(logits, place) if forced is None else forced
        self.accept(token)
        if n_top is None:
            return token, None
        if raw is not None:
            return token, _logprobs(raw, token, n_top)
        if forced is not None or self._others is None:
            return token, TokenLogprobs(0.0, ((token, 0.0),) if n_top else ())
        return token, _chosen_logprobs(self._others, token, n_top)

    def _forced(self, logits: Logits) -> int | None:
        """Return the token that has to come, whatever the model prefers."""
        if self._lander is not None:
            forced = self._lander.forced()
            return self._best_end(logits) if forced == END_OF_TURN else forced
        return self._budget.forced() if self._budget is not None else None

    def _choose(self, logits: Logits, place: RowPlace | None) -> int:
        token = self._choose_among(logits, place)
        if self._lander is not None and token not in self._eog_tokens:
            token = self._lander.checked(token)
            return self._best_end(logits) if token == END_OF_TURN else token
        return token

    def _choose_among(self, logits: Logits, place: RowPlace | None) -> int:
        unbiased: Logits | None = None
        if len(self._bias_tokens):
            unbiased = logits[self._bias_tokens]
            logits[self._bias_tokens] += self._bias_values
        if self._matcher is not None:
            self._matcher.apply(logits)
            if unbiased is not None and logits.max() == -np.inf:
                # The grammar overrides the client's biases.
                logits[self._bias_tokens] = unbiased
                self._matcher.apply(logits)
        elif self._may_not_end:
            logits[self._end_tokens] = -np.inf
        if self._penalties is not None:
            self._penalties.apply(logits)
        token = self._pick(logits, place)
        if self._budget is not None and self._budget.may_not_open:
            for _ in range(MAX_REFUSED):
                if not self._budget.opens(token):
                    break
                logits[token] = -np.inf
                token = self._pick(logits, place)
        return token

    def _pick(self, logits: Logits, place: RowPlace | None) -> int:
        if self._others is not None:
            return self._others.choose(logits, self._seed, self._position)
        return int(logits.argmax()) if self._chain is None else self._draw(logits, place)

    def _best_end(self, logits: Logits) -> int:
        return int(self._end_tokens[logits[self._end_tokens].argmax()])

    @property
    def _may_not_end(self) -> bool:
        return self._lazy_grammar is not None and self._lazy_grammar.must_begin

    def forced_tokens(self) -> list[int]:
        """Return the tokens that the grammar probably leaves as the only choice."""
        return [] if self._matcher is None else self._matcher.forced_tokens()

    def accept(self, token: int) -> None:
        """Take a sampled token. Callers that bypass `sample` must call this."""
        self._position += 1
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._others is not None:
            self._others.accept(token)
        self._follow(token)

    def _follow(self, token: int) -> None:
        """Take a token into the states of the grammar and the reasoning."""
        self._n_left -= 1
        if self._lander is not None and token not in self._eog_tokens:
            self._lander.accept(token)
        if self._matcher is not None:
            self._matcher.accept(token)
        elif self._lazy_grammar is not None and self._lazy_grammar.accept(token):
            self._begin_grammar(self._lazy_grammar.matcher)
        if self._budget is not None:
            self._budget.accept(token)
            self.is_plain_greedy = self._is_plain_greedy()

    def _begin_grammar(self, matcher: Matcher) -> None:
        self._matcher, self._lazy_grammar = matcher, None
        self._budget = None  # the reasoning is over
        self.is_plain_greedy = False
        if self._finder is not None and len(self._end_tokens):
            self._lander = Lander(matcher, self._finder, n_left=self._n_left)

    def _continue(self, reply: Sequence[int]) -> None:
        """Take the tokens of a reply that another sampler has begun."""
        for index, token in enumerate(reply):
            if self._matcher is not None and self._lander is None:
                self._matcher.accept_all(list(reply[index:]))
                return
            self._follow(token)

    def _is_plain_greedy(self) -> bool:
        """Return whether only the largest logit matters. Such rows share one argmax."""
        return (
            self._only_argmax
            and self._matcher is None
            and not self._may_not_end
            and (self._budget is None or not (self._budget.is_spent or self._budget.may_not_open))
        )

    def _draw(self, logits: Logits, place: RowPlace | None) -> int:
        """Sample with the random number that belongs to this position of the reply."""
        free_sampler(remove_sampler(self._chain, self._n_filters))
        add_sampler(self._chain, new_dist(draw_seed(self._seed, self._position)))
        if place is not None and self._takes_whole_rows:
            token: int = sample_holding_gil(self._chain, place.context, place.batch_index)
            return token
        candidates = Candidates(len(logits))
        candidates.fill(logits)
        if not len(candidates):
            return int(logits.argmax())
        candidates.apply(self._chain)
        return int(candidates.tokens[candidates.selected])

    def close(self) -> None:
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None
        if self._others is not None:
            self._others.close()


def greedy_tokens(logits: Logits, rows: Sequence[int]) -> list[int]:
    """Return the best token of each of these rows."""
    if len(rows) < len(logits):  # rows behind drafted tokens, which may have been wrong
        return [int(logits[row].argmax()) for row in rows]
    best: list[int] = logits.argmax(axis=1).tolist()
    return [best[row] for row in rows]


def _biases(sampling: Sampling, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], Logits]:
    biases = dict(sampling.logit_bias)
    if sampling.ignore_eos:
        biases.update(dict.fromkeys(vocabulary.eog_tokens, float("-inf")))
    tokens = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
    return tokens, np.fromiter(biases.values(), dtype=np.float32, count=len(biases))


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < LOWEST_TEMPERATURE


def _build_chain(sampling: Sampling, vocabulary: Vocabulary) -> Any | None:
    """Return samplers in llama.cpp's default order; None: plain argmax gives the same token.

    The last one draws; `_draw` replaces it for each token.
    """
    if _is_greedy(sampling) or not sampling.is_usual:
        return None
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())

    def add(sampler: Any) -> None:
        lib.llama_sampler_chain_add(chain, sampler)

    if sampling.top_k > 0:
        add(lib.llama_sampler_init_top_k(min(sampling.top_k, vocabulary.n_vocab)))
    if sampling.typical_p < 1.0:
        add(lib.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1.0:
        add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
    add(lib.llama_sampler_init_temp(sampling.temperature))
    add(lib.llama_sampler_init_dist(0))
    return chain


def _logprobs(raw: Logits, token: int, n_top: int) -> TokenLogprobs:
    peak = raw.max()
    logprobs = raw - (peak + np.log(np.exp(raw - peak).sum()))
    top = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.empty(0, dtype=np.int64)
    top = top[np.argsort(-logprobs[top], kind="stable")]
    return TokenLogprobs(
        logprob=max(float(logprobs[token]), LOWEST_LOGPROB),
        top=tuple((int(t), max(float(logprobs[t]), LOWEST_LOGPROB)) for t in top),
    )


def _chosen_logprobs(chain: SamplerChain, token: int, n_top: int) -> TokenLogprobs:
    """Return the logarithms of the probabilities from which the token was drawn."""
    probability = chain.probability(token)
    return TokenLogprobs(
        logprob=math.log(probability) if probability > 0 else LOWEST_LOGPROB,
        top=tuple((each, math.log(found)) for each, found in chain.best(n_top)),
    )
