"""Gemini's streams byte for byte, apart from ids: `golden/` has what clients must see.

`GOLDEN_WRITE=1` writes them again, for a look at the diff.
"""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from rekindle.api.gemini.bodies import GenerateContentBody
from rekindle.chat.reply.events import FinishReason, ReplyText
from tests.api.client import client_of, post
from tests.api.fakes import FakeResponder, Script, Wait, api_settings, done
from tests.api.gemini.test_requests import CONTENTS, ROOT, send
from tests.api.openai.test_streams import AWKWARD, BROKEN, CALLING, SCORED, SLOW

GOLDEN = Path(__file__).parents[1] / "golden"
THINKS = {"thinkingConfig": {"includeThoughts": True}}
TWO = {"candidateCount": 2, "responseLogprobs": True, "logprobs": 2}
PRIMED: Script = (done(0, finish=FinishReason.LENGTH),)
BODY = TypeAdapter(GenerateContentBody)


def stream(script: Script, config: dict[str, Any] | None = None, query: str = "") -> httpx.Response:
    body = {"contents": CONTENTS, "generationConfig": config or {}}
    return post(f"{ROOT}:streamGenerateContent{query}", body, FakeResponder(script))


def events(script: Script, config: dict[str, Any] | None = None) -> list[Any]:
    frames = stream(script, config, "?alt=sse").text.split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@pytest.mark.parametrize(
    ("name", "script", "config"),
    [
        ("gemini.sse", AWKWARD, {}),
        ("gemini.json", AWKWARD, {}),
        ("gemini_progress.sse", SLOW, {}),
        ("gemini_calls.sse", CALLING, {}),
        ("gemini_thoughts.sse", CALLING, THINKS),
        ("gemini_two_logprobs.sse", SCORED, TWO),
        ("gemini_primed.sse", PRIMED, {"maxOutputTokens": 0}),
        ("gemini_broken.sse", BROKEN, {}),
        ("gemini_broken.json", BROKEN, {}),
    ],
)
def test_stream_matches_its_transcript(name: str, script: Script, config: dict[str, Any]) -> None:
    is_sse = name.endswith(".sse")
    reply = stream(script, config, "?alt=sse" if is_sse else "")
    wanted = "text/event-stream; charset=utf-8" if is_sse else "application/json"
    assert reply.headers["content-type"] == wanted
    golden = GOLDEN / name
    text = masked(reply.text)
    if "GOLDEN_WRITE" in os.environ:
        golden.write_bytes(text.encode())
    assert text == golden.read_bytes().decode()


@pytest.mark.parametrize("script", [AWKWARD, SLOW, CALLING])
def test_the_array_has_the_data_of_the_events(script: Script) -> None:
    items = [json.loads(masked(json.dumps(each))) for each in events(script)]
    assert json.loads(masked(stream(script).text)) == items


@pytest.mark.parametrize("script", [AWKWARD, CALLING])
@pytest.mark.parametrize("config", [{}, THINKS])
def test_chunks_add_up_to_the_whole_reply(script: Script, config: dict[str, Any]) -> None:
    whole = send(FakeResponder(script), generationConfig=config).json()
    chunks = events(script, config)
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    texts = {True: "", False: ""}
    for part in parts:
        texts["thought" in part] += part.get("text", "")
    [candidate] = whole["candidates"]
    written = candidate["content"]["parts"]
    found = {"thought" in part: part["text"] for part in written if "text" in part}
    assert {True: "", **found} == texts
    calls = [part for part in written if "functionCall" in part]
    assert [part for part in parts if "functionCall" in part] == calls
    last = chunks[-1]
    assert last["candidates"][0]["finishReason"] == candidate["finishReason"]
    for key in ("usageMetadata", "rekindle", "modelVersion"):
        assert last[key] == whole[key]


@pytest.mark.parametrize("script", [AWKWARD, SLOW, CALLING, SCORED])
def test_replies_fit_the_types_that_describe_them(script: Script) -> None:
    config = THINKS | {"responseLogprobs": True}
    whole = send(FakeResponder(script), generationConfig=config).json()
    for body in (whole, *events(script, config)):
        BODY.validate_python(body, extra="forbid")


@pytest.mark.parametrize("query", ["", "?alt=sse"])
def test_a_quiet_stream_gets_empty_lines(query: str) -> None:
    async def run() -> str:
        settings = api_settings(ping_seconds=0.01)
        script = (Wait(0.05), ReplyText("a"), Wait(0.05), done())
        async with client_of(FakeResponder(script), settings) as client:
            path = f"{ROOT}:streamGenerateContent{query}"
            return (await client.post(path, json={"contents": CONTENTS})).text

    text = asyncio.run(run())
    assert "\n\n\n" in text
    assert ": keep-alive" not in text
    if query:
        lines = [line for line in text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines)
    else:
        assert len(json.loads(text)) == 2


def masked(text: str) -> str:
    return re.sub(r'"responseId":( ?)"[0-9a-f]{32}"', r'"responseId":\1"ID"', text)
