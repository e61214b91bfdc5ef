"""Counts and text in the streams of every wire format, ours and other servers'."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.replay.stream import Counts, ReplyFailed, StreamReader

GOLDEN = Path(__file__).parents[1] / "api" / "golden"


def read(*events: dict[str, Any] | str) -> StreamReader:
    reader = StreamReader()
    for event in events:
        reader.feed(event if isinstance(event, str) else f"data: {json.dumps(event)}")
    return reader


@pytest.mark.parametrize("name", ["messages", "responses_text", "completion_with_usage"])
def test_our_own_streams_report_all_counts(name: str) -> None:
    reader = read(*(GOLDEN / f"{name}.sse").read_text("utf-8").splitlines())
    counts = reader.counts()
    assert reader.has_begun
    assert reader.has_ended
    assert None not in (counts.n_prompt, counts.n_cached, counts.n_prefilled, counts.n_reply)
    assert counts.n_cached == 4
    assert (counts.n_cached or 0) + (counts.n_prefilled or 0) == counts.n_prompt


@pytest.mark.parametrize("name", ["chat_broken", "messages_broken", "responses_broken"])
def test_an_error_in_a_stream_has_the_servers_message(name: str) -> None:
    with pytest.raises(ReplyFailed) as caught:
        read(*(GOLDEN / f"{name}.sse").read_text("utf-8").splitlines())
    assert not caught.value.message.startswith("{")


def test_a_chat_stream_of_openai() -> None:
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    reader = read(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hi"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
        "data: [DONE]",
    )
    assert reader.counts() == Counts(n_prompt=90, n_cached=64, n_prefilled=26, n_reply=3)
    assert (reader.text, reader.is_plain) == ("Hi", True)


def test_a_role_alone_is_no_first_token() -> None:
    assert not read({"choices": [{"delta": {"role": "assistant", "content": None}}]}).has_begun
    assert read({"choices": [{"delta": {"reasoning": "Hm"}}]}).has_begun
    assert read({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}).has_begun


def test_llama_server_counts_in_its_timings() -> None:
    timings = {"cache_n": 7, "prompt_n": 3, "predicted_n": 2}
    reader = read({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": timings})
    assert reader.counts() == Counts(n_prompt=10, n_cached=7, n_prefilled=3, n_reply=2)


def test_without_reported_cached_tokens_they_are_unknown() -> None:
    usage = {"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": None}
    counts = read({"choices": [], "usage": usage}).counts()
    assert (counts.n_prompt, counts.n_cached, counts.n_prefilled) == (90, None, None)


def test_a_stream_of_anthropic_counts_over_its_first_and_last_event() -> None:
    start = {
        "input_tokens": 20,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 10,
        "output_tokens": 1,
    }
    reader = read(
        {"type": "message_start", "message": {"usage": start}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    )
    assert reader.counts() == Counts(n_prompt=90, n_cached=60, n_prefilled=30, n_reply=5)
    assert reader.text == "Hi"


def test_a_stream_of_the_responses_api_counts_at_its_end() -> None:
    usage = {
        "input_tokens": 90,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 3,
    }
    reader = read(
        {"type": "response.created", "response": {"usage": None, "error": None}},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
        {"type": "response.completed", "response": {"usage": usage}},
    )
    assert reader.counts() == Counts(n_prompt=90, n_cached=64, n_prefilled=26, n_reply=3)
    assert (reader.has_begun, reader.has_ended, reader.is_plain) == (True, True, False)
