"""`POST /v1/responses`: what a request becomes, and what its response says of it."""

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from rekindle.api.responses.bodies import ResponseBody
from rekindle.api.responses.items import encrypted
from rekindle.chat.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyOptions,
    ReplyReasoning,
    ReplyText,
    ToolChoice,
    ToolMode,
)
from tests.api.client import post
from tests.api.fakes import HELLO, FakeResponder, Script, done
from tests.api.openai.test_streams import CALLING

F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
G = {"type": "function", "name": "g"}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [G]}
HOSTED = [{"type": "web_search", "filters": {"a": [1]}}, {"type": "mcp", "server_label": 1}]
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{ "a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "4"}


def respond(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/v1/responses", {"input": "hi", **fields}, responder or FakeResponder())


def messages(*items: object, **fields: Any) -> tuple[Message, ...]:
    responder = FakeResponder()
    reply = respond(responder, input=list(items), **fields)
    assert reply.status_code == 200, reply.text
    return responder.conversations[0].messages


def options(**fields: Any) -> ReplyOptions:
    responder = FakeResponder()
    reply = respond(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.started[0].options


def refusal(**fields: Any) -> tuple[str, str]:
    reply = respond(**fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    return error["param"], error["message"]


def test_a_text_and_instructions() -> None:
    responder = FakeResponder()
    body = respond(responder, instructions="Be brief.").json()
    assert responder.conversations[0].messages == (
        Message(Role.SYSTEM, (Text("Be brief."),)),
        Message(Role.USER, (Text("hi"),)),
    )
    assert body["output"][0]["content"][0]["text"] == "Hello"
    assert body["instructions"] == "Be brief."
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_items_of_one_turn_are_one_message() -> None:
    found = messages(
        {"role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"role": "user", "content": "Go"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me "}],
        },
        CALL,
        {"role": "assistant", "content": "see."},
        {**CALL, "call_id": "call_2", "name": "g", "namespace": "agents"},
        OUTPUT,
        {**OUTPUT, "call_id": "CALL2", "output": [{"type": "input_text", "text": "5"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    )
    assert found == (
        Message(Role.SYSTEM, (Text("Rules"),)),
        Message(Role.USER, (Text("Go"),)),
        Message(
            Role.ASSISTANT,
            (
                Reasoning("Hm"),
                Text("Let me see."),
                ToolCall("call_1", "f", '{ "a":1}'),
                ToolCall("call_2", "agents__g", '{ "a":1}'),
            ),
        ),
        Message(Role.TOOL, (ToolResult("call_1", None, "4"),)),
        Message(Role.TOOL, (ToolResult("call_2", None, "5"),)),
        Message(Role.ASSISTANT, (Text("No."),)),
    )


def test_two_messages_in_a_row_are_lines() -> None:
    [message] = messages(
        {"role": "assistant", "content": "<think>a</think>"},
        {"role": "assistant", "content": "b"},
    )
    assert message.text == "<think>a</think>\nb"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"encrypted_content": encrypted("exact \u00e9"), "summary": []}, "exact \u00e9"),
        ({"encrypted_content": "gAAAAA7rq6u", "summary": []}, ""),
        ({"encrypted_content": "gAAA\u00e9", "summary": []}, ""),
        ({"encrypted_content": "gAAAA", "content": [{"type": "reasoning_text", "text": "t"}]}, "t"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
    ],
)
def test_reasoning_comes_back_as_exactly_as_it_can(fields: dict[str, Any], expected: str) -> None:
    [message] = messages({"type": "reasoning", **fields}, {"role": "assistant", "content": "a"})
    assert (message.reasoning, message.text) == (expected, "a")


def test_reasoning_is_handed_out_for_clients_that_store_it_themselves() -> None:
    script = (ReplyReasoning("Hm, "), ReplyReasoning("so."), ReplyText("a"), done())
    include = ["reasoning.encrypted_content"]
    item = respond(FakeResponder(script), include=include, store=False).json()["output"][0]
    assert item["content"] == [{"type": "reasoning_text", "text": "Hm, so."}]
    returned = {key: item[key] for key in ("type", "summary", "encrypted_content")}
    assert messages(returned)[0].reasoning == "Hm, so."
    assert "encrypted_content" not in respond(FakeResponder(script)).json()["output"][0]


def test_custom_calls_are_functions_for_the_model() -> None:
    responder = FakeResponder()
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'x "\u00e9"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    respond(responder, input=items, tools=[PATCH])
    called, result = responder.conversations[0].messages
    assert json.loads(called.calls[0].arguments_json) == {"input": 'x "\u00e9"'}
    assert result.parts == (ToolResult("c", None, "ok"),)
    [tool] = responder.conversations[0].tools
    function = json.loads(tool.definition_json)["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edits.")
    assert "start: /x/" in function["description"]


def test_items_of_other_tools_are_shown_where_they_can_be() -> None:
    found = messages(
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": "a"}},
        {"type": "local_shell_call", "call_id": "s", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "s", "output": "a.py"},
        {"type": "computer_call_output", "call_id": "nowhere", "output": {"image_url": "x"}},
        {"type": "compaction", "content": {"any": "thing"}},
    )
    assert found == (
        Message(Role.ASSISTANT, (ToolCall("s", "local_shell", '{"command": ["ls"]}'),)),
        Message(Role.TOOL, (ToolResult("s", None, "a.py"),)),
    )


def test_an_unknown_part_from_a_tool_becomes_a_note_and_one_from_a_user_is_refused() -> None:
    hologram = {"type": "input_hologram", "data": "AA"}
    result = messages(CALL, {**OUTPUT, "output": [hologram]})[1].parts[0]
    assert isinstance(result, ToolResult)
    assert result.text == "[input_hologram left out: this model reads only text]"
    param, _ = refusal(input=[{"role": "user", "content": [hologram]}])
    assert param == "input.0.content.0.type"


def test_tools_keep_their_names_and_those_of_the_vendor_are_named() -> None:
    responder = FakeResponder()
    body = respond(responder, tools=[F, AGENTS, *HOSTED], metadata={"a": "b"}).json()
    assert [tool.name for tool in responder.conversations[0].tools] == ["f", "agents__g"]
    assert body["metadata"] == {"a": "b", "rekindle_unsupported_tools": "web_search,mcp"}
    assert body["tools"] == [F, AGENTS, *HOSTED]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolChoice(ToolMode.AUTO)),
        ({"tool_choice": "none"}, ToolChoice(ToolMode.NONE)),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ToolChoice(ToolMode.REQUIRED, parallel=False),
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            ToolChoice(ToolMode.REQUIRED, ("f",), parallel=False),
        ),
        (
            {"tool_choice": {"type": "custom", "name": "g", "namespace": "agents"}},
            ToolChoice(ToolMode.REQUIRED, ("agents__g",), parallel=False),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
                }
            },
            ToolChoice(ToolMode.REQUIRED, ("f",)),
        ),
        ({"tool_choice": {"type": "web_search_preview"}}, ToolChoice(ToolMode.AUTO)),
        ({"tools": HOSTED, "tool_choice": "required"}, ToolChoice(ToolMode.AUTO)),
    ],
)
def test_tool_choice(fields: dict[str, Any], expected: ToolChoice) -> None:
    assert options(**{"tools": [F, AGENTS], **fields}).tool_choice == expected


def test_settings_are_honoured_and_returned() -> None:
    responder = FakeResponder()
    fields: dict[str, Any] = {
        "max_output_tokens": 0,
        "temperature": 0.5,
        "top_p": 0.25,
        "reasoning": {"effort": "minimal", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
    }
    body = respond(responder, **fields).json()
    wanted = responder.started[0].options
    assert (wanted.max_tokens, wanted.n_top_logprobs, wanted.cache_prompt) == (0, None, True)
    assert (wanted.sampling.temperature, wanted.sampling.top_p) == (0.5, 0.25)
    assert wanted.sampling.top_k == responder.default_sampling.top_k
    assert wanted.sampling.grammar is not None
    assert wanted.sampling.grammar.source == '{"type": "integer"}'
    assert responder.conversations[0].template_kwargs == {
        "reasoning_effort": "minimal",
        "enable_thinking": False,
    }
    assert fields.items() <= body.items()


@pytest.mark.parametrize("script", [HELLO, CALLING])
def test_responses_fit_the_type_that_describes_them(script: Script) -> None:
    body = respond(
        FakeResponder(script), tools=[F, *HOSTED], include=["reasoning.encrypted_content"]
    )
    TypeAdapter(ResponseBody).validate_python(body.json(), extra="forbid")


def test_a_reply_that_was_cut_is_incomplete() -> None:
    script = (ReplyText("Hel"), done(finish=FinishReason.LENGTH))
    body = respond(FakeResponder(script)).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": ["a"]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": [OUTPUT]}, "input.0.call_id"),
        ({"input": [CALL, {**OUTPUT, "call_id": "x"}]}, "input.1.call_id"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [F, F]}, "tools.1.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        (
            {"tools": [F], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "tool_choice",
        ),
    ],
)
def test_faults_are_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)[0] == param


def test_unknown_items_of_agents_are_accepted() -> None:
    reply = respond(
        FakeResponder(HELLO),
        background=False,
        truncation="auto",
        store=False,
        include=["file_search_call.results"],
        user="u",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        service_tier="flex",
        client_metadata={"session": {"a": 1}},
        stream_options={"include_obfuscation": True},
        text={"verbosity": "low"},
        context_management=[{"type": "compaction"}],
    )
    assert reply.status_code == 200
    assert reply.json()["text"] == {"verbosity": "low", "format": {"type": "text"}}
