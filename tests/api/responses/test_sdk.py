"""OpenAI's own client reads our responses, and helps itself to those that are stored."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import (
    FunctionToolParam,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel

from rekindle.chat.reply.events import FinishReason, ReplyText
from rekindle.errors import Overloaded, PromptTooLong
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, done
from tests.api.openai.test_sdk import ARGUMENTS, BROKEN, CALLING, Replay

TOOLS: list[FunctionToolParam] = [
    {
        "type": "function",
        "name": name,
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    for name in ("write", "now")
]


class Point(BaseModel):
    x: int


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


def test_reasoning_text_and_calls(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = CALLING
    reply = client.responses.create(model="any", input="hi", tools=TOOLS)
    thought, message, first, second = reply.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert thought.content[0].text == "Let me see."
    assert isinstance(message, ResponseOutputMessage)
    assert reply.output_text == "Writing."
    assert isinstance(first, ResponseFunctionToolCall)
    assert (first.call_id, first.name, first.arguments) == ("call_1", "write", ARGUMENTS)
    assert isinstance(second, ResponseFunctionToolCall)
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.model_extra is not None
    assert reply.model_extra["rekindle"]["prefilled"] == 6


def test_a_stream_adds_up_in_the_sdks_own_hands(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = CALLING
    with client.responses.stream(model="any", input="hi", tools=TOOLS) as stream:
        events = list(stream)
        reply = stream.get_final_response()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    snapshots = [
        event.snapshot for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert (texts, thoughts) == (["Writing."], ["Let me", " see."])
    assert snapshots[-2:] == [ARGUMENTS, "{}"]
    assert reply.output_text == "Writing."
    assert [item.type for item in reply.output] == ["reasoning", "message"] + ["function_call"] * 2
    assert reply.usage is not None
    assert reply.usage.output_tokens == 2


def test_structured_output_is_parsed(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = (ReplyText('{"x":'), ReplyText("1}"), done())
    reply = client.responses.parse(model="any", input="hi", text_format=Point)
    assert reply.output_parsed == Point(x=1)


def test_stored_responses(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = HELLO
    first = client.responses.create(model="any", input="hi")
    second = client.responses.create(model="any", input="more", previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError) as refusal:
        client.responses.create(model="any", input="a", previous_response_id=second.id)
    assert refusal.value.code == "previous_response_not_found"


def test_cut_reply(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = (ReplyText("Hel"), done(finish=FinishReason.LENGTH))
    events = list(client.responses.create(model="any", input="hi", stream=True))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_failures_have_their_own_exceptions(client: openai.OpenAI, replay: Replay) -> None:
    replay.script = BROKEN
    with pytest.raises(openai.APIError, match="ran out of memory"):
        list(client.responses.create(model="any", input="hi", stream=True))
    replay.script = (Overloaded("Full.", retry_after_seconds=1),)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="any", input="hi")
    replay.script = (PromptTooLong(n_prompt=600, n_ctx=512),)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model="any", input="hi")
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError, match="maximum context length is 512 tokens"):
        list(client.responses.create(model="any", input="hi", stream=True))
