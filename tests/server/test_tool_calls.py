"""Tool calls and reasoning with a real model, a real server and OpenAI's SDK."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

from tests.support.clear_replies import say
from tests.support.server_process import ServerProcess, serve

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 12}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, CLOCK]
# A tool without a choice of arguments: compared replies must not depend on near ties.
BONN = {
    "type": "function",
    "function": {
        "name": "weather_in_bonn",
        "description": "Tells the weather in Bonn.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bonn"]},
                "unit": {"type": "string", "enum": ["celsius"]},
                "days": {"type": "integer", "enum": [3]},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
STORY_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 150, "maxLength": 200}},
    "required": ["text"],
    "additionalProperties": False,
}
STORY = {"name": "write_story", "description": "Writes a story.", "parameters": STORY_SCHEMA}
STORY_TOKENS = 400  # enough to land the call
TELL = [{"role": "user", "content": "Write a story about a ship."}]
WRITE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Writes a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "content": {"type": "string", "minLength": 400},
                "path": {"type": "string"},
                "mode": {"enum": ["append", "overwrite"]},
            },
            "required": ["content", "path", "mode"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Bonn for the next 3 days?"}]


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "2") as server:
        yield server


@pytest.fixture(scope="module")
def create(server: ServerProcess) -> Iterator[Any]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as sdk:

        def create(messages: Any = ASKED, **fields: Any) -> Any:
            defaults = {"model": "any", "temperature": 0, "max_tokens": 120, "tools": TOOLS}
            return sdk.chat.completions.create(messages=messages, **{**defaults, **fields})

        yield create


PLAIN = {
    "speculative": False
}  # without drafts, which round differently: the call might end earlier


def check_weather(call: Any) -> None:
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit", "days"}
    assert arguments["unit"] in ("celsius", "kelvin")
    assert 1 <= arguments["days"] <= 9


def rounds(n_rounds: int, text: str = "") -> list[dict[str, Any]]:
    """Return a history of calls that any model continues."""
    history: list[dict[str, Any]] = []
    for number, city in enumerate(("Rome", "Oslo", "Lima", "Kyiv")[:n_rounds]):
        arguments = json.dumps({"city": city, "unit": "celsius", "days": 3})
        call = {"id": f"c{number}", "type": "function"}
        history += [
            {"role": "user", "content": f"What is the weather in {city} for the next 3 days?"},
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{**call, "function": {"name": "weather", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": f"c{number}", "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    return history


def test_under_required_the_reply_is_a_valid_call(create: Any) -> None:
    [choice] = create(tool_choice="required", parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.id
    assert call.function.name in ("weather", "clock")


def test_a_named_tool_is_the_one_that_is_called(create: Any) -> None:
    for name in ("weather", "clock"):
        wanted = {"type": "function", "function": {"name": name}}
        [choice] = create(tool_choice=wanted).choices
        assert [call.function.name for call in choice.message.tool_calls] == [name]


def test_a_streamed_call_equals_the_unstreamed_one(create: Any) -> None:
    fields = {"tools": [BONN], "tool_choice": "required", "parallel_tool_calls": False}
    [whole] = create(**fields).choices[0].message.tool_calls
    names, arguments, finish = [], "", None
    for chunk in create(**fields, stream=True):
        [choice] = chunk.choices
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names.append(call.function.name)
            arguments += call.function.arguments or ""
        finish = choice.finish_reason or finish
    told = (whole.function.name, whole.function.arguments, "tool_calls")
    assert ("".join(names), arguments, finish) == told
    assert json.loads(arguments) == {"city": "Bonn", "unit": "celsius", "days": 3}


def check_story(arguments: Any) -> None:
    assert set(arguments) == {"text"}
    assert 150 <= len(arguments["text"]) <= 200


def test_a_call_is_streamed_while_it_is_sampled(create: Any) -> None:
    stream = create(
        TELL,
        tools=[{"type": "function", "function": STORY}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=STORY_TOKENS,
        logprobs=True,
        stream=True,
    )
    n_scored, n_at_name, pieces = 0, 0, []
    for chunk in stream:
        [choice] = chunk.choices
        n_scored += len(choice.logprobs.content) if choice.logprobs else 0
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.id
                assert (call.type, call.function.name) == ("function", "write_story")
                n_at_name = n_scored
            elif call.function.arguments:
                pieces.append(call.function.arguments)
    assert 0 < n_at_name < n_scored / 2  # held back, it would come with the scores of all tokens
    assert len(pieces) > 10
    check_story(json.loads("".join(pieces)))


def test_a_response_streams_the_arguments_of_a_call(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as sdk:
        responses: Any = sdk.responses
        with responses.stream(
            model="any",
            input=TELL,
            tools=[{"type": "function", **STORY}],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=STORY_TOKENS,
        ) as stream:
            kinds = [event.type for event in stream]
            reply = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 10
    assert kinds.count("response.function_call_arguments.done") == 1
    [call] = reply.output
    check_story(json.loads(call.arguments))


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_call_incomplete_that_was_ended_at_max_output_tokens(
    server: ServerProcess,
    stream: bool,  # noqa: FBT001
) -> None:
    fields = {
        "model": "any",
        "input": TELL,
        "tools": [{"type": "function", **WRITE["function"]}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as sdk:
        responses: Any = sdk.responses
        if stream:
            *_, last = responses.create(**fields, stream=True, extra_body=PLAIN)
            reply = last.response
        else:
            reply = responses.create(**fields, extra_body=PLAIN)
    assert reply.status == "incomplete"
    [call] = reply.output
    assert call.status == "incomplete"
    assert set(json.loads(call.arguments)) == {"content", "path", "mode"}


def test_a_message_streams_the_input_of_a_tool_use(server: ServerProcess) -> None:
    with Anthropic(base_url=server.url, api_key="none", timeout=600) as sdk:
        messages: Any = sdk.messages
        tool = {"name": STORY["name"], "input_schema": STORY_SCHEMA}
        with messages.stream(
            model="any",
            messages=TELL,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=STORY_TOKENS,
            extra_body={"temperature": 0},
        ) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "input_json"]
            reply = stream.get_final_message()
    assert len(snapshots) > 10
    [block] = reply.content
    assert (block.type, block.name) == ("tool_use", "write_story")
    check_story(block.input)


def test_under_auto_a_call_once_begun_is_completed_and_valid(create: Any) -> None:
    [choice] = create([*rounds(3), *ASKED], parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    check_weather(call)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_by_max_tokens_is_returned_as_text(create: Any, stream: bool) -> None:  # noqa: FBT001
    fields = {"tool_choice": "required", "max_tokens": 12, "stream": stream}
    if stream:
        chunks = [chunk.choices[0] for chunk in create(**fields)]
        assert not any(chunk.delta.tool_calls for chunk in chunks)
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        finish = chunks[-1].finish_reason
    else:
        [choice] = create(**fields).choices
        assert choice.message.tool_calls is None
        text, finish = choice.message.content, choice.finish_reason
    assert finish == "length"
    assert "<tool_call>" in text


def test_a_long_call_is_ended_at_max_tokens_and_is_valid(create: Any) -> None:
    asked = [{"role": "user", "content": "Write a very long story about a ship to a file."}]
    reply = create(asked, tools=[WRITE], tool_choice="required", max_tokens=200)
    [choice] = reply.choices
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 200
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"content", "path", "mode"}
    assert len(arguments["content"]) >= 400
    assert arguments["mode"] in ("append", "overwrite")


def test_a_call_that_streams_is_ended_at_max_tokens_and_is_valid(create: Any) -> None:
    parameters = {
        "type": "object",
        # Long, but an end of this length still fits when the call begins.
        "properties": {"text": {"type": "string", "pattern": "^[a-zA-Z ,.]{300,}$"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    stream = create(
        TELL,
        tools=[{"type": "function", "function": {**STORY, "parameters": parameters}}],
        tool_choice="required",
        max_tokens=520,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert len(deltas) > 50
    assert not any(choice.delta.content for choice in choices)
    assert choices[-1].finish_reason == "length"
    arguments = json.loads("".join(call.function.arguments for call in deltas))
    assert len(arguments["text"]) >= 300


def test_under_auto_a_call_is_ended_at_max_tokens_and_is_valid(create: Any) -> None:
    fields = {"messages": [*rounds(3), *ASKED], "parallel_tool_calls": False}
    n_tokens = create(**fields).usage.completion_tokens
    [choice] = create(**fields, max_tokens=n_tokens - 2).choices
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    check_weather(call)


def test_under_none_the_prompt_is_the_same_and_nothing_is_called(create: Any) -> None:
    first = create(tool_choice="auto", max_tokens=1)
    second = create(tool_choice="none", max_tokens=40)
    assert second.choices[0].message.tool_calls is None
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_the_order_of_keys_in_a_tool_definition_does_not_change_the_prompt(create: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in sorted(value, reverse=True)}
        return value

    first = create(max_tokens=1)
    second = create(max_tokens=1, tools=[shuffled(tool) for tool in TOOLS])
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_a_result_without_its_call_is_refused(create: Any) -> None:
    orphan = {"role": "tool", "tool_call_id": "call_gone", "content": "sunny"}
    with pytest.raises(BadRequestError, match="call_gone"):
        create([*ASKED, orphan])


THINKING = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)


def test_reasoning_opened_by_the_prompt_is_separate_from_the_answer(embedded_model: Path) -> None:
    with (
        serve("--chat-template", THINKING) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as sdk,
    ):
        create: Any = sdk.chat.completions.create
        asked = say("the ship sails to the north")
        for each in asked:
            if each["role"] == "assistant":
                each["content"] = f"<think>\n{each['content']}"
        fields = {"model": "any", "messages": asked, "temperature": 0, "max_tokens": 6}
        [choice] = create(**fields).choices
        assert choice.message.reasoning_content
        assert not choice.message.content
        deltas = [chunk.choices[0].delta for chunk in create(**fields, stream=True)]
        streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert streamed == choice.message.reasoning_content
        # Under a schema the answer begins behind the reasoning; without it, at once.
        switched_off = {"enable_thinking": False}
        fields["messages"] = ASKED
        [plain] = create(**fields, extra_body={"chat_template_kwargs": switched_off}).choices
        assert plain.message.content
        assert not hasattr(plain.message, "reasoning_content")
