"""Streamed replies as Ollama's JSON lines.

The head and tail of a line are made once per reply. A token costs one JSON string and a join.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import to_json

from rekindle.api.json import quoted
from rekindle.api.ollama.bodies import OllamaReplyMessage
from rekindle.api.ollama.response import (
    call_body,
    context_of,
    ending_of,
    shows_context,
    time_text,
)
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from rekindle.api.openai.response import chat_logprobs
from rekindle.api.replies import Envelope
from rekindle.chat.reply.events import (
    ReplyCall,
    ReplyDone,
    ReplyEvent,
    ReplyProgress,
    ReplyReasoning,
    ReplyText,
    ScoredToken,
)

MEDIA_TYPE = "application/x-ndjson"
# A client parses each line. White space before an object is valid JSON, an empty line is not.
KEEP_ALIVE = b" "
UNFINISHED = b',"done":false}\n'


@dataclass(frozen=True, slots=True)
class LineShape:
    """The difference between the two endpoints: how a line holds its text."""

    text_head: bytes
    reasoning_head: bytes
    tail: bytes


CHAT = LineShape(
    text_head=b',"message":{"role":"assistant","content":',
    reasoning_head=b',"message":{"role":"assistant","content":"","thinking":',
    tail=b"}",
)
GENERATE = LineShape(
    text_head=b',"response":', reasoning_head=b',"response":"","thinking":', tail=b""
)


class ReplyLines:
    """The lines of one reply."""

    def __init__(self, shape: LineShape, envelope: Envelope, *, shows_context: bool) -> None:
        self._shape = shape
        self._envelope = envelope
        self._shows_context = shows_context
        constant = {"model": envelope.model, "created_at": time_text(envelope.created)}
        self._head = to_json(constant, ensure_ascii=True)[:-1]
        self._text_head = self._head + shape.text_head
        self._reasoning_head = self._head + shape.reasoning_head
        self._tail = shape.tail + UNFINISHED
        self._scored: list[ScoredToken] = []  # of a call that is not whole

    def begin(self) -> bytes:
        return b""

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        assert index == 0
        if isinstance(event, ReplyText):
            return self._text(self._text_head, event)
        if isinstance(event, ReplyReasoning):
            return self._text(self._reasoning_head, event)
        if isinstance(event, ReplyProgress):
            return b""
        if isinstance(event, ReplyDone):
            return self._last(event)
        self._scored += event.scored
        return self._call(event) if isinstance(event, ReplyCall) else b""

    def fail(self, error_body: bytes) -> bytes:
        return error_body + b"\n"

    def end(self) -> bytes:
        return b""

    def _text(self, head: bytes, event: ReplyText | ReplyReasoning) -> bytes:
        if event.scored:
            return (
                head + quoted(event.text) + self._shape.tail + _logprobs(event.scored) + UNFINISHED
            )
        return head + quoted(event.text) + self._tail

    def _call(self, event: ReplyCall) -> bytes:
        message = OllamaReplyMessage(role="assistant", content="", tool_calls=[call_body(event)])
        logprobs = _logprobs(self._scored) if self._scored else b""
        self._scored = []
        encoded = to_json(message, ensure_ascii=True)
        return self._head + b',"message":' + encoded + logprobs + UNFINISHED

    def _last(self, event: ReplyDone) -> bytes:
        ending = to_json(ending_of(self._envelope, event), ensure_ascii=True)
        context = b""
        if self._shows_context:
            context = b',"context":' + to_json(context_of(self._envelope, event))
        return (
            self._text_head
            + b'""'
            + self._shape.tail
            + b',"done":true,'
            + ending[1:-1]
            + context
            + b"}\n"
        )


def chat_lines(_: OllamaChatRequest, envelope: Envelope) -> ReplyLines:
    return ReplyLines(CHAT, envelope, shows_context=False)


def generate_lines(body: OllamaGenerateRequest, envelope: Envelope) -> ReplyLines:
    return ReplyLines(GENERATE, envelope, shows_context=shows_context(body))


def _logprobs(scored: Sequence[ScoredToken]) -> bytes:
    return b',"logprobs":' + to_json(chat_logprobs(scored)["content"], ensure_ascii=True)
