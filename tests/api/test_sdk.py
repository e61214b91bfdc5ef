"""OpenAI's own client reads what we write."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from rekindle.chat.reply import Candidate, ReplyText, ScoredToken
from rekindle.errors import DecodeFailed, Overloaded, PromptTooLong
from tests.api.fakes import HELLO, FakeResponder, Script, done
from tests.api.http import serving

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]
SCORED: Script = (ReplyText("Hi", (ScoredToken(Candidate(1, "Hi", b"Hi", -0.5), (), 0),)), done())
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
    assert reply.model_extra["rekindle"]["prefilled_tokens"] == 6


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
