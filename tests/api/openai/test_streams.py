"""Streams byte for byte, apart from ids and times: `golden/` has what clients must see."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rekindle.api.http.context import ApiSettings
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyProgress,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
    TopToken,
)
from rekindle.errors import DecodeFailed
from tests.api.client import USER, chat, client_of, post
from tests.api.fakes import FakeResponder, Script, Wait, api_settings, calling, done

GOLDEN = Path(__file__).parents[1] / "golden"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream_options": {"include_usage": True}}

AWKWARD: Script = (
    ReplyText('a "quote"\n'),
    ReplyText("caf\u00e9 \u2028\U0001f600"),
    done(finish=FinishReason.LENGTH),
)
SLOW: Script = (
    ReplyProgress(6, 10, 4, 0.5),
    ReplyProgress(10, 10, 4, 1.25),
    ReplyText("!"),
    done(),
)
SCORED: Script = (
    ReplyText(
        "\u00e9",
        (
            ScoredToken(TopToken(195, "\ufffd", b"\xc3", -0.5), (), 0),
            ScoredToken(
                TopToken(169, "\ufffd", b"\xa9", float("-inf")),
                (TopToken(65, "A", b"A", -0.25), TopToken(66, "B", b"B", -2.0)),
                1,
            ),
        ),
    ),
    done(),
)
CALLING: Script = (
    ReplyReasoning("Hm \u2028"),
    ReplyText("Let me see."),
    *calling(0, "call_1", "read", '{"path": "caf\u00e9 \u2028\U0001f600"}'),
    *calling(1, "call_2", "now", "{}"),
    done(finish=FinishReason.TOOL_CALLS),
)
BRACES = ScoredToken(TopToken(2, "{}", b"{}", -1.5), (), 2)
SCORED_CALL: Script = (
    ReplyReasoning("Hm", (ScoredToken(TopToken(1, "Hm", b"Hm", -0.5), (), 0),)),
    *calling(0, "call_1", "now", "{}", scored=(BRACES,)),
    done(finish=FinishReason.TOOL_CALLS),
)
BROKEN: Script = (ReplyText("a"), DecodeFailed("llama.cpp ran out of memory."))


@pytest.mark.parametrize(
    ("name", "path", "script", "fields"),
    [
        ("chat", CHAT, AWKWARD, {}),
        ("chat_two_with_usage", CHAT, AWKWARD, {"n": 2, **USAGE}),
        ("chat_progress", CHAT, SLOW, {"return_progress": True}),
        ("chat_progress_unasked", CHAT, SLOW, {}),
        ("chat_logprobs", CHAT, SCORED, {"logprobs": True, "top_logprobs": 2}),
        ("chat_calls", CHAT, CALLING, {}),
        ("chat_calls_two_with_usage", CHAT, CALLING, {"n": 2, **USAGE}),
        ("chat_calls_logprobs", CHAT, SCORED_CALL, {"logprobs": True}),
        ("chat_broken", CHAT, BROKEN, USAGE),
        ("completion_echo", COMPLETIONS, AWKWARD, {"echo": True}),
        ("completion_with_usage", COMPLETIONS, AWKWARD, USAGE),
        ("completion_logprobs", COMPLETIONS, SCORED, {"logprobs": 2}),
    ],
)
def test_stream_matches_its_transcript(
    name: str, path: str, script: Script, fields: dict[str, Any]
) -> None:
    subject: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "Once"}
    reply = post(path, {**subject, "stream": True, **fields}, FakeResponder(script))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert masked(reply.text) == (GOLDEN / f"{name}.sse").read_text()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_chunks_of_a_stream_add_up_to_the_whole_reply(path: str) -> None:
    subject: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "Once"}
    whole = post(path, subject, FakeResponder(AWKWARD)).json()["choices"][0]
    stream = post(path, {**subject, "stream": True}, FakeResponder(AWKWARD))
    choices = [chunk["choices"][0] for chunk in chunks(stream.text)]
    if path == CHAT:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_bug_in_a_stream_is_logged_and_not_shown_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        reply = chat(FakeResponder((ReplyText("a"), ValueError("secret"))), stream=True)
    assert chunks(reply.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "[DONE]" not in reply.text
    assert "ValueError: secret" in caplog.text


def test_one_failing_reply_closes_the_others() -> None:
    responder = FakeResponder(lambda i: BROKEN if i == 1 else (Wait(), done()))
    reply = chat(responder, stream=True, n=3)
    assert chunks(reply.text)[-1]["error"]["code"] == "engine_error"
    assert all(started.stream.closed.is_set() for started in responder.started)


def test_quiet_stream_gets_comments_and_a_busy_one_does_not() -> None:
    settings = api_settings(ping_seconds=0.01)
    quiet = asyncio.run(stream_text((Wait(0.05), ReplyText("a"), done()), settings))
    assert ": keep-alive\n\n" in quiet
    assert "".join(chunk_texts(quiet)) == "a"
    busy = asyncio.run(stream_text((*[ReplyText("a")] * 200, done()), api_settings()))
    assert "keep-alive" not in busy


async def stream_text(script: Script, settings: ApiSettings) -> str:
    async with client_of(FakeResponder(script), settings) as client:
        return (await client.post(CHAT, json={"messages": [USER], "stream": True})).text


def masked(stream: str) -> str:
    for pattern, mask in (
        (r"cmpl-[0-9a-f]{32}", "cmpl-ID"),
        (r'"created":\d+', '"created":0'),
        (r"rekindle-[^\"]+", "rekindle-VERSION"),
    ):
        stream = re.sub(pattern, mask, stream)
    return stream


def chunks(stream: str) -> list[Any]:
    frames = [frame.removeprefix("data: ") for frame in stream.split("\n\n") if frame]
    return [json.loads(frame) for frame in frames if frame.startswith("{")]


def chunk_texts(stream: str) -> list[str]:
    return [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(stream)]
