"""Anthropic's streams byte for byte, apart from ids: `golden/` has what clients must see."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rekindle.api.anthropic.bodies import MessageBody, MessageEvent
from rekindle.api.anthropic.messages import conversation_of
from rekindle.api.anthropic.request import marks_of
from rekindle.api.anthropic.response import usage_of
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.cache_controls import pins_of
from rekindle.api.requests.media import MediaReader
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import FinishReason, ReplyDone, ReplyProgress, ReplyText
from rekindle.config.choices import MediaPolicy
from rekindle.generation.request import CacheTerms
from tests.api.anthropic.test_messages import send, text, user
from tests.api.client import USER, client_of
from tests.api.fakes import FakeResponder, Script, Wait, api_settings, calling, done, envelope
from tests.api.openai.test_streams import AWKWARD, BROKEN, CALLING, SLOW

GOLDEN = Path(__file__).parents[1] / "golden"
EVALUATED = ReplyProgress(10, 10, 4, 0.5)
STOPPED: Script = (ReplyText("a"), ReplyDone(FinishReason.STOP, done().stats, "\n\n"))
TEN_TOKENS = [user(text("four"))]  # the fake's prompt is `[user]four`
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("name", "script", "fields"),
    [
        ("messages", (EVALUATED, *AWKWARD), {}),
        ("messages_progress", SLOW, {"messages": TEN_TOKENS, **CACHED}),
        ("messages_calls", (EVALUATED, *CALLING), {}),
        ("messages_stopped", (EVALUATED, *STOPPED), {"stop_sequences": ["\n\n"]}),
        ("messages_primed", (EVALUATED, done(0, finish=FinishReason.LENGTH)), {"max_tokens": 0}),
        ("messages_broken", (EVALUATED, *BROKEN), {}),
    ],
)
def test_stream_matches_its_transcript(name: str, script: Script, fields: dict[str, Any]) -> None:
    reply = send(FakeResponder(script), stream=True, **fields)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert masked(reply.text, reply.headers["request-id"]) == (GOLDEN / f"{name}.sse").read_text()


@pytest.mark.parametrize("script", [AWKWARD, CALLING, STOPPED])
def test_events_of_a_stream_add_up_to_the_whole_reply(script: Script) -> None:
    whole = send(FakeResponder(script)).json()
    stream = events(send(FakeResponder((EVALUATED, *script)), stream=True).text)
    message = added_up(stream)
    for part in (whole, message):
        part.pop("id")
    assert message == whole
    opened = [event["index"] for event in stream if event["type"] == "content_block_start"]
    assert opened == list(range(len(whole["content"])))


@pytest.mark.parametrize("script", [AWKWARD, CALLING, STOPPED, SLOW])
def test_replies_fit_the_types_that_describe_them(script: Script) -> None:
    whole = send(FakeResponder(script)).json()
    TypeAdapter(MessageBody).validate_python(whole, extra="forbid")
    for event in events(send(FakeResponder(script), stream=True).text):
        MessageEvent.model_validate(event, extra="forbid")


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, (6, 0, 4)),
        (CACHED, (0, 6, 4)),
        ({"messages": [user(text("four", **CACHED))]}, (0, 6, 4)),
    ],
)
def test_input_counts_add_up_to_the_prompt(
    fields: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    usage = send(**{"messages": TEN_TOKENS, **fields}).json()["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(usage[name] for name in names) == counts
    assert sum(counts) == 10
    created = {"ephemeral_5m_input_tokens": counts[1], "ephemeral_1h_input_tokens": 0}
    assert usage["cache_creation"] == created


def test_an_hour_is_counted_apart() -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    usage = send(messages=TEN_TOKENS, cache_control=control).json()["usage"]
    created = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 6}
    assert usage["cache_creation"] == created


def test_a_breakpoint_at_the_head_divides_the_usage_there() -> None:
    body = MessagesRequest.model_validate(
        {"messages": TEN_TOKENS, "max_tokens": 1, "system": [text("s", **CACHED)]}
    )
    conversation = conversation_of(body, MediaReader(MediaPolicy.TEXT))
    tokens = tuple(range(10))
    prompt = Prompt(tokens, (), "", conversation=conversation, locate=lambda n: 7 * n)
    found = envelope(terms=CacheTerms(pins=pins_of(marks_of(body, conversation), prompt)))
    usage = usage_of(found, n_prompt=10, n_cached=4, n_generated=0)
    assert (usage["cache_creation_input_tokens"], usage["input_tokens"]) == (3, 3)
    behind = usage_of(found, n_prompt=10, n_cached=8, n_generated=0)
    assert (behind["cache_creation_input_tokens"], behind["input_tokens"]) == (0, 2)


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    script: Script = (
        *calling(0, "call_1", "f", '{"a"', ": 1.0}"),
        ReplyText("x"),
        *calling(1, "call_2", "g", "{}"),
        done(finish=FinishReason.TOOL_CALLS),
    )
    streamed = added_up(events(send(FakeResponder(script), stream=True).text))
    f = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1.0}}
    g = {"type": "tool_use", "id": "call_2", "name": "g", "input": {}}
    assert streamed["content"] == [f, {"type": "text", "text": "x"}, g]
    # A whole message has its text first.
    assert send(FakeResponder(script)).json()["content"] == [streamed["content"][1], f, g]


def test_quiet_stream_is_pinged_before_its_message_starts() -> None:
    async def run() -> str:
        settings = api_settings(ping_seconds=0.01)
        script = (Wait(0.05), EVALUATED, Wait(0.05), ReplyText("a"), done())
        async with client_of(FakeResponder(script), settings) as client:
            body = {"messages": [USER], "max_tokens": 9, "stream": True}
            return (await client.post("/v1/messages", json=body)).text

    kinds = [event["type"] for event in events(asyncio.run(run()))]
    start = kinds.index("message_start")
    assert set(kinds[:start]) == {"ping"}
    assert kinds[start + 1] == "ping"
    assert kinds[-1] == "message_stop"


def masked(stream: str, request_id: str) -> str:
    return re.sub(r"msg_[0-9a-f]{32}", "msg_ID", stream).replace(request_id, "REQUEST")


def events(stream: str) -> list[Any]:
    found = []
    for frame in stream.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def added_up(stream: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = stream[0]["message"]
    partial: dict[int, str] = {}
    for event in stream:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block = message["content"][event["index"]]
                delta = event["delta"]
                kind = delta.pop("type")
                [(key, value)] = delta.items()
                if kind == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + value
                    block["input"] = partial[event["index"]]
                else:
                    block[key] += value
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
                message["rekindle"] = event["rekindle"]
    for index, source in partial.items():
        message["content"][index]["input"] = json.loads(source)
    return message
