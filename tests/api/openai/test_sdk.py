"""OpenAI's own client reads what we write."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionToolParam,
    ChatCompletionUserMessageParam,
    ParsedChoice,
)
from openai.types.chat.chat_completion import Choice

from rekindle.chat.reply.events import (
    FinishReason,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
    TopToken,
)
from rekindle.errors import DecodeFailed, Overloaded, PromptTooLong
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, Script, calling, done

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]
SCORED: Script = (ReplyText("Hi", (ScoredToken(TopToken(1, "Hi", b"Hi", -0.5), (), 0),)), done())
ARGUMENTS = '{"text": "%s", "n":  1}' % ("caf\u00e9 \U0001f600\u2028" * 1000)
CALLING: Script = (
    ReplyReasoning("Let me", (ScoredToken(TopToken(1, "Let me", b"Let me", -0.5), (), 0),)),
    ReplyReasoning(" see."),
    ReplyText("Writing."),
    *calling(
        0, "call_1", "write", ARGUMENTS, scored=(ScoredToken(TopToken(2, "{", b"{", -1.5), (), 0),)
    ),
    *calling(1, "call_2", "now", "{}"),
    done(finish=FinishReason.TOOL_CALLS),
)
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,  # makes the SDK parse arguments while they come
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    }
    for name in ("write", "now")
]
BROKEN: Script = (ReplyText("a"), DecodeFailed("llama.cpp ran out of memory."))


class Replay:
    """One server for the module; each test sets what it says next."""

    script: Script = HELLO


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


@pytest.fixture(scope="module")
def client(replay: Replay) -> Iterator[openai.OpenAI]:
    with (
        serving(FakeResponder(lambda _: replay.script)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_chat_with_logprobs(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = SCORED
    reply = client.chat.completions.create(model="any", messages=MESSAGES, logprobs=True)
    choice = reply.choices[0]
    assert choice.message.content == "Hi"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].logprob == -0.5
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert reply.model_extra is not None
    assert reply.model_extra["rekindle"]["prefilled"] == 6


def test_streamed_chat_with_usage(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = HELLO
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_calls_and_reasoning(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = CALLING
    reply = client.chat.completions.create(
        model="any", messages=MESSAGES, tools=TOOLS, logprobs=True, n=2
    )
    assert len(reply.choices) == 2
    for choice in reply.choices:
        check_calling(choice)
        assert choice.message.content == "Writing."


def test_streamed_calls_add_up_in_the_sdks_own_hands(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = CALLING
    with client.chat.completions.stream(
        model="any",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="auto",
        logprobs=True,
        n=2,
        stream_options={"include_usage": True},
    ) as stream:
        finished = [
            (event.index, event.name, event.arguments)
            for event in stream
            if event.type == "tool_calls.function.arguments.done"
        ]
        reply = stream.get_final_completion()
    assert sorted(finished) == [(0, "write", ARGUMENTS)] * 2 + [(1, "now", "{}")] * 2
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4
    assert len(reply.choices) == 2
    for choice in reply.choices:
        check_calling(choice)
        assert choice.message.content == "Writing."


def test_stream_of_a_call_alone_has_no_text(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = (*calling(0, "call_1", "now", "{}"), done(finish=FinishReason.TOOL_CALLS))
    whole = client.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS)
    assert whole.choices[0].message.content is None
    with client.chat.completions.stream(model="any", messages=MESSAGES, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert not message.content
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {}


def check_calling(choice: Choice | ParsedChoice[None]) -> None:
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Let me see."
    assert choice.message.tool_calls is not None
    calls = []
    for call in choice.message.tool_calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        calls.append((call.id, call.type, call.function.name, call.function.arguments))
    assert calls == [
        ("call_1", "function", "write", ARGUMENTS),
        ("call_2", "function", "now", "{}"),
    ]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["Let me", "{"]


def test_completion_streamed_and_whole(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = HELLO
    whole = client.completions.create(model="any", prompt="a", echo=True)
    assert whole.choices[0].text == "aHello"
    stream = client.completions.create(model="any", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "rekindle"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_failure_in_a_stream_is_raised(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = BROKEN
    stream = client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="ran out of memory"):
        list(stream)


def test_refusals_have_their_own_exceptions(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = (Overloaded("Full.", retry_after_seconds=1),)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="any", messages=MESSAGES)
    replay.script = (PromptTooLong(n_prompt=600, n_ctx=512),)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="any", messages=MESSAGES)
    assert refusal.value.code == "context_length_exceeded"
