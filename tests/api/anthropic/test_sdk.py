"""Anthropic's own client reads what we write."""

from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam, TextBlock, ThinkingBlock, ToolParam, ToolUseBlock

from rekindle.chat.reply.events import (
    FinishReason,
    ReplyProgress,
    ReplyReasoning,
    ReplyText,
)
from rekindle.errors import DecodeFailed, Overloaded, PromptTooLong
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, Script, calling, done
from tests.api.openai.test_sdk import ARGUMENTS, Replay

MESSAGES: list[MessageParam] = [{"role": "user", "content": "hi"}]
TOOLS: list[ToolParam] = [
    {"name": name, "input_schema": {"type": "object", "properties": {}}}
    for name in ("write", "now")
]
EVALUATED = ReplyProgress(10, 10, 4, 0.5)
CALLING: Script = (
    EVALUATED,
    ReplyReasoning("Let me"),
    ReplyReasoning(" see."),
    ReplyText("Writ"),
    ReplyText("ing."),
    *calling(0, "call_1", "write", ARGUMENTS),
    *calling(1, "call_2", "now", "{}"),
    done(finish=FinishReason.TOOL_CALLS),
)


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay()


@pytest.fixture(scope="module")
def client(replay: Replay) -> Iterator[anthropic.Anthropic]:
    with (
        serving(FakeResponder(lambda _: replay.script)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def test_whole_reply(client: anthropic.Anthropic, replay: Replay) -> None:
    replay.script = CALLING
    reply = client.messages.create(model="any", max_tokens=9, messages=MESSAGES, tools=TOOLS)
    check_calling(reply)
    assert reply.model_extra is not None
    assert reply.model_extra["rekindle"]["prefilled"] == 6


def test_stream_adds_up_in_the_sdks_own_hands(client: anthropic.Anthropic, replay: Replay) -> None:
    replay.script = CALLING
    with client.messages.stream(
        model="any", max_tokens=9, messages=MESSAGES, tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        check_calling(stream.get_final_message())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_usage_is_whole_at_the_start_and_at_the_end(
    client: anthropic.Anthropic, replay: Replay
) -> None:
    replay.script = (EVALUATED, *HELLO)
    stream = client.messages.create(model="any", max_tokens=9, messages=MESSAGES, stream=True)
    events = list(stream)
    first, last = events[0], events[-2]
    assert first.type == "message_start"
    assert last.type == "message_delta"
    for usage in (first.message.usage, last.usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (6, 4)
    assert last.usage.output_tokens == 2


def test_beta_client(client: anthropic.Anthropic, replay: Replay) -> None:
    replay.script = (EVALUATED, *HELLO)
    with client.beta.messages.stream(
        model="any",
        max_tokens=9,
        messages=[{"role": "user", "content": "hi"}],
        betas=["interleaved-thinking-2025-05-14"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        assert "".join(stream.text_stream) == "Hello"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="any", messages=MESSAGES).input_tokens == 8


def test_failure_in_a_stream_is_raised(client: anthropic.Anthropic, replay: Replay) -> None:
    replay.script = (EVALUATED, ReplyText("a"), DecodeFailed("llama.cpp ran out of memory."))
    stream = client.messages.create(model="any", max_tokens=9, messages=MESSAGES, stream=True)
    with pytest.raises(anthropic.APIError, match="ran out of memory"):
        list(stream)


def test_refusals_have_their_own_exceptions(client: anthropic.Anthropic, replay: Replay) -> None:
    replay.script = (Overloaded("Full.", retry_after_seconds=1),)
    with pytest.raises(anthropic.APIStatusError) as refusal:
        client.messages.create(model="any", max_tokens=9, messages=MESSAGES)
    assert refusal.value.status_code == 529
    replay.script = (PromptTooLong(n_prompt=600, n_ctx=512),)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as refused:
        client.messages.create(model="any", max_tokens=9, messages=MESSAGES)
    assert refused.value.request_id


def check_calling(reply: anthropic.types.Message) -> None:
    thinking, text, write, now = reply.content
    assert isinstance(thinking, ThinkingBlock)
    assert (thinking.thinking, bool(thinking.signature)) == ("Let me see.", True)
    assert isinstance(text, TextBlock)
    assert text.text == "Writing."
    assert isinstance(write, ToolUseBlock)
    assert (write.id, write.name) == ("call_1", "write")
    assert write.input == {"text": "caf\u00e9 \U0001f600\u2028" * 1000, "n": 1}
    assert isinstance(now, ToolUseBlock)
    assert now.input == {}
    assert (reply.stop_reason, reply.usage.output_tokens) == ("tool_use", 2)
    assert reply.usage.cache_read_input_tokens == 4
    assert reply.usage.input_tokens == 6
