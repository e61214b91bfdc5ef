"""Tools that are offered, calls that come back, and what is thought on the way."""

from typing import Any

import pytest

from rekindle.chat.conversation import Conversation
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
    ToolChoice,
    ToolMode,
    TopToken,
)
from tests.api.client import chat
from tests.api.fakes import FakeResponder, Script, calling, done
from tests.api.openai.test_streams import chunks

CALLED = FinishReason.TOOL_CALLS
JSON_REPLY = {"response_format": {"type": "json_object"}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


TOOLS = [tool("f"), tool("g"), tool("h")]
FLAT_F = {"type": "function", "name": "f"}


def asked(**fields: Any) -> tuple[Conversation, ToolChoice]:
    responder = FakeResponder()
    reply = chat(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.conversations[0], responder.started[0].options.tool_choice


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": None, "parallel_tool_calls": None}, ToolChoice()),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolChoice()),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"tool_choice": "none"}, ToolChoice(ToolMode.NONE)),
        ({"tool_choice": "none", **JSON_REPLY}, ToolChoice(ToolMode.NONE)),
        ({"tool_choice": "auto", "ignore_eos": True}, ToolChoice()),
        ({"tool_choice": "required"}, ToolChoice(ToolMode.REQUIRED)),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ToolChoice(ToolMode.REQUIRED, parallel=False),
        ),
        ({"tool_choice": tool("g")}, ToolChoice(ToolMode.REQUIRED, ("g",), parallel=False)),
        ({"tool_choice": FLAT_F}, ToolChoice(ToolMode.REQUIRED, ("f",), parallel=False)),
        (
            {"tool_choice": FLAT_F, "parallel_tool_calls": True},
            ToolChoice(ToolMode.REQUIRED, ("f",)),
        ),
        (
            {"tool_choice": allowed("auto", tool("h"), FLAT_F, FLAT_F)},
            ToolChoice(ToolMode.AUTO, ("h", "f")),
        ),
        (
            {"tool_choice": allowed("required", tool("f")), "parallel_tool_calls": False},
            ToolChoice(ToolMode.REQUIRED, ("f",), parallel=False),
        ),
    ],
)
def test_tool_choice_reaches_the_reply_and_never_the_prompt(
    fields: dict[str, Any], choice: ToolChoice
) -> None:
    conversation, arrived = asked(tools=TOOLS, **fields)
    assert arrived == choice
    assert conversation == asked(tools=TOOLS)[0]
    assert [each.name for each in conversation.tools] == ["f", "g", "h"]


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_choice_that_requires_no_call_needs_no_tools(choice: str | None) -> None:
    conversation, _ = asked(tool_choice=choice, parallel_tool_calls=True)
    assert conversation.tools == ()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "`tools` has nothing"),
        ({"tools": None, "tool_choice": tool("f")}, "tool_choice.function.name", "`f`"),
        ({"tool_choice": tool("x")}, "tool_choice.function.name", "no tool `x`"),
        ({"tool_choice": {**FLAT_F, "name": "x"}}, "tool_choice.name", "no tool `x`"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
        (
            {"tool_choice": allowed("auto", tool("f"), tool("x"))},
            "tool_choice.allowed_tools.tools.1.function.name",
            "no tool `x`",
        ),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "at least 1"),
        (
            {"tool_choice": allowed("none", tool("f"))},
            "tool_choice.allowed_tools.mode",
            "'required'",
        ),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
            "is required",
        ),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "'function'"),
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"tool_choice": "required", **JSON_REPLY}, "tool_choice", "exclude each other"),
        ({"tool_choice": tool("f"), **JSON_REPLY}, "tool_choice", "exclude each other"),
        (
            {"tool_choice": allowed("required", FLAT_F), **JSON_REPLY},
            "tool_choice",
            "exclude each other",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "`tool_choice`"),
        ({"tools": [*TOOLS, tool("g")]}, "tools.3.function.name", "two tools `g`"),
        ({"tools": [tool("")]}, "tools.0.function.name", "a valid string"),
        ({"tools": [tool("f", parameters=[])]}, "tools.0.function.parameters", "JSON schema"),
        ({"function_call": "auto"}, "function_call", "Use `tool_choice`"),
    ],
)
def test_choice_that_cannot_be_made_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    responder = FakeResponder()
    reply = chat(responder, **{"tools": TOOLS, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert says in reply.json()["error"]["message"]
    assert not responder.started


def test_shuffled_keys_are_the_same_tools_but_another_order_of_tools_is_not() -> None:
    parameters = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
    sent = [tool("f", parameters=parameters), tool("g", description="d")]
    shuffled: list[dict[str, Any]] = [
        {
            "function": {
                "parameters": {
                    "required": ["z"],
                    "properties": {"a": {}, "z": {}},
                    "type": "object",
                },
                "name": "f",
            },
            "type": "function",
        },
        {"function": {"description": "d", "name": "g"}},
    ]
    (first, second), (again, and_again) = asked(tools=sent)[0].tools, asked(tools=shuffled)[0].tools
    assert (first, second) == (again, and_again)
    assert asked(tools=sent[::-1])[0].tools == (second, first)


def token(text: str) -> ScoredToken:
    return ScoredToken(TopToken(1, text, text.encode(), -0.5), (), 0)


ARGUMENTS = '{"path": "caf\u00e9 \U0001f600\u2028",  "n":1}'
THOUGHTFUL: Script = (
    ReplyReasoning("Let me", (token("Let"), token(" me"))),
    ReplyReasoning(" see.", (token(" see."),)),
    ReplyText("Reading.", (token("Reading."),)),
    *calling(0, "call_1", "read", ARGUMENTS, scored=(token("<call>"), token("..."))),
    *calling(1, "call_2", "now", "{}"),
    done(9, finish=CALLED, remembered=((0, 1), (1, 2), (3, 9))),
)
SILENT: Script = (*calling(0, "call_1", "now", "{}"), done(3, finish=CALLED))
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}},
    {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]


def test_whole_reply_has_reasoning_text_and_calls_apart() -> None:
    reply = chat(FakeResponder(THOUGHTFUL)).json()
    (choice,) = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Reading.",
        "refusal": None,
        "reasoning_content": "Let me see.",
        "tool_calls": CALLS,
    }
    assert choice["finish_reason"] == "tool_calls"
    assert reply["rekindle"]["remembered_turns"] == 3


def test_content_is_null_beside_calls_alone_and_empty_beside_reasoning_alone() -> None:
    (choice,) = chat(FakeResponder(SILENT)).json()["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]
    pondered = (ReplyReasoning("Hm"), done(finish=FinishReason.LENGTH))
    (choice,) = chat(FakeResponder(pondered)).json()["choices"]
    assert choice["message"]["content"] == ""
    assert "tool_calls" not in choice["message"]


def test_call_that_was_cut_off_is_text_with_the_reason() -> None:
    script = (ReplyText('<tool_call>{"name": "re'), done(finish=FinishReason.LENGTH))
    (choice,) = chat(FakeResponder(script), tools=TOOLS).json()["choices"]
    assert choice["message"]["content"] == '<tool_call>{"name": "re'
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_reasoning_and_calls_in_order(stream: bool) -> None:  # noqa: FBT001
    reply = chat(FakeResponder(THOUGHTFUL), logprobs=True, stream=stream)
    choices = [part["choices"][0] for part in chunks(reply.text)] if stream else None
    scored = [
        entry["token"]
        for choice in choices or reply.json()["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert scored == ["Let", " me", " see.", "Reading.", "<call>", "..."]


@pytest.mark.parametrize("n_characters", [0, 1, 1023, 1024, 1025, 5000])
def test_arguments_are_streamed_in_chunks_of_whole_characters(n_characters: int) -> None:
    arguments = "\U0001f600" * n_characters
    script = (*calling(0, "call_1", "write", arguments), done(finish=CALLED))
    deltas = [
        part["choices"][0]["delta"]["tool_calls"][0]
        for part in chunks(chat(FakeResponder(script), stream=True).text)
        if "tool_calls" in part["choices"][0]["delta"]
    ]
    first, *rest = deltas
    assert first == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "write", "arguments": ""},
    }
    pieces = [delta.pop("function")["arguments"] for delta in rest]
    assert rest == [{"index": 0}] * len(rest)
    assert "".join(pieces) == arguments
    assert all(0 < len(piece) <= 1024 for piece in pieces)
