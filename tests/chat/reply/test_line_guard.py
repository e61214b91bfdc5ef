"""Limits that end a reply at a line, for editors."""

import asyncio
import time

import pytest

from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import FinishReason, LineLimits, ReplyDone, ReplyText
from rekindle.chat.reply.line_guard import LineGuard
from rekindle.generation.events import Finished, PromptEvaluated, StopCause, TokenSampled
from tests.chat.test_responder import ByteTokenizer, ScriptedStream
from tests.support.chat import reply_stream


def shown(n_indent: int, *pieces: str) -> tuple[str, bool]:
    guard = LineGuard(LineLimits(n_indent=n_indent))
    text = ""
    for piece in pieces:
        text += guard.feed(piece)
        if guard.is_over:
            break
    return text, guard.is_over


@pytest.mark.parametrize(
    ("pieces", "text", "is_over"),
    [
        (("a\n  b\n  c",), "a\n  b\n  c", False),
        (("a\n  b\nc",), "a\n  b\n", True),
        (("a\n", " ", " ", "b\n", " ", "c"), "a\n  b\n ", True),
        (("a\n\tb",), "a\n\t", True),
        (("  a\n\n  b",), "  a\n", True),
        (("no line", " of its own"), "no line of its own", False),
        (("a\n    \n  b",), "a\n    \n  b", False),
    ],
)
def test_a_line_with_too_little_indentation_ends_the_reply(
    pieces: tuple[str, ...], text: str, *, is_over: bool
) -> None:
    assert shown(2, *pieces) == (text, is_over)


def test_after_the_time_limit_the_next_line_break_ends_the_reply() -> None:
    guard = LineGuard(LineLimits(seconds=0.005))
    assert guard.feed("a\nb") == "a\nb"
    assert not guard.is_over
    time.sleep(0.01)
    assert guard.feed("c") == "c"
    assert not guard.is_over
    assert guard.feed("d\ne") == "d\ne"
    assert guard.is_over


def test_a_reply_that_a_line_ends_has_reached_a_limit_and_shows_its_tokens() -> None:
    sampled = [TokenSampled(token) for token in b"a\n  b\nc never read"]
    stream = ScriptedStream(
        [PromptEvaluated(1, 0, 0.0, 0.0), *sampled, Finished(StopCause.END_OF_TURN)]
    )

    async def run() -> list[object]:
        reply = reply_stream(
            Prompt((1,), (), "x"),
            stream,
            ByteTokenizer(),
            line_limits=LineLimits(n_indent=2),
            shows_tokens=True,
        )
        return [event async for event in reply]

    events = asyncio.run(run())
    texts = [event for event in events if isinstance(event, ReplyText)]
    assert "".join(each.text for each in texts) == "a\n  b\n"
    assert bytes(token for each in texts for token in each.tokens) == b"a\n  b\n"
    done = events[-1]
    assert isinstance(done, ReplyDone)
    assert done.finish is FinishReason.LENGTH
    assert stream.cancelled
    assert stream.n_taken == 8
