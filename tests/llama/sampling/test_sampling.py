"""Sampling and vocabulary on the tiny dense model."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from rekindle.errors import InvalidRequest, StartupError
from rekindle.generation.events import TokenSampled
from rekindle.generation.request import Grammar, GrammarKind, Sampling
from rekindle.llama.context import LlamaBackend
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from tests.conftest import TinyModels
from tests.llama.driver import make_backend, prefill, prompt
from tests.support.tiny_models import TinyArchitecture


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Iterator[GgufModel]:
    model = GgufModel(tiny_models(TinyArchitecture.LLAMA), gpu_layers=0)
    yield model
    model.close()


@pytest.fixture
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model)
    yield backend
    backend.close()


def generate(
    backend: LlamaBackend,
    sampling: Sampling,
    *,
    n_tokens: int = 16,
    tokens: list[int] | None = None,
    n_top_logprobs: int | None = None,
) -> list[TokenSampled]:
    tokens = tokens or prompt(64)
    backend.clear_slot(0)
    prefill(backend, 0, tokens)
    sampler = backend.new_sampler(sampling, tokens, 0, n_top_logprobs)
    reply: list[TokenSampled] = []
    for position in range(len(tokens), len(tokens) + n_tokens):
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled), sampled
        reply.append(sampled)
        if sampled.token in backend.eog_tokens:
            break
        backend.decode([sampled.token], [position], [0], [0])
    sampler.close()
    return reply


def tokens_of(reply: list[TokenSampled]) -> list[int]:
    return [sampled.token for sampled in reply]


def test_a_seed_repeats_itself_and_another_seed_does_not(backend: LlamaBackend) -> None:
    first = generate(backend, Sampling(seed=7, temperature=1.5))
    assert generate(backend, Sampling(seed=7, temperature=1.5)) == first
    assert generate(backend, Sampling(seed=8, temperature=1.5)) != first


def test_without_a_seed_two_replies_differ(backend: LlamaBackend) -> None:
    hot = Sampling(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0)
    assert generate(backend, hot, n_tokens=40) != generate(backend, hot, n_tokens=40)


def test_top_k_one_is_greedy(backend: LlamaBackend) -> None:
    greedy = tokens_of(generate(backend, Sampling(temperature=0)))
    assert tokens_of(generate(backend, Sampling(temperature=2.0, top_k=1))) == greedy


def test_greedy_in_the_chain_and_in_numpy_agree(backend: LlamaBackend) -> None:
    plain = tokens_of(generate(backend, Sampling(temperature=0)))
    # A penalty too small to matter forces the llama.cpp chain.
    chained = Sampling(temperature=0, presence_penalty=1e-9)
    assert tokens_of(generate(backend, chained)) == plain


def test_a_bias_bans_and_forces_tokens(backend: LlamaBackend) -> None:
    first = generate(backend, Sampling(temperature=0))[0].token
    banned = Sampling(temperature=0, logit_bias=((first, float("-inf")),))
    assert first not in tokens_of(generate(backend, banned))
    forced = Sampling(temperature=0.8, logit_bias=((42, 100.0),))
    assert set(tokens_of(generate(backend, forced))) == {42}


def test_ignore_eos_never_ends(backend: LlamaBackend) -> None:
    [eog, *_] = backend.eog_tokens
    eager = Sampling(temperature=0, logit_bias=((eog, 100.0),))
    assert tokens_of(generate(backend, eager)) == [eog]
    stubborn = Sampling(temperature=0, logit_bias=((eog, 100.0),), ignore_eos=True)
    assert len(generate(backend, stubborn)) == 16


def test_a_repeat_penalty_sees_the_prompt(backend: LlamaBackend) -> None:
    tokens = prompt(64)
    bias = ((tokens[5], 50.0),)
    repeating = Sampling(temperature=0, logit_bias=bias)
    assert generate(backend, repeating, n_tokens=1)[0].token == tokens[5]
    penalised = Sampling(temperature=0, logit_bias=bias, repeat_penalty=1e6)
    assert generate(backend, penalised, n_tokens=1)[0].token not in tokens
    short_memory = Sampling(temperature=0, logit_bias=bias, repeat_penalty=1e6, repeat_last_n=8)
    assert generate(backend, short_memory, n_tokens=1)[0].token == tokens[5]


def test_limits_beyond_the_model_are_those_of_the_model(backend: LlamaBackend) -> None:
    modest = Sampling(seed=3, repeat_penalty=1.3, repeat_last_n=-1, top_k=0)
    endless = Sampling(seed=3, repeat_penalty=1.3, repeat_last_n=2**40, top_k=2**40)
    assert generate(backend, endless) == generate(backend, modest)


def test_a_temperature_next_to_nothing_is_greedy(backend: LlamaBackend) -> None:
    greedy = tokens_of(generate(backend, Sampling(temperature=0)))
    assert tokens_of(generate(backend, Sampling(temperature=1e-45))) == greedy


def test_logprobs_are_those_of_the_model_before_any_filter(backend: LlamaBackend) -> None:
    reply = generate(backend, Sampling(temperature=0), n_top_logprobs=5)
    for sampled in reply:
        assert sampled.logprobs is not None
        top = sampled.logprobs.top
        assert top[0] == (sampled.token, sampled.logprobs.logprob)  # greedy takes the best
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) <= 1.0 + 1e-5
    banned = Sampling(temperature=0, logit_bias=((reply[0].token, float("-inf")),))
    other = generate(backend, banned, n_top_logprobs=5, n_tokens=1)[0]
    assert other.logprobs is not None
    assert reply[0].logprobs is not None
    assert other.logprobs.top == reply[0].logprobs.top


def test_logprobs_without_alternatives(backend: LlamaBackend) -> None:
    sampled = generate(backend, Sampling(seed=1), n_top_logprobs=0)[0]
    assert sampled.logprobs is not None
    assert sampled.logprobs.top == ()


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_under_a_schema_writes_valid_json(
    backend: LlamaBackend, model: GgufModel, temperature: float
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    sampling = Sampling(temperature=temperature, seed=3, grammar=grammar)
    reply = tokens_of(generate(backend, sampling, n_tokens=200))
    assert reply[-1] in backend.eog_tokens
    value = json.loads(model.vocabulary.detokenize(reply, render_special=False))
    assert set(value) == {"n", "ok"}
    assert 0 <= value["n"] <= 99


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        Grammar(GrammarKind.REGEX, "("),
        Grammar(GrammarKind.LARK, "start: undefined_rule"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused(
    backend: LlamaBackend, grammar: Grammar
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used as a grammar"):
        backend.check_grammar(grammar)


def test_control_strings_are_text_unless_asked_for(model: GgufModel) -> None:
    vocabulary = model.vocabulary
    assert "<|im_end|>" in vocabulary.special_strings
    [token] = vocabulary.tokenize("<|im_end|>", parse_special=True)
    assert token in vocabulary.eog_tokens
    assert vocabulary.piece(token) == b""
    as_text = vocabulary.tokenize("<|im_end|>", parse_special=False)
    assert token not in as_text
    assert vocabulary.detokenize(as_text, render_special=False) == b"<|im_end|>"


@pytest.mark.parametrize(
    "text", ["", "hello", "\u00e9\u4f60\U0001f600", '{"a": [1, 2]}\n\n', " x "]
)
def test_text_survives_tokenising(model: GgufModel, text: str) -> None:
    tokens = model.vocabulary.tokenize(text, parse_special=False)
    assert model.vocabulary.detokenize(tokens, render_special=False).decode() == text


def test_an_unknown_architecture_is_one_sentence(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = tiny_models(TinyArchitecture.LLAMA).read_bytes()
    broken = tmp_path_factory.mktemp("broken") / "model.gguf"
    # The value of general.architecture is the first string "llama" behind its key.
    key = data.index(b"general.architecture")
    at = data.index(b"llama", key)
    broken.write_bytes(data[:at] + b"lxxma" + data[at + 5 :])
    with pytest.raises(StartupError, match="architecture 'lxxma', which llama\\.cpp cannot run"):
        GgufModel(broken, gpu_layers=0)


def test_whatever_ends_a_reply_by_llama_cpps_word_does_so_here(model: GgufModel) -> None:
    vocabulary = model.vocabulary
    tokens = range(vocabulary.n_vocab)
    assert vocabulary.eog_tokens == {
        token for token in tokens if lib.llama_vocab_is_eog(vocabulary.handle, token)
    }


def test_all_pieces_together_are_those_of_each_token(model: GgufModel) -> None:
    vocabulary = model.vocabulary
    pieces = vocabulary.pieces(control_mark=b"!")
    for token, piece in enumerate(pieces):
        alone = vocabulary.detokenize([token], render_special=True)
        is_control = lib.llama_vocab_is_control(vocabulary.handle, token)
        assert piece == (b"!" + alone if is_control else alone)
