"""Depth, numbers, names and lengths that no client means, in every wire format."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from rekindle.api import body as body_module
from rekindle.api.body import MAX_THREADS, SMALL_BYTES, BodyReader
from rekindle.api.http.disconnect import ClientGone
from rekindle.observe.telemetry import Telemetry
from tests.api.client import USER, app_on, chat, post
from tests.api.fakes import CARD, FakeResponder, FixedModels

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HUGE = 10**400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def called_with(arguments: object) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def bodies_with(value: Any) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Return the places where a request passes JSON on: endpoint, body, path of the field."""
    schema = {"type": "object", "properties": {"a": {"default": value}}}
    function = {"name": "f", "parameters": schema}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": value}}
    messages: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
    used = {**messages, "messages": [USER, {"role": "assistant", "content": [use]}]}
    action = {"type": "x_call", "call_id": "1", "action": {"a": value}}
    format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {
        "chat tool": (
            CHAT,
            {"messages": [USER], "tools": [{"type": "function", "function": function}]},
            "tools.0.function",
        ),
        "chat format": (
            CHAT,
            {"messages": [USER], "response_format": format_},
            "response_format.json_schema.schema",
        ),
        "chat kwargs": (
            CHAT,
            {"messages": [USER], "chat_template_kwargs": {"a": value}},
            "chat_template_kwargs",
        ),
        "chat document": (CHAT, {"messages": [USER], "documents": [{"a": value}]}, "documents.0"),
        "chat metadata": (CHAT, {"messages": [USER], "metadata": {"a": value}}, "metadata"),
        "chat call": (
            CHAT,
            called_with({"a": value}),
            "messages.1.tool_calls.0.function.arguments",
        ),
        "template": (
            "/apply-template",
            {"messages": [USER], "documents": [{"a": value}]},
            "documents.0",
        ),
        "messages tool": (
            MESSAGES,
            {**messages, "tools": [{"name": "f", "input_schema": schema}]},
            "tools.0.input_schema",
        ),
        "messages call": (MESSAGES, used, "messages.1.content.0.input"),
        "messages format": (
            MESSAGES,
            {**messages, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
        "count": ("/v1/messages/count_tokens", used, "messages.1.content.0.input"),
        "responses tool": (
            RESPONSES,
            {"input": "hi", "tools": [{"type": "function", **function}]},
            "tools.0.parameters",
        ),
        "responses format": (
            RESPONSES,
            {
                "input": "hi",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
            },
            "text.format.schema",
        ),
        "responses metadata": (RESPONSES, {"input": "hi", "metadata": {"a": value}}, "metadata"),
        "responses other": (RESPONSES, {"input": [action]}, "input.0"),
    }


PLACES = list(bodies_with(0))


def refused(path: str, body: object) -> tuple[str | None, str]:
    """Return the field that a 400 names, and its message."""
    reply = post(path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    # Anthropic's errors have no `param`; the message begins with it.
    return error.get("param") or error["message"].split("`")[1], error["message"]


@pytest.mark.parametrize("place", PLACES)
def test_json_nested_150_deep_is_refused_by_its_path(place: str) -> None:
    path, body, param = bodies_with(nested(150))[place]
    named, message = refused(path, body)
    assert (named, "more than 64" in message) == (param, True)


@pytest.mark.parametrize("place", PLACES)
def test_a_number_beyond_doubles_is_refused_by_its_path(place: str) -> None:
    path, body, param = bodies_with(HUGE)[place]
    named, message = refused(path, body)
    assert (named, "range of a double" in message) == (param, True)


@pytest.mark.parametrize("place", PLACES)
def test_ordinary_depths_and_numbers_are_accepted(place: str) -> None:
    path, body, _ = bodies_with([nested(20), 2**64, 1.7e308, 2**256, -1])[place]
    reply = post(path, body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"a": 1e400}', "range of a double"),
        ('{"a": -1' + "0" * 400 + "}", "range of a double"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", "more than 64"),
        ("[" * 5000, "more than 64"),
    ],
)
def test_arguments_of_a_call_have_the_same_bounds(arguments: str, says: str) -> None:
    named, message = refused(CHAT, called_with(arguments))
    assert (named, says in message) == ("messages.1.tool_calls.0.function.arguments", True)
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    named, message = refused(RESPONSES, {"input": [item]})
    assert (named, says in message) == ("input.0.arguments", True)


def calls_of(arguments: str) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Return the places where a string holds JSON: endpoint, body, path of the field."""
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    other = {"type": "x_call", "call_id": "1", "arguments": arguments}
    return {
        "chat": (CHAT, called_with(arguments), "messages.1.tool_calls.0.function.arguments"),
        "responses": (RESPONSES, {"input": [item]}, "input.0.arguments"),
        "responses other": (RESPONSES, {"input": [other]}, "input.0"),
    }


@pytest.mark.parametrize("place", calls_of(""))
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[" + "[]," * 30_000 + "[]]", "more than 20,000 objects"),
        ('{"a": [' + "0," * 150_000 + "0]}", "100,000 values"),
        # Python's reader accepts half of a surrogate pair, and reads on.
        ('["\\ud800",' + "[" * 500 + "]" * 500 + "]", "more than 64"),
    ],
)
def test_json_in_a_string_is_bounded(arguments: str, says: str, place: str) -> None:
    path, body, param = calls_of(arguments)[place]
    named, message = refused(path, body)
    assert (named, says in message) == (param, True)


def test_the_arguments_of_all_calls_are_bounded_together() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": f"[{'0,' * 56_000}0]"}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call] * 9}]}
    named, message = refused(CHAT, body)
    assert named == "messages.1.tool_calls.8.function.arguments"
    assert "500,000 values" in message


def test_a_long_text_in_arguments_may_have_any_characters() -> None:
    arguments = json.dumps({"content": '{"a": [1, 2]},\n' * 30_000})
    assert chat(**called_with(arguments)).status_code == 200


LONG = "x" * 5000
CALLED = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"model": LONG}, "model"),
        (CHAT, {"user": LONG}, "user"),
        (CHAT, {"prompt_cache_key": LONG}, "prompt_cache_key"),
        (CHAT, {"cache_salt": LONG}, "cache_salt"),
        (CHAT, {"reasoning_effort": LONG}, "reasoning_effort"),
        (CHAT, {"stop": [LONG]}, "stop.0"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "id": LONG}]}]},
            "messages.0.tool_calls.0.id",
        ),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "", "tool_call_id": LONG}]},
            "messages.0.tool_call_id",
        ),
        (MESSAGES, {"metadata": {"user_id": LONG}}, "metadata.user_id"),
        (MESSAGES, {"stop_sequences": [LONG]}, "stop_sequences.0"),
        (
            MESSAGES,
            {"diagnostics": {"previous_message_id": LONG}},
            "diagnostics.previous_message_id",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": LONG}]}
                ]
            },
            "messages.0.content.0.tool_use_id",
        ),
        (RESPONSES, {"previous_response_id": LONG}, "previous_response_id"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": LONG, "output": ""}]},
            "input.0.call_id",
        ),
        (RESPONSES, {"input": [{"type": "x_call_output", "call_id": LONG}]}, "input.0"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": LONG}]}, "input.0.id"),
        ("/tokenize", {"content": "hi", "model": LONG}, "model"),
        ("/v1/embeddings", {"model": LONG}, "model"),
    ],
)
def test_an_id_of_thousands_of_characters_is_refused_by_its_path(
    path: str, fields: dict[str, Any], param: str
) -> None:
    needed: dict[str, Any] = {"messages": [USER], "max_tokens": 1, "input": "hi"}
    named, message = refused(path, needed | fields)
    assert (named, "characters" in message) == (param, True)
    assert len(message) < 200


@pytest.mark.parametrize("arguments", ["", "not JSON", '{"a": ', '{"a": NaN}', "9" * 5000])
def test_arguments_that_are_no_json_are_shown_as_they_are(arguments: str) -> None:
    responder = FakeResponder()
    assert chat(responder, **called_with(arguments)).status_code == 200
    assert responder.conversations[0].messages[1].calls[0].arguments_json == arguments


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": HUGE}),
        (CHAT, {"max_completion_tokens": HUGE}),
        (CHAT, {"n_predict": -HUGE}),
        (CHAT, {"seed": HUGE}),
        (CHAT, {"top_k": HUGE}),
        (CHAT, {"repeat_last_n": 2**63}),
        (CHAT, {"temperature": HUGE}),
        (CHAT, {"id_slot": HUGE}),
        (CHAT, {"reasoning_budget": HUGE}),
        (MESSAGES, {"max_tokens": HUGE}),
        (MESSAGES, {"top_k": HUGE}),
        (RESPONSES, {"max_output_tokens": HUGE}),
        (RESPONSES, {"max_tool_calls": HUGE}),
        ("/v1/embeddings", {"dimensions": HUGE}),
    ],
)
def test_a_huge_number_in_a_field_is_refused_by_its_name(path: str, fields: dict[str, Any]) -> None:
    needed: dict[str, Any] = {"messages": [USER], "max_tokens": 1, "input": "hi"}
    named, message = refused(path, needed | fields)
    assert [named] == list(fields)
    assert len(message) < 200


@pytest.mark.parametrize("path", ["/detokenize", "/v1/completions"])
def test_a_huge_token_is_refused_in_a_short_sentence(path: str) -> None:
    tokens = [1, 10**4000]
    named, message = refused(path, {"tokens": tokens, "prompt": tokens})
    assert named is not None
    assert named.endswith(".1")
    assert len(message) < 1100


NAMES = ["my tool", 'a"b', "a'b", "a=b", "a<b>", "a\nb", "a\0b", "a(b)", "a{b", "a,b", "a\u200bb"]


@pytest.mark.parametrize("name", [*NAMES, "x" * 257])
def test_a_tool_whose_name_cannot_be_called_is_refused(name: str) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    tools: dict[str, tuple[list[Any], str]] = {
        CHAT: ([{"type": "function", "function": function}], "tools.0.function.name"),
        MESSAGES: ([{"name": name, "input_schema": {}}], "tools.0.name"),
        RESPONSES: ([{"type": "function", **function}], "tools.0.name"),
    }
    for path, (listed, param) in tools.items():
        body = {"messages": [USER], "max_tokens": 1, "input": "hi", "tools": listed}
        named, message = refused(path, body)
        assert named == param
        assert "cannot be called" in message or "256 characters" in message


@pytest.mark.parametrize(
    "name",
    ["get_weather", "mcp__git-hub__list", "server.tool", "a/b:c", "werkzeug_ü", "工具", "x" * 256],
)
def test_names_of_mcp_servers_and_of_other_languages_are_accepted(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    assert chat(tools=tools).status_code == 200


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/apply-template", "/v1/messages/count_tokens"])
def test_no_messages_are_refused_in_plain_words(path: str) -> None:
    _, message = refused(path, {"messages": [], "max_tokens": 1})
    assert message == "`messages` should have at least 1 item."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 5000}, "tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 11_000}]},
            None,
        ),
        ({"modalities": ["text"] * 65}, "modalities"),
    ],
)
def test_lists_are_bounded(fields: dict[str, Any], param: str | None) -> None:
    named, message = refused(CHAT, {"messages": [USER], **fields})
    assert named == (param or "messages.0.content")
    assert "should have at most" in message


def test_the_first_wrong_bias_is_named() -> None:
    named, message = refused(CHAT, {"messages": [USER], "logit_bias": {"1": 2, "7": "x", "8": "y"}})
    assert (named, message) == ("logit_bias.7", "`logit_bias.7` should be a valid number or False.")


def test_unknown_fields_are_counted_under_a_bounded_number_of_names() -> None:
    telemetry = Telemetry()
    app = app_on(FixedModels(FakeResponder(), CARD), telemetry=telemetry)
    body = {"messages": [USER]} | {f"unknown_{i}": 0 for i in range(5000)}

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(CHAT, json=body)

    assert asyncio.run(run()).status_code == 200
    lines = [
        line
        for line in telemetry.render().decode().splitlines()
        if line.startswith("rekindle_ignored_fields_total{")
    ]
    assert len(lines) <= 101
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 5000


class SentBody:
    """A request whose body has been read. `leaves`: the client disconnects."""

    def __init__(self, n_bytes: int, *, leaves: bool = False) -> None:
        self._n_bytes = n_bytes
        self._leaves = leaves

    async def body(self) -> bytes:
        return b" " * self._n_bytes

    async def receive(self) -> dict[str, str]:
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("n_bytes", [10, 2 * SMALL_BYTES])
def test_only_large_bodies_are_worked_on_elsewhere(n_bytes: int) -> None:
    request: Any = SentBody(n_bytes)
    reader = BodyReader(Telemetry())
    name = asyncio.run(reader.work(request, lambda: threading.current_thread().name))
    assert name.startswith("body") == (n_bytes > SMALL_BYTES)


def test_the_work_of_a_client_that_left_is_dropped_from_the_queue() -> None:
    reader = BodyReader(Telemetry())
    may_end = threading.Event()
    done: list[str] = []
    here: Any = SentBody(2 * SMALL_BYTES)
    gone: Any = SentBody(2 * SMALL_BYTES, leaves=True)

    async def scenario() -> None:
        busy = [
            asyncio.create_task(reader.work(here, lambda: may_end.wait(30)))
            for _ in range(MAX_THREADS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            await asyncio.wait_for(reader.work(gone, lambda: done.append("gone")), 30)
        may_end.set()
        await asyncio.gather(*busy)
        await reader.work(here, lambda: done.append("here"))

    asyncio.run(scenario())
    assert done == ["here"]


def test_a_large_body_is_checked_on_a_body_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    checked = body_module._checked

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return checked(*arguments)

    monkeypatch.setattr(body_module, "_checked", noted)
    post(CHAT, {"messages": [{"role": "user", "content": "x" * 2 * SMALL_BYTES}]})
    [name] = names
    assert name.startswith("body")
