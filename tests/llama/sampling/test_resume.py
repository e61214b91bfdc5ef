"""A reply continued by a new sampler: the tokens are those of a reply that was not interrupted.

The embedded model computes the logits once. Each resumed sampler is then checked on the rows that
the uninterrupted one saw.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.errors import EngineError
from rekindle.generation.events import TokenSampled
from rekindle.generation.request import (
    Grammar,
    GrammarKind,
    GrammarStart,
    SamplerName,
    Sampling,
    Trigger,
)
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from tests.llama.driver import make_backend, prefill

N_TOKENS = 32
QUESTION = "<|im_start|>user\nName two fruits and their colours.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(embedded_model: Path) -> Iterator[GgufModel]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model, n_slots=1)
    yield backend
    backend.close()


class Reply(NamedTuple):
    sampled: list[TokenSampled]
    rows: list[NDArray[np.float32]]  # the logits that each token was sampled from

    @property
    def tokens(self) -> list[int]:
        return [each.token for each in self.sampled]


def generate(
    backend: LlamaBackend, sampling: Sampling, prompt: list[int], n_top_logprobs: int | None
) -> Reply:
    backend.clear_all()
    prefill(backend, 0, prompt)
    sampler = backend.new_sampler(sampling, prompt, 0, n_top_logprobs)
    reply = Reply([], [])
    for position in range(len(prompt), len(prompt) + N_TOKENS):
        reply.rows.append(np.frombuffer(backend.logits(0), np.float32))
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled), sampled
        reply.sampled.append(sampled)
        if sampled.token in backend.eog_tokens:
            break
        backend.decode([sampled.token], [position], [0], [0])
    sampler.close()
    return reply


def resume(
    backend: LlamaBackend,
    sampling: Sampling,
    prompt: list[int],
    n_top_logprobs: int | None,
    reply: Reply,
    n_reply: int,
) -> list[TokenSampled]:
    """Return what a new sampler says to the rows after the first `n_reply` tokens."""
    tokens = [*prompt, *reply.tokens[:n_reply]]
    state = reply.sampled[n_reply - 1].sampler_state if n_reply else ()
    sampler = backend.new_sampler(sampling, tokens, n_reply, n_top_logprobs, state=state)
    resumed = []
    for row in reply.rows[n_reply:]:
        backend._logits()[0] = row
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled), sampled
        resumed.append(sampled)
    sampler.close()
    return resumed


SCHEMA = """{"type": "object", "properties": {"fruit": {"type": "string", "maxLength": 12},
 "colours": {"type": "array", "items": {"enum": ["red", "yellow"]}, "minItems": 2}},
 "required": ["fruit", "colours"], "additionalProperties": false}"""
HOT = Sampling(seed=11, temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)

KINDS = {
    "greedy": Sampling(temperature=0),
    "seeded": Sampling(seed=5),
    "hot": HOT,
    "one candidate": Sampling(seed=5, top_k=1),
    "typical": Sampling(seed=5, temperature=1.5, typical_p=0.7),
    "greedy with penalties": Sampling(temperature=0, repeat_penalty=1.3, repeat_last_n=8),
    "penalties": Sampling(
        seed=6, repeat_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3, repeat_last_n=-1
    ),
    "dry": Sampling(
        seed=6, dry_multiplier=3.0, dry_allowed_length=0, dry_penalty_last_n=24, temperature=1.2
    ),
    "greedy dry": Sampling(temperature=0, dry_multiplier=3.0, dry_penalty_last_n=-1),
    "xtc": Sampling(seed=6, xtc_probability=0.5, temperature=1.2),
    "dynatemp": Sampling(seed=7, dynatemp_range=0.6, top_n_sigma=1.5),
    "mirostat": Sampling(seed=7, mirostat=1, mirostat_tau=3.0),
    "mirostat 2": Sampling(seed=7, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5),
    "mirostat schema": Sampling(
        seed=3, mirostat=2, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    ),
    "adaptive p": Sampling(
        seed=3, samplers=(SamplerName.TOP_K, SamplerName.ADAPTIVE_P), adaptive_target=0.4
    ),
    "penalties after top k": Sampling(
        seed=3,
        samplers=(SamplerName.TOP_K, SamplerName.PENALTIES, SamplerName.TEMPERATURE),
        repeat_penalty=1.5,
        temperature=1.5,
    ),
    "probabilities after the samplers": Sampling(seed=3, post_sampling_probs=True),
    "schema": Sampling(temperature=0, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    "hot schema": Sampling(
        seed=3, temperature=1.5, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    ),
    "regex": Sampling(seed=3, grammar=Grammar(GrammarKind.REGEX, "([a-z]{2,8} ){6}[0-9]{3}")),
    "typical with excluded tokens": Sampling(
        seed=5, typical_p=0.6, ignore_eos=True, logit_bias=((28, -math.inf),)
    ),
    "bias": Sampling(seed=4, logit_bias=((345, 4.0), (28, -100.0)), ignore_eos=True),
}


@pytest.mark.parametrize(
    ("kind", "n_top_logprobs"),
    [*((kind, None) for kind in KINDS), ("greedy", 3), ("hot schema", 3), ("mirostat", 3)],
)
def test_a_resumed_reply_has_the_tokens_of_an_uninterrupted_one(
    backend: LlamaBackend, model: GgufModel, kind: str, n_top_logprobs: int | None
) -> None:
    prompt = model.vocabulary.tokenize(QUESTION, parse_special=True)
    reply = generate(backend, KINDS[kind], prompt, n_top_logprobs)
    assert len(reply.tokens) > 5
    for n_reply in range(0, len(reply.tokens), 1 if KINDS[kind].is_usual else 7):
        resumed = resume(backend, KINDS[kind], prompt, n_top_logprobs, reply, n_reply)
        assert resumed == reply.sampled[n_reply:]


@pytest.mark.parametrize("n_top_logprobs", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_logits_give_the_tokens_that_the_context_gave(
    backend: LlamaBackend, model: GgufModel, kind: str, n_top_logprobs: int | None
) -> None:
    prompt = model.vocabulary.tokenize(QUESTION, parse_special=True)
    reply = generate(backend, KINDS[kind], prompt, n_top_logprobs)
    sampler = backend.new_sampler(KINDS[kind], prompt, 0, n_top_logprobs)
    backend.clear_all()
    for row, sampled in zip(reply.rows, reply.sampled, strict=True):
        assert row.nbytes == backend.logits_bytes
        assert backend.sample_stored(sampler, row.tobytes()) == sampled
    sampler.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("begins_quiet", [False, True])
def test_a_grammar_that_begins_inside_the_reply_is_resumed_on_either_side(
    backend: LlamaBackend, model: GgufModel, temperature: float, *, begins_quiet: bool
) -> None:
    prompt = model.vocabulary.tokenize(QUESTION, parse_special=True)
    free = generate(backend, Sampling(temperature=temperature, seed=8), prompt, None)
    text = model.vocabulary.detokenize(free.tokens, render_special=True).decode()
    closing, trigger = text[20:26], text[50:56]  # wherever tokens may end
    grammar = Grammar(
        GrammarKind.LARK,
        f'start: "{trigger}" /[^0-9]{{0,9}}/ " [" /[0-9]{{3}}/ "]"',
        GrammarStart(
            triggers=(Trigger(trigger),), quiet=(text[3:9], closing), begins_quiet=begins_quiet
        ),
    )
    sampling = Sampling(temperature=temperature, seed=8, grammar=grammar)
    reply = generate(backend, sampling, prompt, None)
    bound = model.vocabulary.detokenize(reply.tokens, render_special=True).decode()
    assert bound.startswith(text[:56])
    assert bound != text, "the grammar did not begin"
    for n_reply in range(len(reply.tokens)):
        resumed = resume(backend, sampling, prompt, None, reply, n_reply)
        assert resumed == reply.sampled[n_reply:]


def test_a_reply_that_breaks_its_grammar_is_not_resumed(backend: LlamaBackend) -> None:
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}"))
    with pytest.raises(EngineError, match="grammar"):
        backend.new_sampler(sampling, [1, 2, 345, 346], 2, None)


def test_each_position_has_a_draw_of_its_own_that_follows_the_probabilities(
    backend: LlamaBackend, model: GgufModel
) -> None:
    """Two tokens, three to one: were the draws of neighbours alike, the counts would be off."""
    backend.clear_all()
    prefill(backend, 0, model.vocabulary.tokenize(QUESTION, parse_special=True))
    sampling = Sampling(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    tokens: list[int] = []
    sampler = backend.new_sampler(sampling, [], 0, None)
    row = np.full(model.vocabulary.n_vocab, -np.inf, dtype=np.float32)
    row[[7, 9]] = np.log(3), 0.0
    for _ in range(2_000):
        backend._logits()[0] = row
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled), sampled
        tokens.append(sampled.token)
    sampler.close()
    assert set(tokens) == {7, 9}
    assert 1_420 < tokens.count(7) < 1_580  # four standard deviations
    pairs = sum(one == other == 9 for one, other in pairwise(tokens))
    assert 75 < pairs < 175
