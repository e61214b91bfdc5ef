"""One list of reply events, in every dialect: the bytes, and what the official SDKs make of them.

`golden/dialects` has the streams. `GOLDEN_WRITE=1` writes them again, for a look at the diff.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import types

from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyDone,
    ReplyEvent,
    ReplyProgress,
    ReplyReasoning,
    ReplyText,
)
from tests.api.anthropic import test_streams as test_anthropic_streams
from tests.api.client import USER, post
from tests.api.fakes import FakeResponder, Script, calling, done
from tests.api.gemini import test_streams as test_gemini_streams
from tests.api.openai import test_streams
from tests.api.responses import test_streams as test_responses_streams

GOLDEN = Path(__file__).parent / "golden" / "dialects"

EVENTS: tuple[ReplyEvent, ...] = (
    ReplyProgress(6, 10, 4, 0.5),
    ReplyProgress(10, 10, 4, 1.25),
    ReplyReasoning("The user wants two things.\n"),
    ReplyReasoning("\u2028caf\u00e9"),
    ReplyText('I "read"'),
    ReplyText("\r\n\n"),
    ReplyText("data: \U0001f600"),
    *calling(0, "call_1", "read", '{"path": "caf\u00e9 \u2028", "lines":  [1, 2]}'),
    *calling(1, "call_2", "now", "{}"),
    done(7, finish=FinishReason.TOOL_CALLS),
)
# Calls as they are sampled: pieces end within an escape, and text comes between the calls.
PARTIAL_EVENTS: tuple[ReplyEvent, ...] = (
    ReplyProgress(10, 10, 4, 1.25),
    ReplyReasoning("Hm."),
    ReplyText("First"),
    *calling(0, "call_1", "write", '{"path": "caf', "\\u00", 'e9 \u2028", "n"', ": [1,", " 2]}"),
    ReplyText(" then"),
    *calling(1, "call_2", "now", "{", "}"),
    *calling(2, "call_3", "write", '{"text": "', "\U0001f600", '"}'),
    done(7, finish=FinishReason.TOOL_CALLS),
)
PATCH_PIECES = ('{"in', 'put": "', "*** a\\", "nb \\ud83d", "\\ude00\\u00", 'e9"', "}")
CUSTOM_EVENTS: tuple[ReplyEvent, ...] = (
    ReplyProgress(10, 10, 4, 1.25),
    *calling(0, "call_1", "patch", *PATCH_PIECES),
    done(7, finish=FinishReason.TOOL_CALLS),
)
# Raw text has no parts: a model that is asked to go on with it neither thinks nor calls.
TEXT_EVENTS: tuple[ReplyEvent, ...] = (
    *(event for event in EVENTS if isinstance(event, ReplyText)),
    done(7),
)

# What another release may add to. The numbers in it have tests of their own.
CUT = ("rekindle", "completion_tokens_details", "output_tokens_details", "cache_creation")
REDUCED = ("prompt_tokens_details", "input_tokens_details")  # to the tokens that were cached


@dataclass(frozen=True)
class Heard:
    """What a program that uses an SDK gets of a stream."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, Any], ...]  # id, name, arguments
    n_prompt: int
    n_cached: int
    n_generated: int


@dataclass(frozen=True)
class Dialect:
    name: str
    path: str
    subject: dict[str, Any]
    listen: Callable[[str], Heard]  # to the server at this address
    events: tuple[ReplyEvent, ...] = EVENTS

    def stream(self) -> str:
        return streamed(self.path, self.subject, self.events)


def streamed(path: str, subject: dict[str, Any], script: Script) -> str:
    """Return the stream as a client gets it, apart from ids and times."""
    reply = post(path, {**subject, "stream": True}, FakeResponder(script))
    assert reply.status_code == 200, reply.text
    text = test_gemini_streams.masked(reply.text)
    stream = test_streams.masked(test_responses_streams.masked(text))
    return test_anthropic_streams.masked(stream, reply.headers["x-request-id"])


def hear_chat(url: str) -> Heard:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    reasoning = ""
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                extra = event.chunk.choices[0].delta.model_extra or {}
                reasoning += extra.get("reasoning_content", "")
        reply = stream.get_final_completion()
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    calls = [(call.id, call.function) for call in choice.message.tool_calls or ()]
    return Heard(
        text=choice.message.content or "",
        reasoning=reasoning,
        calls=tuple((id_, of.name, json.loads(of.arguments)) for id_, of in calls),
        n_prompt=reply.usage.prompt_tokens,
        n_cached=reply.usage.prompt_tokens_details.cached_tokens or 0,
        n_generated=reply.usage.completion_tokens,
    )


def hear_completion(url: str) -> Heard:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = list(client.completions.create(model="tiny", prompt="Once", stream=True))
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason is not None] == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Heard(
        text="".join(choice.text for chunk in chunks for choice in chunk.choices),
        reasoning="",
        calls=(),
        n_prompt=usage.prompt_tokens,
        n_cached=usage.prompt_tokens_details.cached_tokens or 0,
        n_generated=usage.completion_tokens,
    )


def hear_response(url: str) -> Heard:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    reasoning = ""
    with client.responses.stream(model="tiny", input="hi") as stream:
        for event in stream:
            if event.type == "response.reasoning_text.delta":
                reasoning += event.delta
        reply = stream.get_final_response()
    assert reply.status == "completed"
    assert reply.usage is not None
    calls: list[tuple[str, str, Any]] = []
    for item in reply.output:
        if item.type == "function_call":
            calls.append((item.call_id, item.name, json.loads(item.arguments)))
        elif item.type == "custom_tool_call":
            calls.append((item.call_id, item.name, {"input": item.input}))
    return Heard(
        text=reply.output_text,
        reasoning=reasoning,
        calls=tuple(calls),
        n_prompt=reply.usage.input_tokens,
        n_cached=reply.usage.input_tokens_details.cached_tokens,
        n_generated=reply.usage.output_tokens,
    )


def hear_message(url: str) -> Heard:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with client.messages.stream(
        model="tiny", max_tokens=99, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        reply = stream.get_final_message()
    assert reply.stop_reason == "tool_use"
    blocks, usage = reply.content, reply.usage
    n_cached = usage.cache_read_input_tokens or 0
    return Heard(
        text="".join(block.text for block in blocks if block.type == "text"),
        reasoning="".join(block.thinking for block in blocks if block.type == "thinking"),
        calls=tuple((each.id, each.name, each.input) for each in blocks if each.type == "tool_use"),
        n_prompt=usage.input_tokens + (usage.cache_creation_input_tokens or 0) + n_cached,
        n_cached=n_cached,
        n_generated=usage.output_tokens,
    )


def hear_content(url: str) -> Heard:
    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url))
    thinking = types.ThinkingConfig(include_thoughts=True)
    config = types.GenerateContentConfig(thinking_config=thinking)
    with closing(client):
        stream = client.models.generate_content_stream(model="tiny", contents="hi", config=config)
        chunks = list(stream)
    candidates = [candidate for chunk in chunks for candidate in chunk.candidates or ()]
    reasons = [each.finish_reason for each in candidates if each.finish_reason]
    assert reasons == [types.FinishReason.STOP]
    parts = [part for chunk in chunks for part in chunk.parts or ()]
    calls = [part.function_call for part in parts if part.function_call]
    usage = chunks[-1].usage_metadata
    assert usage is not None
    return Heard(
        text="".join(part.text or "" for part in parts if not part.thought),
        reasoning="".join(part.text or "" for part in parts if part.thought),
        calls=tuple((each.id or "", each.name or "", each.args) for each in calls),
        n_prompt=usage.prompt_token_count or 0,
        n_cached=usage.cached_content_token_count or 0,
        n_generated=usage.candidates_token_count or 0,
    )


USAGE = {"stream_options": {"include_usage": True}}
CHAT = {"messages": [USER], **USAGE}
MESSAGES = {"messages": [USER], "max_tokens": 99}
GEMINI_PATH = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
GEMINI = {
    "contents": [{"parts": [{"text": "hi"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}
PATCH = {"input": "hi", "tools": [{"type": "custom", "name": "patch"}]}
DIALECTS = [
    Dialect("chat", "/v1/chat/completions", CHAT, hear_chat),
    Dialect(
        "completions", "/v1/completions", {"prompt": "Once", **USAGE}, hear_completion, TEXT_EVENTS
    ),
    Dialect("responses", "/v1/responses", {"input": "hi"}, hear_response),
    Dialect("messages", "/v1/messages", MESSAGES, hear_message),
    Dialect("gemini", GEMINI_PATH, GEMINI, hear_content),
    Dialect("chat_partial", "/v1/chat/completions", CHAT, hear_chat, PARTIAL_EVENTS),
    Dialect("responses_partial", "/v1/responses", {"input": "hi"}, hear_response, PARTIAL_EVENTS),
    Dialect("responses_custom", "/v1/responses", PATCH, hear_response, CUSTOM_EVENTS),
    Dialect("messages_partial", "/v1/messages", MESSAGES, hear_message, PARTIAL_EVENTS),
    Dialect("gemini_partial", GEMINI_PATH, GEMINI, hear_content, PARTIAL_EVENTS),
]

each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@each_dialect
def test_one_list_of_events_is_the_same_stream_of_bytes_as_ever(dialect: Dialect) -> None:
    golden = GOLDEN / f"{dialect.name}.sse"
    stream = comparable(dialect.stream()).encode()
    if "GOLDEN_WRITE" in os.environ:
        golden.write_bytes(stream)
    assert stream == golden.read_bytes()


@each_dialect
def test_sdks_hear_the_same_in_every_dialect(dialect: Dialect) -> None:
    data = (GOLDEN / f"{dialect.name}.sse").read_bytes()
    assert heard(dialect, data) == told(dialect.events)


@each_dialect
def test_sdks_hear_the_same_wherever_a_stream_is_cut_into_packets(dialect: Dialect) -> None:
    """Between the bytes of a character and within a line end, too."""
    data = (GOLDEN / f"{dialect.name}.sse").read_bytes()
    packets = [data[start : start + 7] for start in range(0, len(data), 7)]
    assert heard(dialect, *packets) == told(dialect.events)


def told(events: tuple[ReplyEvent, ...]) -> Heard:
    *_, end = events
    assert isinstance(end, ReplyDone)
    return Heard(
        text="".join(event.text for event in events if isinstance(event, ReplyText)),
        reasoning="".join(event.text for event in events if isinstance(event, ReplyReasoning)),
        calls=tuple(
            (event.id, event.name, json.loads(event.arguments_json))
            for event in events
            if isinstance(event, ReplyCall)
        ),
        n_prompt=end.stats.n_prompt,
        n_cached=end.stats.n_cached,
        n_generated=end.stats.n_generated,
    )


def heard(dialect: Dialect, *packets: bytes) -> Heard:
    with answering(*packets) as url:
        return dialect.listen(url)


@contextmanager
def answering(*packets: bytes) -> Iterator[str]:
    """Answer one request, through a socket: each SDK has an HTTP client of its own."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.send_header("connection", "close")
            self.end_headers()
            for packet in (*packets, b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(packet), packet))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            thread.join()


def comparable(stream: str) -> str:
    for key in CUT:
        stream = replaced(stream, f',"{key}":', lambda _, __: "")
    for key in REDUCED:
        stream = replaced(stream, f'"{key}":', reduced)
    return stream


def reduced(name: str, value: dict[str, Any]) -> str:
    return f'{name}{{"cached_tokens":{value["cached_tokens"]}}}'


def replaced(text: str, name: str, new: Callable[[str, dict[str, Any]], str]) -> str:
    """Every object of that name, by other text; all else to the byte."""
    whole = ""
    while (at := text.find(f"{name}{{")) >= 0:
        value, end = json.JSONDecoder().raw_decode(text, at + len(name))
        whole += text[:at] + new(name, value)
        text = text[end:]
    return whole + text
