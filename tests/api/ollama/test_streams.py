"""Streams byte for byte, apart from times: `golden/` has what clients must see."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from rekindle.chat.reply.events import FinishReason, ReplyReasoning
from tests.api.client import USER, client_of, post, serving
from tests.api.fakes import FakeResponder, Script, Wait, api_settings, done
from tests.api.openai.test_streams import (
    AWKWARD,
    BROKEN,
    CALLING,
    SCORED,
    SCORED_CALL,
    SLOW,
)

GOLDEN = Path(__file__).parents[1] / "golden"
CHAT, GENERATE = "/api/chat", "/api/generate"
THINKING: Script = (
    ReplyReasoning("Hm \u2028"),
    *AWKWARD[:-1],
    done(finish=FinishReason.LENGTH, n_reasoning=2),
)


@pytest.mark.parametrize(
    ("name", "path", "script", "fields"),
    [
        ("ollama_chat", CHAT, AWKWARD, {}),
        ("ollama_chat_calls", CHAT, CALLING, {}),
        ("ollama_chat_calls_logprobs", CHAT, SCORED_CALL, {"logprobs": True}),
        ("ollama_chat_logprobs", CHAT, SCORED, {"logprobs": True, "top_logprobs": 2}),
        ("ollama_chat_slow", CHAT, SLOW, {"stream": None}),
        ("ollama_chat_broken", CHAT, BROKEN, {"stream": True}),
        ("ollama_generate", GENERATE, THINKING, {}),
        ("ollama_generate_raw", GENERATE, AWKWARD, {"raw": True}),
        ("ollama_generate_broken", GENERATE, BROKEN, {}),
    ],
)
def test_stream_matches_its_transcript(
    name: str, path: str, script: Script, fields: dict[str, Any]
) -> None:
    subject: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "Once"}
    reply = post(path, {**subject, **fields}, FakeResponder(script))
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    golden = GOLDEN / f"{name}.ndjson"
    assert masked(reply.text) == golden.read_text("utf-8")


def masked(stream: str) -> str:
    stream = re.sub(r'"created_at":"[^"]+"', '"created_at":"0"', stream)
    return re.sub(r'"(total|load)_duration":\d+', r'"\1_duration":0', stream)


@pytest.mark.parametrize(
    ("path", "script"),
    [
        (CHAT, AWKWARD),
        (CHAT, CALLING),
        (CHAT, SCORED),
        (GENERATE, THINKING),
        (GENERATE, SCORED),
    ],
)
def test_a_whole_reply_is_the_sum_of_its_lines(path: str, script: Script) -> None:
    subject = {"messages": [USER], "prompt": "Once", "logprobs": script is SCORED}
    streamed = post(path, subject, FakeResponder(script))
    whole = post(path, {**subject, "stream": False}, FakeResponder(script)).json()
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    added: dict[str, Any] = {}
    for line in lines:
        merge(added, line)
    for reply in (added, whole):
        for name in ("created_at", "total_duration", "load_duration"):
            del reply[name]
    assert added == whole


def merge(added: dict[str, Any], line: dict[str, Any]) -> None:
    for key, value in line.items():
        if key in ("content", "thinking", "response", "logprobs", "tool_calls"):
            added[key] = added[key] + value if key in added else value
        elif key == "message":
            merge(added.setdefault("message", {}), value)
        else:
            added[key] = value


def test_a_silent_stream_stays_valid_json_lines() -> None:
    script: Script = (Wait(1.0), *AWKWARD)

    async def run() -> httpx.Response:
        async with client_of(FakeResponder(script), api_settings(ping_seconds=0.02)) as client:
            return await client.post(CHAT, json={"messages": [USER]})

    assert asyncio.run(run()).text.startswith("  ")
    responder = FakeResponder(script)
    with serving(responder, api_settings(ping_seconds=0.02)) as url, ollama.Client(url) as client:
        *parts, last = client.chat("any", [USER], stream=True)
    assert [part.message.content for part in parts] == ['a "quote"\n', "caf\u00e9 \u2028\U0001f600"]
    assert last.done


def test_an_error_in_a_stream_is_raised_by_the_client() -> None:
    with serving(FakeResponder(BROKEN)) as url, ollama.Client(url) as client:
        stream = client.chat("any", [USER], stream=True)
        assert next(stream).message.content == "a"
        with pytest.raises(ollama.ResponseError, match="ran out of memory"):
            next(stream)
