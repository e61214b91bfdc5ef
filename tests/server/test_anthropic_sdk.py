"""Anthropic's SDK against the real server with the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageParam, ToolParam, ToolUseBlock

from tests.support.clear_replies import say
from tests.support.server_process import ServerProcess

GREEDY = {"temperature": 0}  # newer versions of the SDK have no argument for it
QUESTION: list[MessageParam] = [{"role": "user", "content": "Name three colours."}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=600
    ) as client:
        yield client


def ask(sdk: anthropic.Anthropic, messages: Any = QUESTION, **fields: Any) -> Message:
    defaults = {"model": "any", "max_tokens": 24, "extra_body": GREEDY}
    reply: Message = sdk.messages.create(messages=messages, **{**defaults, **fields})
    return reply


def text_of(reply: Message) -> str:
    return "".join(block.text for block in reply.content if block.type == "text")


def n_prompt(reply: Message) -> int:
    usage = reply.usage
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    return usage.input_tokens + (created or 0) + (read or 0)


def test_a_streamed_reply_equals_the_unstreamed_one(sdk: anthropic.Anthropic) -> None:
    asked: Any = say("the ship sails to the north")
    whole = ask(sdk, asked)
    with sdk.messages.stream(
        model="any", max_tokens=24, extra_body=GREEDY, messages=asked
    ) as stream:
        streamed = stream.get_final_message()
    assert text_of(streamed) == text_of(whole) != ""
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert n_prompt(streamed) == n_prompt(whole)
    counted = sdk.messages.count_tokens(model="any", messages=asked)
    assert counted.input_tokens == n_prompt(whole)


def test_message_start_has_the_counts_of_a_short_prompt(sdk: anthropic.Anthropic) -> None:
    ask(sdk)
    stream = sdk.messages.create(model="any", max_tokens=2, messages=QUESTION, stream=True)
    first, *_ = list(stream)
    assert first.type == "message_start"
    assert n_prompt(first.message) > 0
    assert first.message.usage.cache_read_input_tokens


def test_a_stop_sequence_is_named(sdk: anthropic.Anthropic) -> None:
    asked = say("the ship sails to the north")
    free = text_of(ask(sdk, asked))
    stop = free[5:9]
    reply = ask(sdk, asked, stop_sequences=["nothing like this", stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert text_of(reply) == free[: free.index(stop)]


def test_no_tokens_prime_the_cache(sdk: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Which of these numbers are prime: 2, 4, 5, 6, 7, 9?"}]
    primed = ask(sdk, messages, max_tokens=0)
    assert (primed.content, primed.stop_reason) == ([], "max_tokens")
    assert primed.usage.output_tokens == 0
    reply = ask(sdk, messages)
    assert reply.usage.cache_read_input_tokens == n_prompt(primed) - 1


def test_a_message_at_the_end_is_continued(sdk: anthropic.Anthropic) -> None:
    open_message = [*QUESTION, {"role": "assistant", "content": "The three colours are: red,"}]
    reply = ask(sdk, open_message)
    assert text_of(reply)
    assert not text_of(reply).startswith("The three colours")


def test_a_required_call_is_valid_and_its_result_is_read(sdk: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
    fields: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 80}
    reply = ask(sdk, asked, tool_choice={"type": "tool", "name": "weather"}, **fields)
    assert reply.stop_reason == "tool_use"
    [call] = [block for block in reply.content if isinstance(block, ToolUseBlock)]
    assert isinstance(call.input, dict)
    assert set(call.input) == {"city", "unit"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    messages = [*asked, reply.to_param(), {"role": "user", "content": [result]}]
    after = ask(sdk, messages, **fields)
    assert after.content
    known = n_prompt(reply) + reply.usage.output_tokens
    assert (after.usage.cache_read_input_tokens or 0) >= known - 1


def test_a_schema_is_obeyed(sdk: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 20}},
        "required": ["title"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    reply = ask(sdk, output_config=wanted, max_tokens=60)
    assert set(json.loads(text_of(reply))) == {"title"}


def test_a_prompt_beyond_the_context_is_refused_in_anthropics_words(
    sdk: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(sdk, [{"role": "user", "content": "word " * 20_000}])


@pytest.mark.parametrize("anthropic_first", [True, False])
def test_one_conversation_over_two_apis_shares_one_cache(
    sdk: anthropic.Anthropic,
    server: ServerProcess,
    anthropic_first: bool,  # noqa: FBT001
) -> None:
    topic = "rivers" if anthropic_first else "mountains"
    system = f"You know all about {topic}."
    first: dict[str, Any] = {"role": "user", "content": f"Tell me about {topic}."}
    over_openai = [{"role": "system", "content": system}]

    def complete(messages: list[dict[str, Any]]) -> Any:
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        return reply.raise_for_status().json()

    if anthropic_first:
        message = ask(sdk, [first], system=system, max_tokens=16)
        said, known = text_of(message), n_prompt(message) + message.usage.output_tokens
    else:
        reply = complete([*over_openai, first])
        said, known = reply["choices"][0]["message"]["content"], reply["usage"]["total_tokens"]
    history = [first, {"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
    if anthropic_first:
        usage = complete([*over_openai, *history])["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
    else:
        message = ask(sdk, history, system=[{"type": "text", "text": system}], max_tokens=16)
        cached = message.usage.cache_read_input_tokens
    assert cached >= known - 1
