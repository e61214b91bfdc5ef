"""A token that a grammar forces is the same, whether it was drafted or its mask was computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.generation.request import Grammar, GrammarKind, GrammarStart, Sampling, Trigger
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.sampler import LlamaSampler
from rekindle.llama.tokenizer.vocabulary import Vocabulary

N_TOKENS = 48
CALL = r"""start: "<call>{\"name\": \"" NAME "\", \"path\": \"" /[a-z]{1,9}/ "\"}</call>"
NAME: "read" | "write"
"""
PLAIN = Sampling(temperature=0)
# Tokenised as a whole, "'" and "s" are two tokens here; behind the sign alone they are one.
SIGN = r"""start: "At \u2713's shop: " /[a-z]{1,9}/ "." """
SAMPLINGS = {
    "greedy": PLAIN,
    "seeded": Sampling(temperature=1.0, seed=7),
    "penalties": replace(PLAIN, repeat_penalty=1.3, repeat_last_n=64),
    "mirostat": Sampling(temperature=1.0, seed=7, mirostat=2),
}


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def reply(
    vocabulary: Vocabulary,
    compiler: GrammarCompiler,
    sampling: Sampling,
    *,
    asks: bool,
    n_top_logprobs: int | None = None,
    start: GrammarStart | None = None,
    text: str = CALL,
) -> tuple[list[object], int]:
    """Return what is sampled from fixed logits, and how many tokens were known before."""
    grammar = Grammar(GrammarKind.LARK, text)
    matcher = compiler.matcher(grammar)
    sampler = LlamaSampler(
        sampling,
        vocabulary,
        DrySamplers(vocabulary),
        grammar=matcher if start is None else LazyGrammar(matcher, start, vocabulary),
        n_top_logprobs=n_top_logprobs,
        tokens=(),
        n_reply=0,
        n_left=N_TOKENS,
    )
    draw = np.random.default_rng(3)
    opening = vocabulary.tokenize("say <call>", parse_special=False) if start else []
    sampled: list[object] = []
    n_known = 0
    for position in range(N_TOKENS):
        logits = draw.normal(size=vocabulary.n_vocab).astype(np.float32)
        if position < len(opening):
            logits[opening[position]] = 100.0  # the model begins a call by itself
        if asks:
            n_known += bool(sampler.forced_tokens())
        token, logprobs = sampler.sample(logits)
        sampled.append((token, logprobs))
        if token in vocabulary.eog_tokens:
            break
    sampler.close()
    return sampled, n_known


@pytest.mark.parametrize("n_top_logprobs", [None, 2])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_reply_is_the_same_with_forced_tokens_known(
    vocabulary: Vocabulary, compiler: GrammarCompiler, name: str, n_top_logprobs: int | None
) -> None:
    sampling = SAMPLINGS[name]
    known, n_known = reply(vocabulary, compiler, sampling, asks=True, n_top_logprobs=n_top_logprobs)
    unknown, _ = reply(vocabulary, compiler, sampling, asks=False, n_top_logprobs=n_top_logprobs)
    assert known == unknown
    assert n_known > 15


def test_a_bias_against_a_forced_token_changes_nothing(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    first = compiler.matcher(Grammar(GrammarKind.LARK, CALL)).forced_tokens()[0]
    biased = replace(PLAIN, logit_bias=((first, float("-inf")),))
    known, _ = reply(vocabulary, compiler, biased, asks=True)
    assert known == reply(vocabulary, compiler, biased, asks=False)[0]
    assert known == reply(vocabulary, compiler, PLAIN, asks=False)[0]


def test_a_grammar_that_begins_within_the_reply_forces_from_there_on(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    start = GrammarStart(triggers=(Trigger("<call>"),))
    known, n_known = reply(vocabulary, compiler, PLAIN, asks=True, start=start)
    assert known == reply(vocabulary, compiler, PLAIN, asks=False, start=start)[0]
    assert n_known > 10


def test_a_character_of_several_tokens_changes_no_token_behind_it(
    embedded_model: Path,
) -> None:
    model = GgufModel(embedded_model, gpu_layers=0)
    compiler = GrammarCompiler(model.vocabulary)
    known, n_known = reply(model.vocabulary, compiler, PLAIN, asks=True, text=SIGN)
    assert known == reply(model.vocabulary, compiler, PLAIN, asks=False, text=SIGN)[0]
    assert n_known > 5
    model.close()
