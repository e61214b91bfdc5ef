"""Google's SDK against the real server with the embedded model."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from tests.support.clear_replies import say
from tests.support.server_process import ServerProcess

SCHEMA = {
    "type": "OBJECT",
    "properties": {
        "title": {"type": "STRING", "maxLength": "20"},
        "kind": {"type": "STRING", "format": "enum", "enum": ["A", "B"]},
    },
    "required": ["kind", "title"],
    "propertyOrdering": ["kind", "title"],
}
WEATHER = types.FunctionDeclaration(
    name="weather",
    description="Tells the weather.",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"city": types.Schema(type=types.Type.STRING, max_length=20)},
        required=["city"],
    ),
)


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[genai.Client]:
    options = types.HttpOptions(base_url=server.url, timeout=600_000)
    with closing(genai.Client(api_key="none", http_options=options)) as client:
        yield client


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**{"temperature": 0, "max_output_tokens": 12, **fields})


def contents(messages: list[dict[str, Any]]) -> list[types.ContentUnion]:
    roles = {"user": "user", "assistant": "model"}
    return [
        types.Content(role=roles[each["role"]], parts=[types.Part(text=each["content"])])
        for each in messages
    ]


def counts(reply: types.GenerateContentResponse) -> tuple[int, int, int]:
    """Tokens of the prompt, cached ones, and generated ones."""
    usage = reply.usage_metadata
    assert usage is not None
    return (
        usage.prompt_token_count or 0,
        usage.cached_content_token_count or 0,
        usage.candidates_token_count or 0,
    )


def test_a_streamed_reply_equals_the_unstreamed_one(sdk: genai.Client) -> None:
    asked: Any = contents(say("the ship sails to the north"))
    whole = sdk.models.generate_content(model="any", contents=asked, config=config())
    chunks = list(sdk.models.generate_content_stream(model="any", contents=asked, config=config()))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text != ""
    n_prompt, n_cached, n_generated = counts(chunks[-1])
    assert (n_prompt, n_generated) == counts(whole)[::2]
    assert n_cached == n_prompt
    counted = sdk.models.count_tokens(model="any", contents=asked)
    assert counted.total_tokens == n_prompt


def test_the_second_turn_of_a_streamed_chat_computes_only_its_message(sdk: genai.Client) -> None:
    chat = sdk.chats.create(model="any", config=config(system_instruction="You know all rivers."))
    *_, first = chat.send_message_stream("Tell me about the Rhine.")
    *_, second = chat.send_message_stream("More.")
    n_prompt, _, n_generated = counts(first)
    assert counts(second)[1] >= n_prompt + n_generated - 1


def test_a_conversation_goes_on_over_chat_completions(
    sdk: genai.Client, server: ServerProcess
) -> None:
    system, question = "You know all lakes.", "Tell me about the lakes of Finland."
    asked = config(system_instruction=system)
    reply = sdk.models.generate_content(model="any", contents=question, config=asked)
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": question},
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": "More."},
    ]
    body = {"messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
    usage = answer.raise_for_status().json()["usage"]
    n_prompt, _, n_generated = counts(reply)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= n_prompt + n_generated - 1


def test_tools_make_the_same_prompt_as_those_of_openai(
    sdk: genai.Client, server: ServerProcess
) -> None:
    question = "What is the weather in Oslo?"
    asked = config(tools=[types.Tool(function_declarations=[WEATHER])], max_output_tokens=1)
    n_prompt, *_ = counts(sdk.models.generate_content(model="any", contents=question, config=asked))
    function = {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    }
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
    usage = answer.raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == n_prompt
    assert usage["prompt_tokens_details"]["cached_tokens"] == n_prompt


def test_a_required_call_is_valid_and_its_response_is_read(sdk: genai.Client) -> None:
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
    tools = [types.Tool(function_declarations=[WEATHER])]
    asked = types.Content(role="user", parts=[types.Part(text="What is the weather in Bonn?")])
    reply = sdk.models.generate_content(
        model="any",
        contents=[asked],
        config=config(
            tools=tools,
            tool_config=types.ToolConfig(function_calling_config=calling),
            max_output_tokens=60,
        ),
    )
    calls = reply.function_calls or []
    assert {call.name for call in calls} == {"weather"}
    assert all(set(call.args or {}) == {"city"} for call in calls)
    assert reply.candidates is not None
    said = reply.candidates[0].content
    assert said is not None
    sunny = types.Part.from_function_response(name="weather", response={"output": "Sunny."})
    answers = types.Content(role="user", parts=[sunny] * len(calls))
    after = sdk.models.generate_content(
        model="any",
        contents=[asked, said, answers],
        config=config(tools=tools, max_output_tokens=1),
    )
    n_prompt, _, n_generated = counts(reply)
    assert counts(after)[1] >= n_prompt + n_generated - 1


def test_a_schema_is_obeyed_in_its_order(sdk: genai.Client) -> None:
    wanted = config(
        response_mime_type="application/json", response_schema=SCHEMA, max_output_tokens=60
    )
    reply = sdk.models.generate_content(model="any", contents="Name a film.", config=wanted)
    found = json.loads(reply.text or "")
    assert list(found) == ["kind", "title"]
    assert found["kind"] in ("A", "B")


def test_an_enum_is_answered_without_quotes(sdk: genai.Client) -> None:
    schema = {"type": "STRING", "enum": ["a b", "c.d"]}
    wanted = config(response_mime_type="text/x.enum", response_schema=schema)
    reply = sdk.models.generate_content(model="any", contents="Choose.", config=wanted)
    assert reply.text in ("a b", "c.d")


def test_a_cached_content_is_computed_once(sdk: genai.Client, server: ServerProcess) -> None:
    kept = sdk.caches.create(
        model="any",
        config=types.CreateCachedContentConfig(
            system_instruction="Answer from the book. " * 30, ttl="600s"
        ),
    )
    assert kept.name is not None
    stored = httpx.get(f"{server.url}/v1/cache", params={"limit": 1000}).json()["data"]
    [entry] = [entry for entry in stored if entry["name"] == kept.name]
    assert entry["pinned_until"] > time.time() + 500
    asked = config(cached_content=kept.name)
    reply = sdk.models.generate_content(model="any", contents="Who is it?", config=asked)
    n_prompt, n_cached, _ = counts(reply)
    assert n_cached > 100
    assert n_prompt - n_cached < 30
    sdk.caches.delete(name=kept.name)
    with pytest.raises(errors.ClientError, match="no cached content"):
        sdk.models.generate_content(model="any", contents="Who is it?", config=asked)


def test_the_model_is_listed_with_its_context(sdk: genai.Client) -> None:
    [model] = sdk.models.list()
    assert model.name is not None
    assert model.name.startswith("models/")
    assert model.input_token_limit
    assert sdk.models.get(model=model.name).display_name == model.display_name


def test_a_prompt_beyond_the_context_is_refused_in_googles_words(sdk: genai.Client) -> None:
    with pytest.raises(errors.ClientError, match="input token count") as refusal:
        sdk.models.generate_content(model="any", contents="word " * 20_000)
    assert refusal.value.status == "INVALID_ARGUMENT"
