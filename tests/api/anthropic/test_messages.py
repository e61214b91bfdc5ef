"""Messages of Anthropic's API as `chat` sees them."""

from typing import Any

import httpx
import pytest

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.prompt.canonical_tools import canonical_definition
from rekindle.config.choices import Overflow
from tests.api.client import USER, chat, post
from tests.api.fakes import FakeResponder

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"b": "\u00e9", "a": [1]}}
CALL = ToolCall("toolu_1", "f", '{"b": "\u00e9", "a": [1]}')
CALLED = {"role": "assistant", "content": [USE]}


def send(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/v1/messages", {"messages": [USER], "max_tokens": 9, **fields}, responder)


def conversation_of(**fields: Any) -> Conversation:
    responder = FakeResponder()
    reply = send(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.conversations[0]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(content: Any = None, call_id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    answer = {"type": "tool_result", "tool_use_id": call_id, **more}
    return answer if content is None else {**answer, "content": content}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*parts: Part) -> Message:
    return Message(Role.ASSISTANT, parts)


def tool_of(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object", "properties": {}}, **more}


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"role": "user", "content": "u"}, Message(Role.USER, (Text("u"),))),
        ({"role": "user", "content": ""}, Message(Role.USER, ())),
        ({"role": "user", "content": []}, Message(Role.USER, ())),
        (user(text("a", **CACHED), text("b")), Message(Role.USER, (Text("a"), Text("b")))),
        ({"role": "system", "content": "s"}, Message(Role.SYSTEM, (Text("s"),))),
        ({"role": "system", "content": [text("s")]}, Message(Role.SYSTEM, (Text("s"),))),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "xyz"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    text("a "),
                    text("b"),
                    USE,
                ],
            },
            said(Reasoning("hm"), Text("a b"), CALL),
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "g"}]},
            said(ToolCall("1", "g", "{}")),
        ),
    ],
)
def test_message_keeps_what_it_says(wire: dict[str, Any], message: Message) -> None:
    assert conversation_of(messages=[USER, wire, USER]).messages[1] == message


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        ("s", (Message(Role.SYSTEM, (Text("s"),)),)),
        ([text("a", **CACHED), text("b")], (Message(Role.SYSTEM, (Text("a"), Text("b"))),)),
        ("", ()),
        ([], ()),
        (None, ()),
    ],
)
def test_system_comes_first(system: Any, messages: tuple[Message, ...]) -> None:
    conversation = conversation_of(system=system)
    assert conversation.messages == (*messages, Message(Role.USER, (Text("hi"),)))


@pytest.mark.parametrize(
    ("content", "more", "shown"),
    [
        ("done", {}, "done"),
        ([text("a"), text(""), text("b")], {}, "a\nb"),
        (None, {}, ""),
        ([], {"is_error": True}, "The tool failed."),
        ("no such file", {"is_error": True}, "no such file"),
    ],
)
def test_result_is_a_message_of_its_tool(content: Any, more: Any, shown: str) -> None:
    messages = [USER, CALLED, user(result(content, **more))]
    answer = conversation_of(messages=messages).messages[2]
    assert answer == Message(Role.TOOL, (ToolResult("toolu_1", None, shown),))


def test_results_come_before_the_text_beside_them() -> None:
    both = {"role": "assistant", "content": [USE, {**USE, "id": "toolu_2"}]}
    blocks = user(text("and now?"), result("1"), result("2", "toolu_2"), text("go"))
    assert conversation_of(messages=[USER, both, blocks]).messages[2:] == (
        Message(Role.TOOL, (ToolResult("toolu_1", None, "1"),)),
        Message(Role.TOOL, (ToolResult("toolu_2", None, "2"),)),
        Message(Role.USER, (Text("and now?"), Text("go"))),
    )


def test_id_of_a_result_is_compared_by_letters_and_digits() -> None:
    answer = conversation_of(messages=[USER, CALLED, user(result("1", "TOOLU1"))]).messages[2]
    assert answer.parts == (ToolResult("toolu_1", None, "1"),)


def test_same_conversation_is_the_same_over_either_api() -> None:
    schema = {"required": ["a"], "properties": {"a": {"type": "array"}}, "type": "object"}
    function = {"name": "f", "description": "d", "parameters": schema}
    responder = FakeResponder()
    call = {"id": "toolu_1", "function": {"name": "f", "arguments": CALL.arguments_json}}
    chat(
        responder,
        messages=[
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "r"},
        ],
        tools=[{"type": "function", "function": function}],
        enable_thinking=True,
    )
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    over_anthropic = conversation_of(
        system="s",
        messages=[
            USER,
            {"role": "assistant", "content": [thought, text("a"), USE]},
            user(result("r")),
        ],
        tools=[{"input_schema": schema, "description": "d", "name": "f", "type": "custom"}],
        thinking={"type": "adaptive"},
    )
    assert over_anthropic == responder.conversations[0]


def test_neighbours_of_one_role_stay_apart() -> None:
    roles = [message.role for message in conversation_of(messages=[USER, USER]).messages]
    assert roles == [Role.USER, Role.USER]


@pytest.mark.parametrize(
    ("last", "is_open"),
    [
        ({"role": "assistant", "content": "The answer is ("}, True),
        ({"role": "assistant", "content": [text("a")]}, True),
        ({"role": "assistant", "content": ""}, False),
        (CALLED, False),
        (USER, False),
    ],
)
def test_the_reply_continues_a_final_assistant_message(last: Any, is_open: bool) -> None:  # noqa: FBT001
    assert conversation_of(messages=[USER, last]).continue_last == is_open


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "x"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_and_effort_go_to_the_template(fields: Any, kwargs: dict[str, Any]) -> None:
    assert conversation_of(**fields).template_kwargs == kwargs


def test_deferred_tool_is_defined_where_it_is_loaded() -> None:
    definitions = {
        name: canonical_definition({"name": name, "parameters": tool_of(name)["input_schema"]})
        for name in ("f", "late", "later")
    }
    references = [{"type": "tool_reference", "tool_name": name} for name in ("later", "late")]
    tools = [
        tool_of("late", defer_loading=True),
        tool_of("f"),
        tool_of("later", defer_loading=True),
        tool_of("latest", defer_loading=True),
    ]
    conversation = conversation_of(
        messages=[USER, CALLED, user(result([text("found:"), *references]))], tools=tools
    )
    assert conversation.tools == (Tool("f", definitions["f"]),)
    assert [tool.name for tool in conversation.more_tools] == ["later", "late"]
    [answer] = conversation.messages[2].parts
    assert isinstance(answer, ToolResult)
    assert answer.text == (
        f"found:\n<tools>\n{definitions['later']}\n{definitions['late']}\n</tools>"
    )


def test_reference_to_a_tool_that_has_gone_keeps_the_conversation_alive() -> None:
    reference = {"type": "tool_reference", "tool_name": "gone"}
    conversation = conversation_of(messages=[USER, CALLED, user(result([reference]))])
    [answer] = conversation.messages[2].parts
    assert isinstance(answer, ToolResult)
    assert answer.text == '<tools>\n{"name": "gone"}\n</tools>'
    assert conversation.callable_tools == ()


def test_tokens_are_counted_and_nothing_runs() -> None:
    responder = FakeResponder()
    body = {"model": "any", "messages": [USER], "system": "s", "tools": [tool_of("f")]}
    reply = post("/v1/messages/count_tokens?beta=true", body, responder)
    assert reply.json() == {"input_tokens": len("[system]s[user]hi")}
    assert not responder.started
    assert responder.overflow is Overflow.ERROR  # counts what trimming would leave out
