"""The true size of the context: where clients look for it, and what they do at its end."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from rekindle.api.http.usage_window import scaled, usage_scale, usage_windows
from rekindle.errors import PromptTooLong, StartupError
from tests.api.client import USER, client_of, post
from tests.api.fakes import CARD, HELLO, FakeResponder, Script, api_settings

GEMINI = "/v1beta/models/tiny:generateContent"
GEMINI_STREAM = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    GEMINI: {"contents": [{"parts": [{"text": "hi"}]}]},
    "/api/chat": {"model": "tiny", "messages": [USER], "stream": False},
}
TOO_LONG: Script = (PromptTooLong(n_prompt=600, n_ctx=512),)

# What these clients look for in a message before they compact, from their sources.
OPENCODE_AND_PI = [
    r"prompt is too long",
    r"exceeds the context window",
    r"input token count.*exceeds the maximum",
    r"maximum context length is \d+ tokens",
    r"exceeds the available context size",
    r"prompt too long; exceeded (?:max )?context length",
]
CLINE = [r"context\s*(length|window)", r"maximum context", r"too many tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_that_is_too_long_is_named_as_clients_know_it(path: str) -> None:
    reply = post(path, BODIES[path], FakeResponder(TOO_LONG))
    assert reply.status_code == 400
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert any(re.search(pattern, message, re.IGNORECASE) for pattern in OPENCODE_AND_PI)


def test_the_message_of_openais_apis_is_known_to_cline_and_llama_servers_clients() -> None:
    error = post("/v1/chat/completions", {"messages": [USER]}, FakeResponder(TOO_LONG)).json()
    message = error["error"]["message"]
    assert all(re.search(pattern, message, re.IGNORECASE) for pattern in CLINE[:2])
    assert "exceeds the available context size" in message
    # Hermes reads the size from here.
    assert re.search(r"maximum context length is (\d+)", message)[1] == "512"  # type: ignore[index]


def test_codex_reads_in_its_stream_that_the_prompt_is_too_long() -> None:
    reply = post("/v1/responses", {"input": "hi", "stream": True}, FakeResponder(TOO_LONG))
    assert (reply.status_code, reply.headers["content-type"][:17]) == (200, "text/event-stream")
    frames = [json.loads(line[6:]) for line in reply.text.splitlines() if line[:6] == "data: "]
    kinds = [frame["type"] for frame in frames]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
    assert frames[-2]["error"]["code"] == "context_length_exceeded"  # opencode
    fault = frames[-1]["response"]["error"]
    assert fault["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in fault["message"]


def test_the_list_of_models_has_the_context_by_every_name() -> None:
    async def get() -> Any:
        async with client_of(FakeResponder()) as client:
            return (await client.get("/v1/models")).json()["data"][0]

    model = asyncio.run(get())
    assert (model["context_length"], model["max_model_len"]) == (512, 512)
    assert model["max_input_tokens"] == 511
    assert model["meta"]["n_ctx"] == 512


def counts(path: str, *, agent: str, window: tuple[str, ...] = ("claude-cli=2048",)) -> Any:
    async def run() -> httpx.Response:
        settings = api_settings(usage_window=window)
        async with client_of(FakeResponder(HELLO), settings) as client:
            return await client.post(path, json=BODIES[path], headers={"user-agent": agent})

    body = asyncio.run(run()).json()
    assert body["rekindle"]["prefilled"] == 6, "what the server did is not scaled"
    return body


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/chat/completions", {"prompt_tokens": 40, "total_tokens": 48}),
        ("/v1/completions", {"prompt_tokens": 40, "completion_tokens": 8}),
        ("/v1/responses", {"input_tokens": 40, "total_tokens": 48}),
        ("/v1/messages", {"input_tokens": 24, "cache_read_input_tokens": 16, "output_tokens": 8}),
        (GEMINI, {"promptTokenCount": 40, "cachedContentTokenCount": 16}),
        ("/api/chat", {"prompt_eval_count": 40, "eval_count": 8}),
    ],
)
def test_usage_is_scaled_for_the_clients_that_are_named(path: str, usage: dict[str, int]) -> None:
    def of(body: Any) -> Any:
        return body.get("usage") or body.get("usageMetadata") or body

    scaled_for = of(counts(path, agent="Claude-CLI/2.1 (external)"))
    assert usage.items() <= scaled_for.items()
    plain = of(counts(path, agent="curl/8"))
    for name, count in usage.items():
        assert plain[name] * 4 == count
    assert (
        of(counts(path, agent="curl/8", window=("2048",)))[next(iter(usage))]
        == usage[next(iter(usage))]
    )


@pytest.mark.parametrize("stream_path", ["/v1/chat/completions", "/v1/messages", GEMINI_STREAM])
def test_usage_of_a_stream_is_scaled_as_well(stream_path: str) -> None:
    body = BODIES.get(stream_path, BODIES[GEMINI]) | {"stream": True}
    if stream_path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    if stream_path == GEMINI_STREAM:
        del body["stream"]

    async def run() -> str:
        async with client_of(FakeResponder(HELLO), api_settings(usage_window=("2048",))) as client:
            return (await client.post(stream_path, json=body)).text

    text = asyncio.run(run())
    total = re.search(r'"(?:prompt_tokens|promptTokenCount)":(\d+)', text)
    n_prompt = int(total[1]) if total else None
    if n_prompt is None:  # Messages divides it; the last count is the whole one
        parts = re.findall(r'"(?:input_tokens|cache_read_input_tokens)":(\d+)', text)[-2:]
        n_prompt = sum(map(int, parts))
    assert n_prompt == 40


def test_counting_tokens_agrees_with_usage() -> None:
    async def count(agent: str) -> int:
        settings = api_settings(usage_window=("claude-cli=2048",))
        async with client_of(FakeResponder(), settings) as client:
            reply = await client.post(
                "/v1/messages/count_tokens",
                json={"messages": [USER]},
                headers={"user-agent": agent},
            )
            n_tokens: int = reply.json()["input_tokens"]
            return n_tokens

    assert asyncio.run(count("claude-cli/2")) == 4 * asyncio.run(count("curl"))


def test_a_scaled_total_is_the_sum_of_its_parts() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert scaled(usage, 1.5) == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_the_first_window_that_names_a_client_counts() -> None:
    windows = usage_windows(("codex=262144", "claude=200000", "128000"))
    for agent, n_tokens in {"codex_exec/1": 262144, "Claude-CLI/2": 200000, "x": 128000}.items():
        scale = usage_scale(windows, {"user-agent": agent}, n_ctx=CARD.n_ctx)
        assert scaled(CARD.n_ctx, scale) == n_tokens
    assert usage_scale(usage_windows(("codex=9",)), {}, n_ctx=512) == 1


@pytest.mark.parametrize("wrong", ["", "many", "codex=", "codex=0", "codex=-1", "x=1.5", "=1e9"])
def test_a_window_that_is_no_number_is_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(StartupError, match="usage_window"):
        usage_windows((wrong,))
