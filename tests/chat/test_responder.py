"""The text side of a reply, over a scripted engine: stop strings, finish reasons, counts."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from typing import TypeVar

import pytest

from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import FinishReason, ReplyDone, ReplyEvent, ReplyOptions, ReplyText
from rekindle.chat.responder import MAX_LARGE_PLANNERS
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import EngineError, PromptTooLong
from rekindle.generation.drafts import DraftCount, DraftCounts, Drafted, DraftSource
from rekindle.generation.events import (
    NO_SPANS,
    CacheSource,
    Embedded,
    Finished,
    PromptEvaluated,
    StopCause,
    TokenEvent,
    TokenLogprobs,
    TokenSampled,
)
from rekindle.generation.forgetting import Scope, Tombstone, Tombstones
from rekindle.generation.questions import Question
from rekindle.generation.request import (
    CacheTerms,
    EmbeddingRequest,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Sampling,
)
from rekindle.generation.status import EngineStatus
from rekindle.generation.tokenizer import NO_INFILL
from tests.support.chat import chat_responder, reply_stream
from tests.support.dialects import dialect_of

T = TypeVar("T")
SPANS = (
    NO_SPANS.extended(CacheSource.LIVE, 1)
    .extended(CacheSource.DISK, 3)
    .extended(CacheSource.LIVE, 4)
)
EVALUATED = PromptEvaluated(10, 4, 0.5, 1.0, restore_seconds=0.0125, spans=SPANS)


class ByteTokenizer:
    """Token n is the byte n; 256 is a control token."""

    n_vocab = 257
    special_strings = ("<end>",)
    bos_text = eos_text = "<end>"
    end_strings = ("<end>",)
    bos_token: int | None = None
    infill = NO_INFILL

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return b"" if token == 256 else bytes([token])

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        return b"".join(
            b"<end>" if token == 256 and render_special else self.piece(token) for token in tokens
        )


class ScriptedStream:
    def __init__(self, events: list[TokenEvent | Exception]) -> None:
        self.events = events
        self.cancelled = False
        self.n_taken = 0

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        for event in self.events:
            self.n_taken += 1
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        self.cancelled = True


class RecordingEngine:
    finishes_calls = True
    is_idle = True

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        self.requests.append(request)
        return ScriptedStream([])

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        raise AssertionError(request.id)

    async def ask(self, question: Question[T]) -> T:
        raise AssertionError(question)

    def check_grammar(self, grammar: Grammar) -> Future[None]:
        checked: Future[None] = Future()
        checked.set_result(None)
        return checked

    def status(self) -> EngineStatus:
        return EngineStatus(1, 0, 0, 1, 512, 512, 0)

    async def refresh(self) -> None: ...


def script(
    text: str, cause: StopCause = StopCause.END_OF_TURN, *, scored: bool = False
) -> ScriptedStream:
    logprobs = TokenLogprobs(-0.5, ((65, -0.5), (66, -1.0))) if scored else None
    tokens = [TokenSampled(byte, logprobs) for byte in text.encode()]
    return ScriptedStream([EVALUATED, *tokens, Finished(cause)])


def run(stream: ScriptedStream, stop: tuple[str, ...] = ()) -> list[ReplyEvent]:
    reply = reply_stream(Prompt((1,) * 10, (), ""), stream, ByteTokenizer(), stop=stop)

    async def collect() -> list[ReplyEvent]:
        return [event async for event in reply]

    return asyncio.run(collect())


def text_of(events: list[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReplyText))


def done(events: list[ReplyEvent]) -> ReplyDone:
    assert isinstance(events[-1], ReplyDone)
    return events[-1]


def test_each_token_is_shown_at_once_and_characters_are_whole() -> None:
    events = run(script("h\u00e9"))
    assert [event.text for event in events if isinstance(event, ReplyText)] == ["h", "\u00e9"]
    assert done(events).finish is FinishReason.STOP
    assert done(events).stats.n_generated == 3


def test_a_stop_string_ends_the_reply_and_the_engines_work() -> None:
    stream = script("one STOP two")
    events = run(stream, stop=("STOP",))
    assert text_of(events) == "one "
    assert done(events).finish is FinishReason.STOP
    assert stream.cancelled
    assert stream.n_taken == 1 + len("one STOP")


def test_half_a_stop_string_at_the_end_belongs_to_the_reply() -> None:
    events = run(script("one STO", StopCause.LENGTH), stop=("STOP",))
    assert text_of(events) == "one STO"
    assert done(events).finish is FinishReason.LENGTH


def test_a_character_cut_by_max_tokens_is_a_replacement_not_an_error() -> None:
    stream = ScriptedStream([TokenSampled(0xC3), Finished(StopCause.LENGTH)])
    assert text_of(run(stream)) == "\ufffd"


def test_scores_of_tokens_inside_a_stop_string_do_not_leak() -> None:
    events = run(script("ab##", scored=True), stop=("##",))
    scored = [token for event in events if isinstance(event, ReplyText) for token in event.scored]
    assert [token.chosen.text for token in scored] == ["a", "b"]
    assert [token.text_offset for token in scored] == [0, 1]
    json.dumps([token.chosen.logprob for token in scored], allow_nan=False)


def test_every_token_has_its_score_when_text_was_held_back() -> None:
    events = run(script("a#b", scored=True), stop=("##",))
    scored = [token for event in events if isinstance(event, ReplyText) for token in event.scored]
    assert [token.chosen.text for token in scored] == ["a", "#", "b"]


def test_counts_come_from_the_engine() -> None:
    stats = done(run(script("abc"))).stats
    assert (stats.n_prompt, stats.n_cached, stats.n_prefilled) == (10, 4, 6)
    assert (stats.queue_seconds, stats.restore_seconds, stats.prefill_seconds) == (0.5, 0.0125, 1)
    assert stats.spans == SPANS


@pytest.mark.parametrize("cache_prompt", [True, False])
def test_cache_prompt_reaches_the_engine(cache_prompt: bool) -> None:  # noqa: FBT001
    engine, tokenizer = RecordingEngine(), ByteTokenizer()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    dialect = dialect_of(CHATML)
    responder = chat_responder(engine, tokenizer, template, dialect)
    options = ReplyOptions(sampling=Sampling(), cache_prompt=cache_prompt)
    asyncio.run(responder.start(Prompt((1,), (), ""), options, request_id="id"))
    assert [request.cache_prompt for request in engine.requests] == [cache_prompt]


@pytest.mark.parametrize(("asked", "reaches"), [(None, 5), (7, 7), (3, 3), (0, 0)])
def test_the_servers_limit_holds_for_replies_without_one(asked: int | None, reaches: int) -> None:
    engine = RecordingEngine()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(
        engine, ByteTokenizer(), template, dialect_of(CHATML), default_max_tokens=5
    )
    options = ReplyOptions(sampling=Sampling(), max_tokens=asked)
    asyncio.run(responder.start(Prompt((1,), (), ""), options, request_id="id"))
    assert [request.max_tokens for request in engine.requests] == [reaches]


@pytest.mark.parametrize("speculate", [True, False])
def test_speculate_reaches_the_engine(speculate: bool) -> None:  # noqa: FBT001
    engine = RecordingEngine()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(engine, ByteTokenizer(), template, dialect_of(CHATML))
    options = ReplyOptions(sampling=Sampling(), speculate=speculate)
    asyncio.run(responder.start(Prompt((1,), (), ""), options, request_id="id"))
    assert [request.speculate for request in engine.requests] == [speculate]


def test_the_drafts_of_all_steps_add_up_by_source() -> None:
    context, store = DraftSource.CONTEXT, DraftSource.STORE
    events: list[TokenEvent | Exception] = [
        EVALUATED,
        TokenSampled(97),
        TokenSampled(98, drafted=Drafted(context, 4, 1)),  # a step of two tokens
        TokenSampled(99, drafted=Drafted(store, 2, 0)),
        Finished(StopCause.END_OF_TURN, drafted=Drafted(context, 3, 3)),
    ]
    drafts = done(run(ScriptedStream(events))).stats.drafts
    assert drafts == DraftCounts(context=DraftCount(7, 4), store=DraftCount(2, 0))
    assert (drafts.n_tokens, drafts.n_accepted) == (9, 4)


def test_the_log_line_has_the_drafted_and_the_accepted_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    last = Finished(StopCause.END_OF_TURN, drafted=Drafted(DraftSource.REPLY, 8, 5))
    with caplog.at_level(logging.INFO, logger="rekindle.request"):
        run(ScriptedStream([EVALUATED, TokenSampled(97), last]))
        run(script("a"))
    drafted, plain = caplog.messages
    assert " generated=1 drafted=8 accepted=5 " in drafted
    assert " generated=1 drafted=0 accepted=0 " in plain


@pytest.mark.parametrize(("asked_at", "cache_prompt"), [(5.0, False), (15.0, True)])
def test_a_request_that_waited_through_its_deletion_is_not_cached(
    asked_at: float, *, cache_prompt: bool
) -> None:
    """Its model was loaded after the deletion, so the engine does not know of it."""
    forgotten = Tombstones([Tombstone(scope=Scope(namespace=""), at=10.0)])
    engine, tokenizer = RecordingEngine(), ByteTokenizer()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(
        engine, tokenizer, template, dialect_of(CHATML), accounts=Accounts(forgotten)
    )
    options = ReplyOptions(sampling=Sampling(), terms=CacheTerms(asked_at=asked_at))
    asyncio.run(responder.start(Prompt((1,), (), ""), options, request_id="id"))
    assert [request.cache_prompt for request in engine.requests] == [cache_prompt]


def test_a_lookup_of_a_prompt_beyond_the_context_does_not_ask_the_engine() -> None:
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(RecordingEngine(), ByteTokenizer(), template, dialect_of(CHATML))
    with pytest.raises(PromptTooLong, match="600 tokens"):
        asyncio.run(responder.look_up(Prompt((1,) * 600, (), ""), session="s"))


class SlowEngine(RecordingEngine):
    """Compiles no grammar that holds the word `slow`, and the others at once."""

    def check_grammar(self, grammar: Grammar) -> Future[None]:
        return Future() if "slow" in grammar.source else super().check_grammar(grammar)


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_large_grammar_that_is_known_does_not_wait_for_new_ones(has_tools: bool) -> None:  # noqa: FBT001
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(SlowEngine(), ByteTokenizer(), template, dialect_of(CHATML))

    def start(word: str) -> Coroutine[object, object, object]:
        schema = {"type": "object", "properties": {word: {"enum": ["x" * 40_000]}}}
        function = {"name": "f", "parameters": schema}
        tool = Tool("f", json.dumps({"type": "function", "function": function}))
        said = (Message(Role.USER, (Text("?"),)),)
        asked = Conversation(said, (tool,) if has_tools else ())
        grammar = None if has_tools else Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        options = ReplyOptions(sampling=Sampling(grammar=grammar))
        prompt = Prompt((1,), (), "", conversation=asked)
        return responder.start(prompt, options, request_id=word)

    async def scenario() -> None:
        await start("known")
        waiting = [asyncio.create_task(start(f"slow{n}")) for n in range(2 * MAX_LARGE_PLANNERS)]
        await asyncio.sleep(0.1)  # until they occupy the threads of large grammars
        try:
            await asyncio.wait_for(start("known"), 30)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


def test_an_engine_error_reaches_the_reader() -> None:
    stream = ScriptedStream([TokenSampled(65), EngineError("broken")])
    with pytest.raises(EngineError, match="broken"):
        run(stream)
    assert stream.cancelled


def test_one_log_line_explains_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="rekindle.request"):
        run(script("abc"))
    [record] = caplog.records
    line = record.getMessage()
    for fact in (
        "request=id",
        "prompt=10",
        "cached=4",
        "from=live:2,disk:2",
        "prefilled=6",
        "restore_ms=12.5",
        "generated=3",
        "finish=stop",
    ):
        assert f" {fact} " in f" {line} "


def test_a_request_that_found_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cold = ScriptedStream([PromptEvaluated(10, 0, 0.0, 1.0), Finished(StopCause.LENGTH)])
    with caplog.at_level("INFO", logger="rekindle.request"):
        run(cold)
    assert " cached=0 from=- prefilled=10 " in caplog.messages[-1]


class NeverCompiles(RecordingEngine):
    """An engine whose grammars take for ever to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.checks: list[Future[None]] = []
        self.was_asked = threading.Event()

    def check_grammar(self, grammar: Grammar) -> Future[None]:
        self.checks.append(Future())
        self.was_asked.set()
        return self.checks[-1]


def test_a_client_that_leaves_cancels_its_grammar() -> None:
    engine = NeverCompiles()
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(engine, ByteTokenizer(), template, dialect_of(CHATML))
    options = ReplyOptions(sampling=Sampling(grammar=Grammar(GrammarKind.REGEX, "a")))

    async def leave() -> None:
        start = responder.start(Prompt((1,), (), ""), options, request_id="id")
        task = asyncio.create_task(start)
        assert await asyncio.to_thread(engine.was_asked.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(leave())
        assert [check.cancelled() for check in engine.checks] == [True]
    finally:
        for check in engine.checks:
            check.cancel()  # so that a thread that waits ends
