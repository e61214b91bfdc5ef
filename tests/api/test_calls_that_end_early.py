"""Calls that the model did not finish, in every wire format, as the official SDKs hear them.

A landed call was ended by the engine, so that its arguments are valid: the finish reason says
that the reply was too long. A broken call has no end at all: the stream ends with an error.
`golden/dialects` has the streams. `GOLDEN_WRITE=1` writes them again.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest

from rekindle.chat.reply.events import FinishReason, ReplyProgress, ReplyText
from rekindle.errors import DecodeFailed
from tests.api.client import USER, post
from tests.api.fakes import FakeResponder, Script, calling, done
from tests.api.test_one_list_of_events import GOLDEN, answering, comparable, streamed

BEGUN = calling(1, "call_2", "write", '{"path": "b", "te', 'xt": "half a')[:-1]
FIRST = (
    ReplyProgress(10, 10, 4, 1.25),
    ReplyText("Two files."),
    *calling(0, "call_1", "write", '{"path"', ': "a"}'),
)
SCRIPTS: dict[str, Script] = {
    "landed": (
        *FIRST,
        *calling(1, "call_2", "write", '{"path": "b", "te', 'xt": "half a', '"}', is_cut=True),
        done(7, finish=FinishReason.LENGTH),
    ),
    "broken_call": (*FIRST, *BEGUN, DecodeFailed("llama.cpp ran out of memory.")),
}
HALF = '{"path": "b", "text": "half a'


@dataclass
class Seen:
    """What a program sees that follows the events of an SDK."""

    pieces: dict[str, str] = field(default_factory=dict)  # arguments, by the call's place
    ended: list[Any] = field(default_factory=list)  # arguments of the calls that ended
    finish: str | None = None


def see_chat(url: str, seen: Seen) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                place = str(event.index)
                seen.pieces[place] = seen.pieces.get(place, "") + event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                seen.ended.append(json.loads(event.arguments))
        # `get_final_completion` raises if the reply was cut, with or without calls.
        seen.finish = stream.current_completion_snapshot.choices[0].finish_reason


def see_response(url: str, seen: Seen) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model="tiny", input="hi") as stream:
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                place = str(event.output_index)
                seen.pieces[place] = seen.pieces.get(place, "") + event.delta
            elif event.type == "response.output_item.done" and event.item.type == "function_call":
                seen.ended.append(json.loads(event.item.arguments))
            elif event.type == "response.incomplete":
                assert event.response.incomplete_details is not None
                seen.finish = event.response.incomplete_details.reason


def see_message(url: str, seen: Seen) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with client.messages.stream(
        model="tiny", max_tokens=99, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        for event in stream:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                place = str(event.index)
                seen.pieces[place] = seen.pieces.get(place, "") + event.delta.partial_json
            elif event.type == "content_block_stop" and event.content_block.type == "tool_use":
                seen.ended.append(event.content_block.input)
        seen.finish = stream.get_final_message().stop_reason


@dataclass(frozen=True)
class WireFormat:
    name: str
    path: str
    subject: dict[str, Any]
    see: Callable[[str, Seen], None]
    error: type[Exception]
    cut: str  # the finish reason of a reply that was too long


FORMATS = [
    WireFormat(
        "chat",
        "/v1/chat/completions",
        {"messages": [USER]},
        see_chat,
        openai.APIError,
        "length",
    ),
    WireFormat(
        "responses",
        "/v1/responses",
        {"input": "hi"},
        see_response,
        openai.APIError,
        "max_output_tokens",
    ),
    WireFormat(
        "messages",
        "/v1/messages",
        {"messages": [USER], "max_tokens": 99},
        see_message,
        anthropic.APIStatusError,
        "max_tokens",
    ),
]

each_format = pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)


def golden(wire: WireFormat, script: str) -> bytes:
    return (GOLDEN / f"{wire.name}_{script}.sse").read_bytes()


@each_format
@pytest.mark.parametrize("script", SCRIPTS)
def test_calls_that_end_early_are_the_same_bytes_as_ever(wire: WireFormat, script: str) -> None:
    stream = comparable(streamed(wire.path, wire.subject, SCRIPTS[script])).encode()
    if "GOLDEN_WRITE" in os.environ:
        (GOLDEN / f"{wire.name}_{script}.sse").write_bytes(stream)
    assert stream == golden(wire, script)


@each_format
@pytest.mark.parametrize("streams", [True, False])
def test_parts_of_calls_are_only_for_clients_that_stream(
    wire: WireFormat,
    streams: bool,  # noqa: FBT001
) -> None:
    responder = FakeResponder()
    post(wire.path, {**wire.subject, "stream": streams}, responder)
    assert responder.started[0].options.streams == streams


@each_format
def test_a_landed_call_is_whole_for_sdks_and_the_finish_reason_says_it_was_cut(
    wire: WireFormat,
) -> None:
    seen = Seen()
    with answering(golden(wire, "landed")) as url:
        wire.see(url, seen)
    assert seen.ended == [{"path": "a"}, {"path": "b", "text": "half a"}]
    assert seen.finish == wire.cut


@each_format
def test_sdks_raise_at_an_error_within_a_call_and_never_end_the_call(wire: WireFormat) -> None:
    seen = Seen()
    with (
        answering(golden(wire, "broken_call")) as url,
        pytest.raises(wire.error, match="ran out of memory"),
    ):
        wire.see(url, seen)
    assert list(seen.pieces.values()) == ['{"path": "a"}', HALF]
    assert seen.ended == [{"path": "a"}]
    assert seen.finish is None
