"""Chooses a token from a row of logits: greedy in numpy, all else in a llama.cpp chain."""

import secrets
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.events import TokenLogprobs
from rekindle.generation.request import Sampling
from rekindle.llama.grammar.compiler import Matcher
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.library import lib, sample_holding_gil
from rekindle.llama.tokenizer.vocabulary import Vocabulary

Logits = NDArray[np.float32]

LOWEST_TEMPERATURE = 1e-5  # below it, logits / temperature overflow a float
LOWEST_LOGPROB = -1e4  # JSON cannot carry -inf


class LlamaSampler:
    """The sampling state of one sequence: penalties, random numbers, grammar.

    `sampling.repeat_last_n` is a count here: the caller has replaced -1 by the context's length.
    """

    def __init__(
        self,
        sampling: Sampling,
        vocabulary: Vocabulary,
        *,
        grammar: Matcher | LazyGrammar | None,
        n_top_logprobs: int | None,
        prompt: tuple[int, ...],
    ) -> None:
        self._matcher = grammar if isinstance(grammar, Matcher) else None
        self._lazy_grammar = grammar if isinstance(grammar, LazyGrammar) else None
        self._n_top_logprobs = n_top_logprobs
        self._bias_tokens, self._bias_values = _biases(sampling, vocabulary)
        self._end_tokens = np.array(sorted(vocabulary.eog_tokens), dtype=np.int64)
        self._chain = _build_chain(sampling, vocabulary)
        if self._chain is not None and _has_penalties(sampling):
            for token in prompt[-sampling.repeat_last_n :]:
                lib.llama_sampler_accept(self._chain, token)
        # Only the largest logit matters: such rows are sampled together in one argmax.
        self.is_plain_greedy = (
            self._chain is None
            and self._matcher is None
            and n_top_logprobs is None
            and not len(self._bias_tokens)
            and not self._may_not_end
        )

    def sample(
        self, context: Any, batch_index: int, logits: Logits
    ) -> tuple[int, TokenLogprobs | None]:
        raw = logits.copy() if self._n_top_logprobs is not None else None
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
        token: int
        if self._chain is None:
            token = int(logits.argmax())
        else:
            token = sample_holding_gil(self._chain, context, batch_index)
        self.accept(token)
        if raw is None or self._n_top_logprobs is None:
            return token, None
        return token, _logprobs(raw, token, self._n_top_logprobs)

    @property
    def _may_not_end(self) -> bool:
        return self._lazy_grammar is not None and self._lazy_grammar.must_begin

    def accept(self, token: int) -> None:
        """Take a sampled token. Callers that bypass `sample` must call this."""
        if self._matcher is not None:
            self._matcher.accept(token)
        elif self._lazy_grammar is not None and self._lazy_grammar.accept(token):
            self._matcher, self._lazy_grammar = self._lazy_grammar.matcher, None
            self.is_plain_greedy = False

    def close(self) -> None:
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None


def greedy_tokens(logits: Logits) -> list[int]:
    """Return the best token of each row."""
    best: list[int] = logits.argmax(axis=1).tolist()
    return best


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.repeat_last_n != 0 and (
        sampling.repeat_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def _biases(sampling: Sampling, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], Logits]:
    biases = dict(sampling.logit_bias)
    if sampling.ignore_eos:
        biases.update(dict.fromkeys(vocabulary.eog_tokens, float("-inf")))
    tokens = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
    return tokens, np.fromiter(biases.values(), dtype=np.float32, count=len(biases))


def _build_chain(sampling: Sampling, vocabulary: Vocabulary) -> Any | None:
    """Return samplers in llama.cpp's default order; None: plain argmax gives the same token."""
    greedy = sampling.temperature < LOWEST_TEMPERATURE
    if greedy and not _has_penalties(sampling):
        return None
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())

    def add(sampler: Any) -> None:
        lib.llama_sampler_chain_add(chain, sampler)

    if _has_penalties(sampling):
        add(
            lib.llama_sampler_init_penalties(
                vocabulary.n_vocab,
                sampling.repeat_last_n,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    if greedy:
        add(lib.llama_sampler_init_greedy())
        return chain
    if sampling.top_k > 0:
        add(lib.llama_sampler_init_top_k(min(sampling.top_k, vocabulary.n_vocab)))
    if sampling.typical_p < 1.0:
        add(lib.llama_sampler_init_typical(sampling.typical_p, 1))
    if sampling.top_p < 1.0:
        add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
    add(lib.llama_sampler_init_temp(sampling.temperature))
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    add(lib.llama_sampler_init_dist(seed & 0xFFFFFFFF))
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
