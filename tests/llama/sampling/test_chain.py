"""Samplers in any order: the tokens are those of llama.cpp's own chain on the same logits."""

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.generation.request import DEFAULT_SAMPLERS, SamplerName, Sampling
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.candidates import Candidates
from rekindle.llama.sampling.chain import XTC_STREAM, SamplerChain
from rekindle.llama.sampling.draws import draw_seed
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.tokenizer.vocabulary import Vocabulary

N_STEPS = 300
SEED = 7
FAVOURITES = np.array([11, 19, 28, 30, 47, 198, 345, 346])  # some break DRY's sequences
PROMPT = [345, 346, 47, 345, 346, 30, 345, 346]


@pytest.fixture(scope="module")
def vocabulary(embedded_model: Path) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model.vocabulary
    model.close()


def random_rows(n_vocab: int, n: int = N_STEPS) -> Iterator[NDArray[np.float32]]:
    """Yield rows of logits in which a few tokens are likely, so that sequences repeat."""
    random = np.random.default_rng(5)
    for _ in range(n):
        row = random.normal(0, 2, n_vocab).astype(np.float32)
        row[FAVOURITES] += random.normal(9, 2, len(FAVOURITES)).astype(np.float32)
        yield row


S = SamplerName
ORDERS: dict[str, tuple[Sampling, Callable[[Vocabulary, int], list[Any]]]] = {
    "dynatemp": (
        Sampling(dynatemp_range=0.5, dynatemp_exponent=1.5),
        lambda vocabulary, position: [
            lib.llama_sampler_init_top_k(40),
            lib.llama_sampler_init_top_p(0.95, 0),
            lib.llama_sampler_init_min_p(0.05, 0),
            lib.llama_sampler_init_temp_ext(0.8, 0.5, 1.5),
        ],
    ),
    "top n sigma": (
        Sampling(top_n_sigma=1.5, top_k=0, top_p=1.0, min_p=0.0, temperature=1.5),
        lambda vocabulary, position: [
            lib.llama_sampler_init_top_n_sigma(1.5),
            lib.llama_sampler_init_temp_ext(1.5, 0.0, 1.0),
        ],
    ),
    "xtc": (
        Sampling(xtc_probability=0.6, xtc_threshold=0.08, temperature=1.2),
        lambda vocabulary, position: [
            lib.llama_sampler_init_top_k(40),
            lib.llama_sampler_init_top_p(0.95, 0),
            lib.llama_sampler_init_min_p(0.05, 0),
            lib.llama_sampler_init_xtc(0.6, 0.08, 0, draw_seed(SEED ^ XTC_STREAM, position)),
            lib.llama_sampler_init_temp_ext(1.2, 0.0, 1.0),
        ],
    ),
    "dry": (
        Sampling(dry_multiplier=0.8, dry_base=1.6, dry_allowed_length=1, temperature=0.6),
        lambda vocabulary, position: [
            dry(vocabulary, 0.8, 1.6, 1, 64, b"\n", b":", b'"', b"*"),
            lib.llama_sampler_init_top_k(40),
            lib.llama_sampler_init_top_p(0.95, 0),
            lib.llama_sampler_init_min_p(0.05, 0),
            lib.llama_sampler_init_temp_ext(0.6, 0.0, 1.0),
        ],
    ),
    "greedy dry with a short window and other breakers": (
        Sampling(
            dry_multiplier=4.0,
            dry_penalty_last_n=20,
            dry_sequence_breakers=("wx", " ("),
            temperature=0,
        ),
        lambda vocabulary, position: [
            dry(vocabulary, 4.0, 1.75, 2, 20, b"wx", b" ("),
            lib.llama_sampler_init_temp_ext(0.0, 0.0, 1.0),
        ],
    ),
    "another order": (
        Sampling(
            samplers=(S.TEMPERATURE, S.TOP_K, S.PENALTIES, S.TYPICAL_P, S.MIN_P, S.MIN_P),
            temperature=2.0,
            top_k=30,
            repeat_penalty=1.4,
            frequency_penalty=0.2,
            repeat_last_n=16,
            typical_p=0.8,
            min_p=0.02,
            min_keep=3,
        ),
        lambda vocabulary, position: [
            lib.llama_sampler_init_temp_ext(2.0, 0.0, 1.0),
            lib.llama_sampler_init_top_k(30),
            lib.llama_sampler_init_penalties(vocabulary.n_vocab, 16, 1.4, 0.2, 0.0),
            lib.llama_sampler_init_typical(0.8, 3),
            lib.llama_sampler_init_min_p(0.02, 3),
            lib.llama_sampler_init_min_p(0.02, 3),
        ],
    ),
    "infill": (
        Sampling(samplers=(S.TOP_K, S.TOP_P, S.INFILL)),
        lambda vocabulary, position: [
            lib.llama_sampler_init_top_k(40),
            lib.llama_sampler_init_top_p(0.95, 0),
            lib.llama_sampler_init_infill(vocabulary.handle),
        ],
    ),
    "greedy typical": (
        Sampling(typical_p=0.3, temperature=0),
        lambda vocabulary, position: [
            lib.llama_sampler_init_top_k(40),
            lib.llama_sampler_init_typical(0.3, 0),
            lib.llama_sampler_init_temp_ext(0.0, 0.0, 1.0),
        ],
    ),
    "none": (Sampling(samplers=()), lambda vocabulary, position: []),
}


def dry(*settings: Any) -> Any:
    return lib.llama_sampler_clone(dry_prototype(*settings))


@cache  # finding the breakers in the vocabulary takes long
def dry_prototype(
    vocabulary: Vocabulary,
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    *breakers: bytes,
) -> Any:
    texts = (ctypes.c_char_p * len(breakers))(*breakers)
    return lib.llama_sampler_init_dry(
        vocabulary.handle, multiplier, base, allowed, last_n, texts, len(breakers)
    )


def new_chain(
    sampling: Sampling,
    vocabulary: Vocabulary,
    tokens: Sequence[int] = (),
    state: tuple[float, ...] = (),
) -> SamplerChain:
    return SamplerChain(sampling, vocabulary, DrySamplers(vocabulary), tokens=tokens, state=state)


def chain_of(samplers: list[Any]) -> Any:
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        lib.llama_sampler_chain_add(chain, sampler)
    return chain


def chosen(candidates: Candidates, chain: Any, row: NDArray[np.float32]) -> int:
    candidates.fill(row)
    candidates.apply(chain)
    return int(candidates.tokens[candidates.selected])


@pytest.mark.parametrize("name", ORDERS)
def test_tokens_are_those_of_llama_cpps_chain(vocabulary: Vocabulary, name: str) -> None:
    sampling, samplers = ORDERS[name]
    assert not sampling.is_usual
    ours = new_chain(sampling, vocabulary, PROMPT)
    candidates = Candidates(vocabulary.n_vocab)
    tokens = list(PROMPT)
    changed = 0
    for position, row in enumerate(random_rows(vocabulary.n_vocab)):
        theirs = chain_of(
            [
                *samplers(vocabulary, position),
                lib.llama_sampler_init_dist(draw_seed(SEED, position)),
            ]
        )
        for token in tokens:
            lib.llama_sampler_accept(theirs, token)
        expected = chosen(candidates, theirs, row)
        lib.llama_sampler_free(theirs)
        token = ours.choose(row, SEED, position)
        assert token == expected, position
        changed += token != int(row.argmax())
        ours.accept(token)
        tokens.append(token)
    ours.close()
    assert changed > 10, "the samplers had no effect"


def test_a_row_that_a_grammar_has_thinned_gives_an_allowed_token(vocabulary: Vocabulary) -> None:
    for sampling in (
        *(sampling for sampling, _ in ORDERS.values()),
        Sampling(mirostat=1),
        Sampling(mirostat=2),
        Sampling(samplers=(*DEFAULT_SAMPLERS, S.ADAPTIVE_P), adaptive_target=0.5),
    ):
        chain = new_chain(sampling, vocabulary, PROMPT)
        for position, allowed in enumerate(([5], [5, 345], [345, 11, 19])):
            row = np.full(vocabulary.n_vocab, -np.inf, dtype=np.float32)
            row[allowed] = 0.5
            token = chain.choose(row, SEED, position)
            assert token in allowed
            chain.accept(token)
        assert all(map(math.isfinite, chain.state))
        chain.close()


def test_xtc_and_the_choice_have_random_numbers_of_their_own(vocabulary: Vocabulary) -> None:
    """Three tokens alike, the first two removed in half of the draws: one third and a half."""
    sampling = Sampling(samplers=(S.XTC,), xtc_probability=0.5, xtc_threshold=0.1, temperature=1.0)
    chain = new_chain(sampling, vocabulary)
    row = np.full(vocabulary.n_vocab, -np.inf, dtype=np.float32)
    row[[3, 4, 5]] = np.log([0.4, 0.35, 0.25])
    counts = Counter(chain.choose(row, SEED, position) for position in range(4_000))
    chain.close()
    # 0.5 + 0.5 * 0.25; the tokens before it share the rest as 0.4 to 0.35
    assert abs(counts[5] / 4_000 - 0.625) < 0.035
    assert abs(counts[3] / 4_000 - 0.2) < 0.035


# llama.cpp's own samplers keep one random generator. To compare, ours gets theirs at each token:
# the place of std::mt19937 in the sampler's state, on Linux.
GENERATOR_BYTES = 5_000
STATEFUL: dict[str, tuple[Sampling, Callable[[int, int], Any], list[Any], int]] = {
    "mirostat": (
        Sampling(mirostat=1, mirostat_tau=3.0, mirostat_eta=0.2, temperature=1.1),
        lambda n_vocab, seed: lib.llama_sampler_init_mirostat(n_vocab, seed, 3.0, 0.2, 100),
        [lib.llama_sampler_init_temp, 1.1],
        32,
    ),
    "mirostat 2": (
        Sampling(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3, temperature=1.3),
        lambda n_vocab, seed: lib.llama_sampler_init_mirostat_v2(seed, 2.0, 0.3),
        [lib.llama_sampler_init_temp, 1.3],
        24,
    ),
    "adaptive p": (
        Sampling(
            samplers=(S.ADAPTIVE_P, S.MIN_P), min_p=0.01, adaptive_target=0.3, adaptive_decay=0.8
        ),
        lambda n_vocab, seed: lib.llama_sampler_init_adaptive_p(0.3, 0.8, seed),
        [lib.llama_sampler_init_min_p, 0.01, 0],
        16,
    ),
}


class _LlamaSampler(ctypes.Structure):
    _fields_ = (("iface", ctypes.c_void_p), ("state", ctypes.c_void_p))


def generator_of(sampler: Any, offset: int) -> int:
    address = ctypes.cast(sampler, ctypes.POINTER(_LlamaSampler)).contents.state
    assert address is not None
    return int(address) + offset


@pytest.mark.skipif(sys.platform != "linux", reason="needs the layout of GNU's C++ library")
@pytest.mark.parametrize("name", STATEFUL)
def test_samplers_with_a_memory_choose_as_llama_cpps(vocabulary: Vocabulary, name: str) -> None:
    sampling, make, (make_filter, *arguments), offset = STATEFUL[name]
    n_vocab = vocabulary.n_vocab
    theirs, candidates = make(n_vocab, 0), Candidates(n_vocab)
    chain = chain_of([make_filter(*arguments), theirs])
    ours = new_chain(sampling, vocabulary)
    first, changed = ours.state, 0
    for position, row in enumerate(random_rows(n_vocab, 200)):
        fresh = make(n_vocab, draw_seed(SEED, position))
        ctypes.memmove(generator_of(theirs, offset), generator_of(fresh, offset), GENERATOR_BYTES)
        lib.llama_sampler_free(fresh)
        expected = chosen(candidates, chain, row)
        lib.llama_sampler_accept(chain, expected)
        token = ours.choose(row, SEED, position)
        assert token == expected, position
        changed += token != int(row.argmax())
        ours.accept(token)
    assert ours.state != first
    ours.close()
    lib.llama_sampler_free(chain)
    assert changed > 10


@pytest.mark.parametrize("name", STATEFUL)
def test_a_chain_with_the_state_of_another_continues_it(vocabulary: Vocabulary, name: str) -> None:
    sampling = STATEFUL[name][0]
    ours = new_chain(sampling, vocabulary)
    for position, row in enumerate(random_rows(vocabulary.n_vocab, 60)):
        if position % 20 == 19:
            state = ours.state
            ours.close()
            ours = new_chain(sampling, vocabulary, (), state)
            assert ours.state == state
        token = ours.choose(row, SEED, position)
        assert ours.choose(row, SEED, position) == token, "a second look changes nothing"
        ours.accept(token)
    last = ours.state
    uninterrupted = new_chain(sampling, vocabulary)
    for position, row in enumerate(random_rows(vocabulary.n_vocab, 60)):
        uninterrupted.accept(uninterrupted.choose(row, SEED, position))
    assert uninterrupted.state == last
    ours.close()
    uninterrupted.close()


def test_a_forced_token_leaves_the_memory_as_it_is(vocabulary: Vocabulary) -> None:
    chain = new_chain(Sampling(mirostat=2), vocabulary)
    row = next(random_rows(vocabulary.n_vocab))
    token = chain.choose(row, SEED, 0)
    before = chain.state
    chain.accept(token + 1)
    assert chain.state == before
    chain.close()


def test_settings_that_change_nothing_are_usual() -> None:
    for same in (
        Sampling(),
        Sampling(xtc_probability=0.5, xtc_threshold=0.6),
        Sampling(top_n_sigma=0.0, dynatemp_exponent=2.0, min_keep=1),
        Sampling(adaptive_target=0.5, dry_base=3.0, mirostat_tau=1.0),
    ):
        assert same.is_usual


@pytest.mark.parametrize(
    "samplers",
    [DEFAULT_SAMPLERS[1:], (S.TOP_K, S.TOP_P, S.MIN_P, S.TEMPERATURE), (*DEFAULT_SAMPLERS, S.XTC)],
)
def test_samplers_without_effect_may_be_left_out_or_doubled(samplers: tuple[S, ...]) -> None:
    assert Sampling(samplers=samplers).is_usual


def test_the_usual_samplers_in_another_order_or_fewer_are_not_usual() -> None:
    some = (S.TOP_K, S.TOP_P, S.MIN_P, S.TEMPERATURE)
    for other in (
        Sampling(samplers=(*some[1:], S.TOP_K)),
        Sampling(samplers=some[:-1]),
        Sampling(samplers=some[1:]),
        Sampling(samplers=(*some, S.INFILL)),
        Sampling(samplers=some, repeat_penalty=1.1),
        Sampling(samplers=(*some, S.PENALTIES), repeat_penalty=1.1, temperature=0),
        Sampling(samplers=(S.TOP_K,), temperature=0),
        Sampling(samplers=(S.TEMPERATURE, S.TYPICAL_P), typical_p=0.5, temperature=0),
    ):
        assert not other.is_usual


@pytest.mark.parametrize(
    "samplers",
    [(S.TEMPERATURE,), (S.MIN_P, S.TEMPERATURE, S.TOP_K), (S.TEMPERATURE, S.TOP_N_SIGMA)],
)
def test_without_randomness_the_largest_logit_wins_in_any_order(
    vocabulary: Vocabulary, samplers: tuple[S, ...]
) -> None:
    sampling = Sampling(samplers=samplers, temperature=0, top_n_sigma=1.0)
    assert sampling.is_usual
    chain = new_chain(sampling, vocabulary)
    for position, row in enumerate(random_rows(vocabulary.n_vocab)):
        best = int(row.argmax())
        assert chain.choose(row, SEED, position) == best
    chain.close()
