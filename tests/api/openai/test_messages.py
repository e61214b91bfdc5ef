"""Messages and tools as `chat` sees them."""

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
from tests.api.client import USER, chat, post
from tests.api.fakes import FakeResponder

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1,"a":2}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


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
        (
            {"role": "assistant", "content": "a", "reasoning_details": [{"text": "hm"}]},
            Message(Role.ASSISTANT, (Text("a"),)),
        ),
        (
            {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [CALL]},
            Message(Role.ASSISTANT, (Reasoning("hm"), ToolCall("c1", "f", '{"b": 1,"a":2}'))),
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": {"b": "\u00e9", "a": [1]}}},
                    {"id": "2", "function": {"name": "g", "arguments": {}}},
                    {"id": "3", "function": {"name": "h", "arguments": None}},
                    {"function": {"name": "i"}},
                ],
            },
            Message(
                Role.ASSISTANT,
                (
                    ToolCall("1", "f", '{"b": "\u00e9", "a": [1]}'),
                    ToolCall("2", "g", "{}"),
                    ToolCall("3", "h", ""),
                    ToolCall("", "i", ""),
                ),
            ),
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


@pytest.mark.parametrize(
    ("called", "answered", "found"),
    [
        (["call_x"], "callx", "call_x"),
        (["callX"], "call_x", "callX"),
        (["call_1", "call1", "Call-1"], "call1", "call1"),
        (["call_1", "call_2"], "CALL.2", "call_2"),
        ([""], "call_9", ""),
        ([""], None, ""),
        (["call_1", "call_2"], None, ""),
        (["call_1", "call_2"], "", ""),
    ],
)
def test_result_finds_its_call_by_what_the_client_left_of_the_id(
    called: list[str], answered: str | None, found: str
) -> None:
    calls = [{**CALL, "id": each} if each else {"function": CALL["function"]} for each in called]
    asked = {"role": "assistant", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": answered, "content": "r"}
    messages = conversation_of(messages=[USER, asked, result]).messages
    assert messages[2].parts == (ToolResult(found, None, "r"),)


def test_id_for_one_of_several_calls_without_ids_is_refused() -> None:
    calls = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "r"}
    reply = chat(messages=[USER, {"role": "assistant", "tool_calls": calls}, result])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages.2.tool_call_id"


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
    text = "[system]s[user]hi"
    assert reply.json() == {"prompt": text, "tokens": list(text.encode())}
    assert not responder.started
