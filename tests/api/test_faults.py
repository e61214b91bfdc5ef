"""What is refused, with the path of the field at fault."""

from typing import Any

import pytest

from rekindle.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptDeleted,
    PromptTooLong,
    RekindleError,
    ShuttingDown,
)
from tests.api.client import USER, chat, client_of, complete
from tests.api.fakes import FakeResponder

HOLOGRAM = {"type": "hologram", "hologram": "data:,"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": None}, "messages", "a valid list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "is required"),
        ({"messages": [{"role": "bot"}]}, "messages.0.role", "'system'"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "a valid string or a valid list",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages.1.content.0.text",
            "a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, HOLOGRAM]}]},
            "messages.0.content.1.type",
            "hologram",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "is required",
        ),
        ({"messages": [{"role": "function"}]}, "messages.0.role", "Use `tool`"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages.0.function_call",
            "Use `tool_calls`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages.0.tool_calls.0.type",
            "custom",
        ),
        ({"temperature": "0.5"}, "temperature", "a valid number"),
        ({"temperature": True}, "temperature", "a valid number"),
        ({"repeat_penalty": 0}, "repeat_penalty", "greater than 0"),
        ({"dry_allowed_length": -1}, "dry_allowed_length", "greater than or equal to 0"),
        ({"adaptive_decay": 1}, "adaptive_decay", "less than or equal to 0.99"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "at least 1 item"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers", "a valid list"),
        ({"n_probs": 1001}, "n_probs", "less than or equal to 100"),
        ({"max_tokens": -2}, "max_tokens", "0 to evaluate the prompt alone"),
        ({"n_predict": -5}, "n_predict", "positive"),
        ({"max_tokens": 1.5}, "max_tokens", "a valid integer"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"top_logprobs": 3}, "top_logprobs", "`logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "equal to 20"),
        ({"logit_bias": {"cat" * 30000: 1}}, "logit_bias", "characters of text"),
        ({"logit_bias": {"258": 1}}, "logit_bias.258", "not a token"),
        ({"logit_bias": {"1": True}}, "logit_bias.1", "a valid number"),
        ({"logit_bias": [[1, 2], [-1, 2]]}, "logit_bias.1", "not a token"),
        ({"logit_bias": [[1]]}, "logit_bias.0.1", "is required"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"reasoning_budget": -2}, "reasoning_budget", "greater than or equal to -1"),
        ({"reasoning_budget": "9"}, "reasoning_budget", "a valid integer"),
        ({"thinking_budget_tokens": 1.5}, "thinking_budget_tokens", "a valid integer"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens", "equal to -1"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "custom"),
        ({"tools": [{"function": {}}]}, "tools.0.function.name", "a valid string"),
        ({"functions": [{"name": "f"}]}, "functions", "Use `tools`"),
        ({"modalities": ["text", "audio"]}, "modalities", "only `text`"),
        ({"audio": {"voice": "a"}}, "audio", "not supported"),
        ({"prediction": {"content": "a"}}, "prediction", "not supported"),
        ({"web_search_options": {"x": 1}}, "web_search_options", "not supported"),
        ({"grammar": {"root": "a"}}, "grammar", "a valid string"),
        ({"grammar_lazy": True}, "grammar_lazy", "from the first token"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "assistant"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "contradict",
        ),
    ],
)
def test_bad_field_in_a_chat_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    responder = FakeResponder()
    reply = chat(responder, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert says in error["message"]
    assert not responder.started


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": None}, "prompt", "a valid string or a valid list"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [1, 999]}, "prompt.1", "999"),
        ({"prompt": [[1], [2, 999]]}, "prompt.1.1", "999"),
        ({"prompt": ["a", 1]}, "prompt.1", "a valid string"),
        ({"suffix": "end"}, "suffix", "Infill is not supported by this model"),
        ({"suffix": "end", "echo": True}, "echo", "together with `suffix`"),
        ({"best_of": 2}, "best_of", "Use `n`"),
        ({"echo": True, "logprobs": 0}, "echo", "`logprobs`"),
        ({"logprobs": True}, "logprobs", "a valid integer"),
    ],
)
def test_bad_field_in_a_completion_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    reply = complete(**fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_tool_result_for_a_call_that_nobody_made_is_refused() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    assert chat(messages=answered).status_code == 200
    stray = {"role": "tool", "tool_call_id": "call_2", "content": "2"}
    error = chat(messages=[*answered, stray]).json()["error"]
    assert error["param"] == "messages.3.tool_call_id"
    assert "`call_2`" in error["message"]
    early = [answered[0], answered[2], answered[1]]
    assert chat(messages=early).json()["error"]["param"] == "messages.1.tool_call_id"
    punctuation = {"role": "tool", "tool_call_id": "_-", "content": "2"}
    error = chat(messages=[*answered, punctuation]).json()["error"]
    assert error["param"] == "messages.3.tool_call_id"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"messages": "\\ud800"}',
        b"\xff\xfe",
        b'{"tools":' + b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
async def test_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    async with client_of(FakeResponder()) as client:
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = await client.post(path, content=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.anyio
async def test_number_beyond_floats_is_a_400() -> None:
    async with client_of(FakeResponder()) as client:
        body = b'{"messages":[{"role":"user"}],"temperature":1e999}'
        reply = await client.post("/v1/chat/completions", content=body)
    assert reply.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (
            InvalidRequest("The template says no.", "messages"),
            400,
            {"type": "invalid_request_error", "param": "messages", "code": None},
        ),
        (
            PromptTooLong(n_prompt=600, n_ctx=512),
            400,
            {
                "code": "context_length_exceeded",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 600,
                "n_ctx": 512,
            },
        ),
        (
            Overloaded("The queue is full.", retry_after_seconds=7),
            429,
            {"type": "rate_limit_error", "code": "queue_full"},
        ),
        (PromptDeleted("Deleted."), 409, {"code": "prompt_deleted"}),
        (ShuttingDown("Going down."), 503, {"type": "server_error", "code": "shutting_down"}),
        (EngineError("Broken."), 500, {"type": "server_error", "code": "engine_error"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_has_its_status_even_for_a_stream(
    error: RekindleError,
    status: int,
    detail: dict[str, object],
    stream: bool,  # noqa: FBT001
) -> None:
    reply = chat(FakeResponder((error,)), stream=stream)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == error.message
    assert detail.items() <= reply.json()["error"].items()
    assert reply.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)


def test_refusal_of_one_reply_closes_those_already_started() -> None:
    full = Overloaded("The queue is full.", retry_after_seconds=1)
    responder = FakeResponder(lambda i: (full,) if i == 2 else ())
    assert chat(responder, n=4).status_code == 429
    assert [started.stream.closed.is_set() for started in responder.started] == [True, True]


@pytest.mark.parametrize("kind", ["string", "array", "x"])
def test_arguments_of_a_tool_are_an_object(kind: str) -> None:
    function = {"name": "f", "parameters": {"type": kind}}
    reply = chat(FakeResponder(), tools=[{"type": "function", "function": function}])
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        "tools.0.function.parameters.type",
    )
