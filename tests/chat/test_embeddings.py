"""From texts and token ids to an embedding request, its limits, and its log line."""

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import suppress

import pytest

from rekindle.chat.embeddings import EmbeddingInput, EmbeddingMaker, Embeddings
from rekindle.errors import EngineError, InvalidRequest
from rekindle.generation.events import Embedded
from rekindle.generation.request import EmbeddingRequest
from rekindle.generation.status import EmbedderStatus, EngineStatus
from tests.chat.test_responder import ByteTokenizer, RecordingEngine


class WithBos(ByteTokenizer):
    bos_token = 1


class EmbeddingEngine(RecordingEngine):
    def __init__(self, failure: BaseException | None = None) -> None:
        super().__init__()
        self.embedded: list[EmbeddingRequest] = []
        self.failure = failure

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        self.embedded.append(request)
        if self.failure is not None:
            raise self.failure
        return Embedded(tuple(bytes(tokens) for tokens in request.inputs))

    def status(self) -> EngineStatus:
        embedder = EmbedderStatus(n_ctx=8, n_dimensions=3, n_requests=0)
        return EngineStatus(1, 0, 0, 1, 512, 512, 0, embedder=embedder)


def make(
    *contents: str | Sequence[int],
    engine: RecordingEngine | None = None,
    tokenizer: ByteTokenizer | None = None,
    end_token: int | None = None,
    truncates: bool = False,
) -> Embeddings:
    maker = EmbeddingMaker(
        engine or EmbeddingEngine(), tokenizer or ByteTokenizer(), end_token=end_token
    )
    inputs = [EmbeddingInput(f"input.{index}", each) for index, each in enumerate(contents)]
    return asyncio.run(maker.make(inputs, request_id="id", truncates=truncates))


def test_texts_and_ids_become_one_request() -> None:
    engine = EmbeddingEngine()
    made = make("hi", (1, 2, 3), engine=engine)
    assert engine.embedded == [EmbeddingRequest(id="id", inputs=((104, 105), (1, 2, 3)))]
    assert made == Embeddings((b"hi", b"\1\2\3"), n_tokens=5)


def test_texts_get_the_tokens_that_the_model_wants_around_them_and_ids_do_not() -> None:
    made = make("hi", (104,), tokenizer=WithBos(), end_token=2)
    assert made.vectors == (b"\1hi\2", b"h")
    assert made.n_tokens == 5


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ("123456789", "input.1", "has 9 tokens, but .* at most 8"),
        ((1,) * 9, "input.1", "has 9 tokens, but .* at most 8"),
        ("", "input.1", "empty"),
        ((), "input.1", "empty"),
        ((1, -1), "input.1.1", "-1 is not a token"),
        ((10**6,), "input.1.0", "1000000 is not a token"),
    ],
)
def test_an_input_that_does_not_fit_is_named(
    content: str | Sequence[int], param: str, words: str
) -> None:
    engine = EmbeddingEngine()
    with pytest.raises(InvalidRequest, match=words) as refusal:
        make("12345678", content, engine=engine)
    assert refusal.value.param == param
    assert not engine.embedded, "something was computed before the refusal"


def test_a_long_text_can_be_cut_but_keeps_the_tokens_around_it() -> None:
    engine = EmbeddingEngine()
    make("hello you all", "hi", engine=engine, tokenizer=WithBos(), end_token=2, truncates=True)
    assert engine.embedded[0].inputs == ((1, *b"hello ", 2), (1, *b"hi", 2))


def test_a_server_without_an_embedder_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no embeddings"):
        make("hi", engine=RecordingEngine())


@pytest.mark.parametrize(
    ("failure", "finish"),
    [
        (None, "done"),
        (EngineError("llama.cpp gave up."), "failed: llama.cpp gave up."),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_every_request_is_one_line_in_the_log(
    failure: BaseException | None, finish: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="rekindle.request"),
        suppress(EngineError, asyncio.CancelledError),
    ):
        make("hi", "you", engine=EmbeddingEngine(failure))
    [line] = caplog.messages
    assert re.fullmatch(rf"request=id inputs=2 tokens=5 ms=\d+ finish={finish}", line)
