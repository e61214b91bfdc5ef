"""The other fields of a Messages request, and what is refused."""

import json
from typing import Any

import pytest

from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RekindleError,
    ShuttingDown,
)
from rekindle.generation.request import Grammar, GrammarKind
from tests.api.anthropic.test_messages import CALLED, result, send, tool_of, user
from tests.api.client import USER, client_of
from tests.api.fakes import FakeResponder, api_settings

MESSAGES = "/v1/messages"
BODY = {"messages": [USER], "max_tokens": 9}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
TOOLS = [tool_of("f"), SEARCH, tool_of("g", type="custom"), tool_of("h", defer_loading=True)]


def options_of(**fields: Any) -> ReplyOptions:
    responder = FakeResponder()
    reply = send(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.started[0].options


def test_settings_reach_the_reply_and_the_rest_are_the_servers() -> None:
    options = options_of(
        max_tokens=7, temperature=0.25, top_p=0.5, top_k=3, stop_sequences=["a", "b"]
    )
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 3)
    assert (options.max_tokens, options.stop, options.cache_prompt) == (7, ("a", "b"), True)
    assert options_of().sampling == FakeResponder().default_sampling


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORMAT, "effort": "low"}}, {"output_format": FORMAT}]
)
def test_schema_becomes_a_grammar(fields: dict[str, Any]) -> None:
    grammar = options_of(**fields).sampling.grammar
    source, field = json.dumps(SCHEMA), "output_config.format"
    assert grammar == Grammar(GrammarKind.JSON_SCHEMA, source, field=field)


@pytest.mark.parametrize(
    ("wanted", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "tool", "name": "g"}, ToolChoice(ToolMode.REQUIRED, ("g",), parallel=False)),
        (
            {"type": "tool", "name": "g", "disable_parallel_tool_use": False},
            ToolChoice(ToolMode.REQUIRED, ("g",)),
        ),
    ],
)
def test_tool_choice(wanted: Any, choice: ToolChoice) -> None:
    assert options_of(tools=TOOLS, tool_choice=wanted).tool_choice == choice


def test_loaded_tool_can_be_chosen() -> None:
    reference = {"type": "tool_reference", "tool_name": "h"}
    messages = [USER, CALLED, user(result([reference]))]
    wanted = {"type": "tool", "name": "h"}
    choice = options_of(tools=TOOLS, messages=messages, tool_choice=wanted).tool_choice
    assert choice.names == ("h",)


@pytest.mark.anyio
async def test_anthropics_own_tools_and_unknown_fields_are_left_out_and_counted() -> None:
    responder = FakeResponder()
    async with client_of(responder) as client:
        fields = {"tools": TOOLS, "mystery": 1, "metadata": {"user_id": "u"}, "mcp_servers": []}
        betas = {"anthropic-beta": "context-1m-2025-08-07, interleaved-thinking-2025-05-14"}
        reply = await client.post(f"{MESSAGES}?beta=true", json={**BODY, **fields}, headers=betas)
        assert reply.status_code == 200
        metrics = (await client.get("/metrics")).text
    assert [tool.name for tool in responder.conversations[0].tools] == ["f", "g"]
    for name in ("mystery", "tools.web_search_20250305", "anthropic-beta.context-1m-2025-08-07"):
        assert f'rekindle_ignored_fields_total{{field="{name}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "`max_tokens` should be a valid integer"),
        ({"max_tokens": -1}, "`max_tokens`"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages.0.role`"),
        ({"messages": [{"role": "user"}]}, "`messages.0.content` is required"),
        ({"messages": [user({"type": "text"})]}, "`messages.0.content.0.text` is required"),
        (
            {"messages": [user({"type": "hologram", "source": {"type": "url", "url": "x"}})]},
            "`messages.0.content.0.type`: content of type `hologram` is not supported",
        ),
        (
            {"messages": [USER, CALLED, user(result([{"type": "hologram"}]))]},
            "`messages.2.content.0.content.0.type`: content of type `hologram`",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [result("x")]}]},
            "content of type `tool_result`",
        ),
        ({"messages": [user({"type": "tool_use"})]}, "content of type `tool_use`"),
        ({"messages": [USER, CALLED, user(result("x", "toolu_2"))]}, "the id `toolu_2`"),
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id` is required"),
        ({"system": [{"type": "image"}]}, "`system.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "`thinking.budget_tokens`"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "`thinking.budget_tokens`"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "`cache_control.ttl`"),
        ({"cache_control": {"type": "forever"}}, "`cache_control.type`"),
        ({"tools": [{"name": "f"}]}, "`tools.0.input_schema` is required"),
        ({"tools": [{"input_schema": {}}]}, "`tools.0.name` is required"),
        ({"tools": [tool_of("f"), tool_of("f")]}, "two tools `f`"),
        ({"tool_choice": {"type": "any"}}, "nothing to call"),
        ({"tool_choice": {"type": "any"}, "tools": [SEARCH]}, "nothing to call"),
        ({"tool_choice": {"type": "tool"}}, "`tool_choice.name` is required"),
        ({"tool_choice": {"type": "tool", "name": "h"}, "tools": TOOLS}, "no tool `h`"),
        (
            {"tool_choice": {"type": "any"}, "tools": TOOLS, "output_format": FORMAT},
            "exclude each other",
        ),
        ({"stop_sequences": [""]}, "`stop_sequences.0`"),
        ({"temperature": "1"}, "`temperature`"),
    ],
)
def test_bad_field_is_named_in_anthropics_shape(fields: dict[str, Any], says: str) -> None:
    responder = FakeResponder()
    reply = send(responder, **fields)
    assert reply.status_code == 400
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert says in body["error"]["message"]
    assert not responder.started


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (InvalidRequest("No.", "messages"), 400, "invalid_request_error", "No."),
        (
            PromptTooLong(n_prompt=600, n_ctx=512),
            400,
            "invalid_request_error",
            "prompt is too long: 600 tokens > 511 maximum",
        ),
        (Overloaded("Full.", retry_after_seconds=7), 529, "overloaded_error", "Full."),
        (ShuttingDown("Going down."), 503, "api_error", "Going down."),
        (EngineError("Broken."), 500, "api_error", "Broken."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_has_its_status_even_for_a_stream(
    error: RekindleError,
    status: int,
    kind: str,
    message: str,
    stream: bool,  # noqa: FBT001
) -> None:
    reply = send(FakeResponder((error,)), stream=stream)
    assert reply.status_code == status
    assert reply.json()["error"] == {"type": kind, "message": message}
    assert reply.json()["request_id"] == reply.headers["request-id"]
    assert reply.headers.get("retry-after") == {529: "7", 503: "1"}.get(status)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", MESSAGES, b"{", 400, "invalid_request_error"),
        ("POST", f"{MESSAGES}/count_tokens", b"[]", 400, "invalid_request_error"),
        ("GET", MESSAGES, b"", 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", b"{}", 404, "not_found_error"),
        ("POST", MESSAGES, b" " * 2000, 413, "request_too_large"),
    ],
)
async def test_every_refusal_below_the_path_has_anthropics_shape(
    method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    async with client_of(FakeResponder(), api_settings(body_limit_bytes=1000)) as client:
        reply = await client.request(method, path, content=content)
    assert reply.status_code == status
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == kind


@pytest.mark.anyio
async def test_key_is_read_from_either_header_and_a_wrong_one_is_anthropics_error() -> None:
    async with client_of(FakeResponder(), api_settings(api_keys=("k",))) as client:
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            assert (await client.post(MESSAGES, json=BODY, headers=headers)).status_code == 200
        refusal = await client.post(MESSAGES, json=BODY, headers={"x-api-key": "wrong"})
    assert refusal.status_code == 401
    assert refusal.json()["error"]["type"] == "authentication_error"


@pytest.mark.anyio
async def test_bug_is_anthropics_error_that_tells_nothing() -> None:
    async with client_of(FakeResponder((ValueError("secret"),))) as client:
        reply = await client.post(MESSAGES, json=BODY)
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in reply.text
