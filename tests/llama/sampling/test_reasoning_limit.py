"""A budget of reasoning tokens: made-up logits and the embedded model under a real vocabulary."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rekindle.generation.events import TokenSampled
from rekindle.generation.request import (
    Grammar,
    GrammarKind,
    GrammarStart,
    ReasoningLimit,
    Sampling,
)
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.reasoning import MAX_REOPENED
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.llama.driver import make_backend, prefill

OPENING, CLOSING = "<think>", "</think>"
N_TOKENS = 24


@pytest.fixture(scope="module")
def model(embedded_model: Path) -> Iterator[GgufModel]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def vocabulary(model: GgufModel) -> Vocabulary:
    return model.vocabulary


@pytest.fixture(scope="module")
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model, n_slots=1)
    yield backend
    backend.close()


def limited(
    max_tokens: int,
    *,
    begins_inside: bool = False,
    anywhere: bool = False,
    opening: str = OPENING,
    closing: str = CLOSING,
    grammar: Grammar | None = None,
) -> Sampling:
    limit = ReasoningLimit(
        max_tokens=max_tokens,
        opening=opening,
        closing=closing,
        anywhere=anywhere,
        begins_inside=begins_inside,
    )
    return Sampling(temperature=0, reasoning_limit=limit, grammar=grammar)


def write(
    backend: LlamaBackend,
    vocabulary: Vocabulary,
    sampling: Sampling,
    wanted: str,
    *,
    n_tokens: int = N_TOKENS,
    with_controls: bool = False,
) -> str:
    """Return the reply of a model that wants to write this text, then Z for ever.

    A token that is forced does not change what the model wants next.
    """
    intended = vocabulary.tokenize(wanted, parse_special=with_controls)
    [favourite] = vocabulary.tokenize("Z", parse_special=False)
    sampler = backend.new_sampler(sampling, (), 0, None)
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        want = intended[0] if intended else favourite
        logits = np.zeros(vocabulary.n_vocab, dtype=np.float32)
        logits[favourite] = 0.5
        logits[want] = 1.0
        token, _ = sampler.sample(logits)
        if token in vocabulary.eog_tokens:
            break
        if token == want and intended:
            intended.pop(0)
        tokens.append(token)
    sampler.close()
    return vocabulary.detokenize(tokens, render_special=True).decode()


@pytest.mark.parametrize("n_tokens", [0, 1, 5])
def test_reasoning_that_the_prompt_has_opened_is_closed_at_its_limit(
    backend: LlamaBackend, vocabulary: Vocabulary, n_tokens: int
) -> None:
    reply = write(backend, vocabulary, limited(n_tokens, begins_inside=True), "")
    assert re.fullmatch("Z" * n_tokens + f"{CLOSING}Z+", reply)


def test_reasoning_that_the_model_opens_is_closed_at_its_limit(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    assert re.fullmatch(f"{OPENING}ZZZ{CLOSING}Z+", write(backend, vocabulary, limited(3), OPENING))
    assert re.fullmatch(f"{OPENING}{CLOSING}Z+", write(backend, vocabulary, limited(0), OPENING))


def test_a_mark_that_the_model_has_begun_is_completed(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    wanted = "so</"
    n_tokens = len(vocabulary.tokenize(wanted, parse_special=False))
    reply = write(backend, vocabulary, limited(n_tokens, begins_inside=True), wanted)
    assert re.fullmatch(f"so{CLOSING}Z+", reply)


def test_a_character_is_not_cut(backend: LlamaBackend, vocabulary: Vocabulary) -> None:
    wanted = "\U0001f980"
    tokens = vocabulary.tokenize(wanted, parse_special=False)
    assert len(tokens) > 2
    for n_tokens in range(1, len(tokens)):
        reply = write(backend, vocabulary, limited(n_tokens, begins_inside=True), wanted)
        assert re.fullmatch(f"{wanted}{CLOSING}Z+", reply)


def test_reasoning_within_its_limit_is_left_alone(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    wanted = f"It is so.{CLOSING}Yes"
    reply = write(backend, vocabulary, limited(12, begins_inside=True), wanted)
    assert re.fullmatch(re.escape(wanted) + "Z+", reply)
    assert write(backend, vocabulary, limited(0), "") == "Z" * N_TOKENS


def test_all_spans_of_a_reply_share_the_limit(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    wanted = f"{OPENING}a b{CLOSING}c{OPENING}"
    n_used = len(vocabulary.tokenize(f"a b{CLOSING}", parse_special=False)) - 1
    reply = write(backend, vocabulary, limited(n_used + 1, anywhere=True), wanted)
    assert re.fullmatch(re.escape(wanted) + f"Z{CLOSING}Z+", reply)


def test_marks_behind_text_open_nothing_unless_they_may_stand_anywhere(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    reply = write(backend, vocabulary, limited(0), f"a{OPENING}")
    assert re.fullmatch(f"a{OPENING}Z+", reply)


def test_a_closing_mark_that_is_a_control_token_is_written_as_one(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    sampling = limited(2, begins_inside=True, closing="<file_sep>")
    assert re.fullmatch("ZZ<file_sep>Z+", write(backend, vocabulary, sampling, ""))
    [control] = vocabulary.tokenize("<file_sep>", parse_special=True)
    sampler = backend.new_sampler(sampling, [345, 346], 2, None)
    assert sampler.sample(np.zeros(vocabulary.n_vocab, dtype=np.float32)) == (
        control,
        None,
    )


@pytest.mark.parametrize("opening", [OPENING, "<file_sep>"])
def test_a_model_that_opens_its_reasoning_again_and_again_gets_to_its_answer(
    backend: LlamaBackend, vocabulary: Vocabulary, opening: str
) -> None:
    sampling = limited(0, anywhere=True, opening=opening)
    wanted = opening * 40
    reply = write(backend, vocabulary, sampling, wanted, n_tokens=80, with_controls=True)
    assert reply.count(opening) == reply.count(CLOSING) == MAX_REOPENED
    answer = reply.rpartition(CLOSING)[2]
    assert answer.count("Z") >= 5


def test_a_closing_mark_that_ends_the_turn_is_written_as_text(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    assert "<|im_end|>" in vocabulary.end_strings
    sampling = limited(2, begins_inside=True, closing="<|im_end|>")
    assert re.fullmatch("ZZ<[|]im_end[|]>Z+", write(backend, vocabulary, sampling, ""))


def test_a_grammar_begins_behind_a_forced_mark(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    start = GrammarStart(quiet=(OPENING, CLOSING), begins_quiet=True)
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{3}", start)
    sampling = limited(2, begins_inside=True, grammar=grammar)
    assert re.fullmatch(f"ZZ{CLOSING}[0-9]{{3}}", write(backend, vocabulary, sampling, ""))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_model_answers_after_its_reasoning_was_closed_and_a_resumed_reply_is_the_same(
    backend: LlamaBackend, vocabulary: Vocabulary, temperature: float
) -> None:
    prompt = vocabulary.tokenize(
        "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n<think>\n",
        parse_special=True,
    )
    limit = ReasoningLimit(max_tokens=8, opening=OPENING, closing=CLOSING, begins_inside=True)
    sampling = Sampling(
        temperature=temperature, seed=3, ignore_eos=temperature > 0, reasoning_limit=limit
    )
    backend.clear_all()
    prefill(backend, 0, prompt)
    sampler = backend.new_sampler(sampling, prompt, 0, None)
    reply: list[int] = []
    rows = []
    for position in range(len(prompt), len(prompt) + N_TOKENS):
        rows.append(backend._logits()[0].copy())
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled)
        reply.append(sampled.token)
        backend.decode([sampled.token], [position], [0], [0])
    reasoning, answer = vocabulary.detokenize(reply, render_special=True).decode().split(CLOSING)
    assert len(vocabulary.tokenize(reasoning, parse_special=False)) <= 8
    assert answer.strip()
    for n_before in range(1, len(reply)):
        resumed = backend.new_sampler(sampling, [*prompt, *reply[:n_before]], n_before, None)
        backend._logits()[0] = rows[n_before]
        [sampled] = backend.sample([resumed], [0])
        assert isinstance(sampled, TokenSampled)
        assert sampled.token == reply[n_before]
