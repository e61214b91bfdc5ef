"""Streams of the Responses API byte for byte, from the same events as those of chats."""

import json
import logging
import re
from typing import Any

import pytest

from rekindle.chat.reply.events import ReplyReasoning, ReplyText
from rekindle.errors import InvalidRequest
from tests.api.client import post
from tests.api.fakes import FakeResponder, Script, calling, done
from tests.api.openai.test_streams import AWKWARD, BROKEN, CALLING, GOLDEN, SCORED, SLOW

RESPONSES = "/v1/responses"
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}
PATCH = {"type": "custom", "name": "patch"}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
CUSTOM: Script = (
    *calling(0, "call_1", "patch", '{"input": "*** caf\u00e9"}'),
    *calling(1, "call_2", "agents__spawn", "{}"),
    ReplyText("."),
    done(),
)
EMPTY: Script = (ReplyReasoning("Hm."), done())


def stream(script: Script, **fields: Any) -> str:
    reply = post(RESPONSES, {"input": "hi", "stream": True, **fields}, FakeResponder(script))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return reply.text


@pytest.mark.parametrize(
    ("name", "script", "fields"),
    [
        ("text", AWKWARD, {}),
        ("progress", SLOW, {}),
        ("calls", CALLING, ENCRYPTED),
        ("logprobs", SCORED, {"top_logprobs": 2}),
        ("custom", CUSTOM, {"tools": [PATCH, AGENTS, {"type": "web_search"}]}),
        ("empty", EMPTY, {}),
        ("broken", BROKEN, {}),
    ],
)
def test_stream_matches_its_transcript(name: str, script: Script, fields: dict[str, Any]) -> None:
    golden = GOLDEN / f"responses_{name}.sse"
    assert masked(stream(script, **fields)) == golden.read_text()


@pytest.mark.parametrize("script", [AWKWARD, CALLING, CUSTOM, EMPTY, SCORED])
def test_events_add_up_to_the_whole_response(script: Script) -> None:
    fields: dict[str, Any] = {"tools": [PATCH, AGENTS], "top_logprobs": 1, **ENCRYPTED}
    whole = post(RESPONSES, {"input": "hi", **fields}, FakeResponder(script)).json()
    frames = events(stream(script, **fields))
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert plain(frames[-1]["response"]) == plain(whole)
    items = [frame["item"] for frame in frames if frame["type"] == "response.output_item.done"]
    assert items == frames[-1]["response"]["output"]
    for index, item in enumerate(items):
        deltas = [
            frame["delta"]
            for frame in frames
            if frame["type"].endswith(".delta") and frame["output_index"] == index
        ]
        text = item.get("arguments", item.get("input"))
        assert "".join(deltas) == (item["content"][0]["text"] if text is None else text)


def test_bug_in_a_stream_is_logged_and_not_shown_to_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        text = stream((ReplyText("a"), ValueError("secret")))
    error, failed = events(text)[-2:]
    assert (error["type"], error["code"]) == ("error", "internal_error")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert "secret" not in text
    assert "ValueError: secret" in caplog.text


def test_a_fault_of_the_client_that_shows_in_the_stream_is_not_the_servers() -> None:
    fault = InvalidRequest("The grammar is too complex: too many states.", "response_format")
    failed = events(stream((ReplyText("a"), fault)))[-1]
    assert failed["response"]["error"]["code"] == "invalid_prompt"


def events(text: str) -> list[Any]:
    frames = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        frames.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {frames[-1]['type']}"
    return frames


def plain(response: dict[str, Any]) -> Any:
    return json.loads(masked(json.dumps(response, separators=(",", ":"))))


def masked(text: str) -> str:
    text = re.sub(r"(resp|msg|rs|fc|ctc)_[0-9a-f]{32}", r"\1_ID", text)
    return re.sub(r'"(created|completed)_at":\d+', r'"\1_at":0', text)
