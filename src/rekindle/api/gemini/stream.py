"""Streamed replies in Gemini's chunks: server-sent events, or the items of one JSON array.

A call is sent whole, because Gemini has no parts of calls. A token costs one JSON string and a
join.
"""

from dataclasses import dataclass

from pydantic_core import to_json

from rekindle.api.cache.views import rekindle_of
from rekindle.api.gemini.response import (
    FINISH,
    call_part,
    logprobs_of,
    usage_of,
)
from rekindle.api.http.usage_window import scaled
from rekindle.api.json import quoted
from rekindle.api.replies import Envelope
from rekindle.chat.reply.events import (
    ReplyCall,
    ReplyDone,
    ReplyEvent,
    ReplyProgress,
    ReplyReasoning,
    ReplyStats,
    ReplyText,
    ScoredToken,
)

# Google's SDK for Python takes a comment for data, and the one for JavaScript stops at it.
KEEP_ALIVE = b"\n"
NO_TEXT = b'{"text":""}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """The bytes around the chunks of a stream."""

    begin: bytes
    head: bytes  # of each chunk
    between: bytes  # chunks
    tail: bytes  # of each chunk
    end: bytes


EVENTS = Framing(begin=b"", head=b"data: ", between=b"", tail=b"\n\n", end=b"")
ARRAY = Framing(begin=b"[", head=b"", between=b",\r\n", tail=b"", end=b"]")


class ContentChunks:
    """The chunks of one request. The last one has the finish reason and the usage."""

    def __init__(self, framing: Framing, envelope: Envelope, *, thinks: bool) -> None:
        self._framing = framing
        self._thinks = thinks  # thoughts are shown
        n_replies = len(envelope.wanted)
        self._stats: list[ReplyStats | None] = [None] * n_replies
        # Scores of tokens that no chunk has shown: thoughts, and parts of a call.
        self._scored: list[list[ScoredToken]] = [[] for _ in range(n_replies)]
        self._is_first = True
        self._usage_scale = envelope.usage_scale
        self._names = (
            b',"modelVersion":' + quoted(envelope.model) + b',"responseId":' + quoted(envelope.id)
        )

    def begin(self) -> bytes:
        return self._framing.begin

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        if isinstance(event, ReplyProgress):
            return b""
        if isinstance(event, ReplyDone):
            return self._ended(index, event)
        self._scored[index] += event.scored
        if isinstance(event, ReplyText):
            return self._chunk(index, b'{"text":' + quoted(event.text) + b"}")
        if isinstance(event, ReplyReasoning) and self._thinks:
            return self._chunk(index, b'{"text":' + quoted(event.text) + b',"thought":true}')
        if isinstance(event, ReplyCall):
            return self._chunk(index, to_json(call_part(event), ensure_ascii=True))
        return b""

    def fail(self, error_body: bytes) -> bytes:
        """Google's SDKs raise an error that stands alone, not one in an event."""
        framing = self._framing
        between = b"" if self._is_first else framing.between
        return between + error_body + framing.tail + framing.end

    def end(self) -> bytes:
        return self._framing.end

    def _chunk(self, index: int, part: bytes, finish: bytes = b"", last: bytes = b"") -> bytes:
        scored, self._scored[index] = self._scored[index], []
        logprobs = b""
        if scored:
            logprobs = b',"logprobsResult":' + to_json(logprobs_of(scored), ensure_ascii=True)
        between = b"" if self._is_first else self._framing.between
        self._is_first = False
        return b"".join(
            (
                between,
                self._framing.head,
                b'{"candidates":[{"content":{"parts":[',
                part,
                b'],"role":"model"}',
                finish,
                b',"index":%d' % index,
                logprobs,
                b"}]",
                self._names,
                last,
                b"}",
                self._framing.tail,
            )
        )

    def _ended(self, index: int, event: ReplyDone) -> bytes:
        self._stats[index] = event.stats
        finish = b',"finishReason":"' + FINISH[event.finish].encode() + b'"'
        stats = [each for each in self._stats if each is not None]
        last = b""
        if len(stats) == len(self._stats):
            usage = to_json(scaled(usage_of(stats), self._usage_scale))
            last = b',"usageMetadata":' + usage + b',"rekindle":' + to_json(rekindle_of(stats))
        return self._chunk(index, NO_TEXT, finish, last)
