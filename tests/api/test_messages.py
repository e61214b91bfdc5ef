"""Messages and tools as `chat` sees them."""

import json
from typing import Any

import pytest

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from tests.api.fakes import FakeResponder
from tests.api.http import USER, chat, post

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1,"a":2}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}


def conversation_of(**fields: Any) -> Conversation:
    responder = FakeResponder()
    reply = chat(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.conversations[0]


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"role": "system", "content": "s"}, Message(Role.SYSTEM, (Text("s"),))),
        ({"role": "developer", "content": "s"}, Message(Role.SYSTEM, (Text("s"),))),
        ({"role": "user"}, Message(Role.USER, ())),
        ({"role": "user", "content": None}, Message(Role.USER, ())),
        ({"role": "user", "content": ""}, Message(Role.USER, ())),
        ({"role": "user", "content": "u", "name": "ann"}, Message(Role.USER, (Text("u"),), "ann")),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "input_text", "text": "b"},
                ],
            },
            Message(Role.USER, (Text("a"), Text("b"))),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            Message(Role.ASSISTANT, (Text("no"),)),
        ),
        (
            {"role": "assistant", "content": None, "refusal": "no"},
            Message(Role.ASSISTANT, (Text("no"),)),
        ),
        (
            {"role": "assistant", "content": "a", "refusal": None, "reasoning_content": "hm"},
            Message(Role.ASSISTANT, (Reasoning("hm"), Text("a"))),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": ""},
            Message(Role.ASSISTANT, (Reasoning("hm"), Text("a"))),
        ),
        (ASKED, Message(Role.ASSISTANT, (ToolCall("c1", "f", '{"b": 1,"a":2}'),))),
        (
            {"role": "tool", "content": "r", "name": "f"},
            Message(Role.TOOL, (ToolResult("", "f", "r"),), "f"),
        ),
    ],
)
def test_message_keeps_what_it_says(wire: dict[str, Any], message: Message) -> None:
    assert conversation_of(messages=[USER, wire, wire]).messages[1:] == (message, message)


def test_tool_result_is_tied_to_its_call() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]}
    messages = conversation_of(messages=[USER, ASKED, result, USER]).messages
    assert messages[2] == Message(Role.TOOL, (ToolResult("c1", None, "r"),))


def test_tools_keep_the_order_of_their_keys() -> None:
    (tool,) = conversation_of(tools=[{"type": "function", "function": FUNCTION}]).tools
    assert tool.name == "f"
    assert tool.definition_json == json.dumps({"type": "function", "function": FUNCTION})


def test_tool_choice_none_hides_the_tools() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    assert conversation_of(tools=tools, tool_choice="none").tools == ()
    assert len(conversation_of(tools=tools, tool_choice="auto").tools) == 1


def test_template_kwargs_come_from_three_fields() -> None:
    conversation = conversation_of(
        enable_thinking=True,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False, "custom": [1]},
    )
    assert conversation.template_kwargs == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "custom": [1],
    }


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({}, False),
        ({"continue_final_message": True}, True),
        ({"add_generation_prompt": False}, True),
        ({"add_generation_prompt": True}, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
    ],
)
def test_assistant_message_at_the_end_goes_on_only_when_asked(
    fields: dict[str, bool],
    continues: bool,  # noqa: FBT001
) -> None:
    prefill = {"role": "assistant", "content": "Sure"}
    assert conversation_of(messages=[USER, prefill], **fields).continue_last is continues


def test_documents_reach_the_template() -> None:
    assert conversation_of(documents=[{"title": "t"}]).documents_json == ('{"title": "t"}',)


def test_apply_template_returns_the_prompt_of_the_same_chat() -> None:
    responder = FakeResponder()
    messages = [{"role": "developer", "content": "s"}, USER]
    reply = post("/apply-template", {"messages": messages, "temperature": 0}, responder)
    assert reply.json() == {"prompt": "[system]s[user]hi"}
    assert not responder.started
