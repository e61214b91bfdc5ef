"""The official SDK's `responses` against the real server with the embedded model."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseFunctionToolCall

from tests.support.clear_replies import say

QUESTION = "Name three colours."
SETTINGS: dict[str, Any] = {"model": "any", "max_output_tokens": 24, "temperature": 0}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def n_remembered(reply: Response) -> int:
    assert reply.model_extra is not None
    return int(reply.model_extra["rekindle"]["remembered_turns"])


def test_a_streamed_response_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    asked: list[Any] = say("the ship sails to the north")
    whole = client.responses.create(input=asked, **SETTINGS)
    events = list(client.responses.create(input=asked, stream=True, **SETTINGS))
    assert whole.output_text
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.input_tokens_details.cached_tokens > 0


def test_a_stored_conversation_continues_without_recomputing_a_token(
    client: openai.OpenAI,
) -> None:
    first = client.responses.create(input=QUESTION, instructions="Be brief.", **SETTINGS)
    second = client.responses.create(
        input="And three more.",
        instructions="Be brief.",
        previous_response_id=first.id,
        **SETTINGS,
    )
    assert n_remembered(second) == 1
    assert first.usage is not None
    assert second.usage is not None
    told = first.usage.total_tokens
    # The last token of a reply is sampled, but its row is only computed by what follows.
    assert second.usage.input_tokens_details.cached_tokens >= told - 1


def test_items_sent_back_match_the_sampled_turn(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(
        input=asked,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        store=False,
        **{**SETTINGS, "max_output_tokens": 100},
    )
    [call] = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    returned: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    second = client.responses.create(
        input=[*asked, *returned, output], tools=[WEATHER], store=False, **SETTINGS
    )
    assert n_remembered(second) == 1


def test_a_schema_is_obeyed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["age"],
        "additionalProperties": False,
    }
    reply = client.responses.create(
        model="any",
        input="How old is the cat?",
        text={"format": {"type": "json_schema", "name": "cat", "schema": schema, "strict": True}},
        max_output_tokens=60,
    )
    assert reply.status == "completed"
    assert 0 <= json.loads(reply.output_text)["age"] <= 120


def test_with_max_output_tokens_0_the_prompt_is_primed_and_nothing_is_sampled(
    client: openai.OpenAI,
) -> None:
    text = "Prime this prompt, which nobody has sent before, please."
    primed = client.responses.create(model="any", input=text, max_output_tokens=0)
    assert (primed.status, primed.output) == ("incomplete", [])
    reply = client.responses.create(input=text, **SETTINGS)
    assert primed.usage is not None
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens >= primed.usage.input_tokens - 1


def test_a_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model="any", input="word " * 20_000, truncation="auto")
    assert refusal.value.code == "context_length_exceeded"
