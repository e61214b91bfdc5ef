"""Calls are shown while they are sampled, if they will be finished; otherwise when whole."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from rekindle.chat.conversation import Tool
from rekindle.chat.dialects.base import CallArguments, CallBegan, CallEnded, ParsedCall
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.assembler import ReplyAssembler, ReplyReader
from rekindle.chat.reply.end_size import end_size
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyCallArguments,
    ReplyCallBegan,
    ReplyDone,
    ReplyEvent,
    ReplyOptions,
    ReplyPart,
    ReplyText,
)
from rekindle.chat.reply.parser import ParsedText, Part, ReplyParser
from rekindle.chat.reply.stream import ReplyStream
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.errors import CallBroken
from rekindle.generation.events import StopCause, TokenSampled
from rekindle.generation.request import LANDING_TOKENS, GenerationRequest, Sampling
from rekindle.generation.status import EngineStatus
from tests.chat.reply.test_stream import ASKED, Memory
from tests.chat.test_responder import ByteTokenizer, RecordingEngine, ScriptedStream, script
from tests.support.chat import chat_responder, reply_stream
from tests.support.dialects import dialect_of

HERMES = dialect_of("<tool_call>")
SCHEMAS: Schemas = {
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
    "now": {"type": "object"},
}
ARGUMENTS = '{"text": "caf\\u00e9 {\\n} \\"b\\""}'
HEAD = '<tool_call>\n{"name": "write", "arguments": '
WRITE = f"{HEAD}{ARGUMENTS}}}\n</tool_call>"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ROOMY = 10_000


def parse_in_pieces(text: str, *, streams: bool = True) -> tuple[list[list[Part]], ReplyParser]:
    """Return the parts that each character gives, and those at the end."""
    parser = ReplyParser(
        HERMES, SCHEMAS, begins_in_reasoning=False, may_stream=lambda _name: streams
    )
    return [*(parser.feed(character) for character in text), parser.finish()], parser


def replying(
    text: str,
    *,
    cause: StopCause = StopCause.END_OF_TURN,
    max_tokens: int = ROOMY,
    streams: bool = True,
    memory: Memory | None = None,
    scored: bool = False,
    in_reasoning: bool = False,
    stop: tuple[str, ...] = (),
    schemas: Schemas = SCHEMAS,
) -> tuple[ReplyStream, ScriptedStream]:
    tokenizer = ByteTokenizer()
    prompt = Prompt((1,), (), "", conversation=ASKED, remember=memory or Memory())
    reader = ReplyReader(
        HERMES,
        schemas,
        in_reasoning,
        tokenizer.piece,
        streams_calls=streams,
        max_tokens=max_tokens,
    )
    tokens = script(text, cause, scored=scored)
    return reply_stream(prompt, tokens, tokenizer, reader=reader, stop=stop), tokens


async def collect(reply: ReplyStream) -> list[ReplyEvent]:
    return [event async for event in reply]


def parts_of(events: list[ReplyEvent]) -> list[ReplyPart]:
    return [event for event in events if isinstance(event, ReplyPart)]


def finish_of(events: list[ReplyEvent]) -> FinishReason:
    assert isinstance(events[-1], ReplyDone)
    return events[-1].finish


def text_of(events: list[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReplyText))


def test_a_call_whose_end_was_forced_is_cut_and_the_calls_before_it_are_not() -> None:
    tokenizer = ByteTokenizer()
    reader = ReplyReader(HERMES, SCHEMAS, False, tokenizer.piece, True, ROOMY)  # noqa: FBT003
    reply = ReplyAssembler(Prompt((1,), (), "", conversation=ASKED), tokenizer, reader, ())
    text = f"{NOW}\n{WRITE}".encode()
    n_forced = len('"}}\n</tool_call>')
    for n_left, byte in zip(range(len(text), 0, -1), text, strict=True):
        reply.feed(TokenSampled(byte, lands=n_left <= n_forced))
    reply.finish()
    assert [(call.name, call.is_cut) for call in reply.calls] == [("now", False), ("write", True)]


def test_the_name_comes_before_the_arguments_are_sampled() -> None:
    given, _ = parse_in_pieces(WRITE)
    began = next(n for n, parts in enumerate(given) if parts)
    assert given[began] == [CallBegan("write")]
    assert began < len(HEAD)


def test_arguments_come_as_they_are_sampled_and_add_up_to_the_call() -> None:
    given, _ = parse_in_pieces(WRITE)
    pieces = [part.json for parts in given for part in parts if isinstance(part, CallArguments)]
    assert len(pieces) > len(ARGUMENTS) // 2
    assert "".join(pieces) == ARGUMENTS
    assert CallEnded(ParsedCall("write", ARGUMENTS)) in [part for parts in given for part in parts]
    arrived = ""
    for n, parts in enumerate(given):
        arrived += "".join(part.json for part in parts if isinstance(part, CallArguments))
        assert len(arrived) >= min(n - len(HEAD) - len("\\u00e9"), len(ARGUMENTS))


def test_a_call_that_does_not_stream_comes_when_it_is_whole() -> None:
    given, _ = parse_in_pieces(f"{WRITE}x", streams=False)
    [parts] = [parts for parts in given[: len(WRITE)] if parts]
    call = ParsedCall("write", ARGUMENTS)
    assert parts == [CallBegan("write"), CallArguments(ARGUMENTS), CallEnded(call)]


def test_a_call_of_a_tool_that_was_not_offered_stays_text() -> None:
    text = WRITE.replace('"write"', '"rm"')
    given, parser = parse_in_pieces(text)
    assert "".join(p.text for parts in given for p in parts if isinstance(p, ParsedText)) == text
    assert not parser.is_broken


def test_a_call_that_breaks_behind_its_beginning_is_reported() -> None:
    text = f"{HEAD}[1]}}\n</tool_call>"
    for streams in (True, False):
        given, parser = parse_in_pieces(f"{HEAD}{{}} oops", streams=streams)
        assert parser.is_broken == streams
    given, parser = parse_in_pieces(text, streams=False)
    assert not parser.is_broken
    assert "".join(p.text for parts in given for p in parts if isinstance(p, ParsedText)) == text


def test_text_and_calls_come_in_the_order_of_the_reply() -> None:
    events = asyncio.run(collect(replying(f"First\n{WRITE}\n{NOW}\nlast")[0]))
    kinds = [type(part) for part in parts_of(events)]
    changes = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] is not kind]
    call = [ReplyCallBegan, ReplyCallArguments, ReplyCall]
    assert changes == [ReplyText, *call, *call, ReplyText]
    assert finish_of(events) is FinishReason.TOOL_CALLS
    began = [part for part in parts_of(events) if isinstance(part, ReplyCallBegan)]
    whole = [part for part in parts_of(events) if isinstance(part, ReplyCall)]
    assert [(each.index, each.id) for each in began] == [(each.index, each.id) for each in whole]
    assert [each.index for each in began] == [0, 1]
    for one in whole:
        pieces = [
            part.json
            for part in parts_of(events)
            if isinstance(part, ReplyCallArguments) and part.index == one.index
        ]
        assert "".join(pieces) == one.arguments_json
        json.loads(one.arguments_json)


@pytest.mark.parametrize("streams", [True, False])
def test_each_score_is_sent_once_and_in_order(streams: bool) -> None:  # noqa: FBT001
    text = f"First {WRITE}{NOW} last"
    events = asyncio.run(collect(replying(text, streams=streams, scored=True)[0]))
    scored = [token.chosen.token for part in parts_of(events) for token in part.scored]
    assert bytes(scored).decode() == text


@pytest.mark.parametrize(("n_missing", "streams"), [(0, True), (1, False)])
def test_a_call_streams_only_if_enough_tokens_are_left_to_land_it(
    n_missing: int,
    streams: bool,  # noqa: FBT001
) -> None:
    n_head = WRITE.index('"write"') + len('"write"')
    n_end = end_size(SCHEMAS["write"])
    assert n_end is not None
    n_needed = LANDING_TOKENS + n_end
    reply, tokens = replying(WRITE, max_tokens=n_head + n_needed - n_missing)

    async def n_tokens_at_the_beginning() -> int:
        async for event in reply:
            if isinstance(event, ReplyCallBegan):
                return tokens.n_taken - 1  # without the event of the prompt
        raise AssertionError

    assert asyncio.run(n_tokens_at_the_beginning()) == (n_head if streams else len(WRITE))


def test_a_call_that_was_shown_in_part_and_is_cut_off_fails_the_reply() -> None:
    memory = Memory()
    reply, _ = replying(WRITE[:-30], cause=StopCause.LENGTH, memory=memory)
    seen: list[ReplyEvent] = []

    async def read() -> None:
        async for event in reply:
            seen.append(event)

    with pytest.raises(CallBroken, match="must not be run"):
        asyncio.run(read())
    assert any(isinstance(event, ReplyCallBegan) for event in seen)
    assert not any(isinstance(event, ReplyCall | ReplyText | ReplyDone) for event in seen)
    assert memory.turns == []


@pytest.mark.parametrize(
    "text",
    [
        {"$ref": "#/$defs/text"},
        {"type": "string", "pattern": "^[a-f0-9]{4000}$"},
        {"type": "array", "minItems": 900, "items": {"type": "integer"}},
    ],
)
def test_a_call_that_the_engine_may_not_finish_does_not_stream_and_is_text_if_cut_off(
    text: dict[str, Any],
) -> None:
    required = {"type": "object", "required": [f"member_{i}" for i in range(300)]}
    write = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    schemas = {"write": {**write, "$defs": {"text": required}}}
    cut = WRITE[:-30]
    events = asyncio.run(collect(replying(cut, cause=StopCause.LENGTH, schemas=schemas)[0]))
    assert text_of(events) == cut
    assert finish_of(events) is FinishReason.LENGTH


def test_a_call_that_was_not_shown_and_is_cut_off_is_text() -> None:
    cut = WRITE[:-30]
    events = asyncio.run(collect(replying(cut, cause=StopCause.LENGTH, streams=False)[0]))
    assert text_of(events) == cut
    assert finish_of(events) is FinishReason.LENGTH


class CuttingEngine(RecordingEngine):
    """Breaks off every call."""

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        return script(WRITE[:-30], StopCause.LENGTH)

    def status(self) -> EngineStatus:
        return replace(super().status(), n_ctx=ROOMY)


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_that_is_cut_off_fails_the_reply_only_if_the_client_streams(
    streams: bool,  # noqa: FBT001
) -> None:
    template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
    responder = chat_responder(CuttingEngine(), ByteTokenizer(), template, HERMES)
    function = {"name": "write", "parameters": SCHEMAS["write"]}
    tool = Tool("write", json.dumps({"type": "function", "function": function}))

    async def reply() -> list[ReplyEvent]:
        prompt = await responder.prepare_chat(replace(ASKED, tools=(tool,)))
        options = ReplyOptions(sampling=Sampling(), streams=streams)
        return await collect(await responder.start(prompt, options, request_id="id"))

    if streams:
        with pytest.raises(CallBroken):
            asyncio.run(reply())
    else:
        events = asyncio.run(reply())
        assert text_of(events) == WRITE[:-30]
        assert finish_of(events) is FinishReason.LENGTH


def test_a_landed_call_has_the_finish_reason_length() -> None:
    events = asyncio.run(collect(replying(WRITE, cause=StopCause.LENGTH)[0]))
    assert any(isinstance(event, ReplyCall) for event in events)
    assert finish_of(events) is FinishReason.LENGTH


def test_a_client_that_leaves_within_a_call_leaves_whole_calls_remembered() -> None:
    memory = Memory()
    reply, _ = replying(NOW + WRITE, memory=memory)

    async def read_some() -> int:
        n_pieces = 0
        async for event in reply:
            n_pieces += isinstance(event, ReplyCallArguments) and event.index == 1
            if n_pieces == 5:
                break
        reply.close()
        return n_pieces

    assert asyncio.run(read_some()) == 5
    [(text, said)] = memory.turns
    assert (NOW + WRITE).startswith(text)
    assert [call.name for call in said.calls] == ["now"]
    assert said.text == text.removeprefix(NOW)


def test_text_that_may_begin_a_stop_string_is_shown_before_a_call() -> None:
    events = asyncio.run(collect(replying(f"a ST{NOW}", stop=("STOP",))[0]))
    parts = parts_of(events)
    assert [part.text for part in parts[:3] if isinstance(part, ReplyText)] == ["a", " ", "ST"]
    assert isinstance(parts[3], ReplyCallBegan)
    assert not any(isinstance(part, ReplyText) for part in parts[3:])


@pytest.mark.parametrize(
    ("text", "in_reasoning", "n_reasoning"),
    [
        ("hm</think>yes", True, len("hm</think>")),
        ("<think>hm</think>yes", False, len("<think>hm</think>")),
        ("<thank", False, 0),
        ("yes", False, 0),
        (WRITE, False, 0),
    ],
)
def test_reasoning_tokens_are_counted_with_their_marks(
    text: str,
    in_reasoning: bool,  # noqa: FBT001
    n_reasoning: int,
) -> None:
    events = asyncio.run(collect(replying(text, in_reasoning=in_reasoning)[0]))
    assert isinstance(events[-1], ReplyDone)
    assert events[-1].stats.n_reasoning == n_reasoning
    assert events[-1].stats.n_generated == len(text)
