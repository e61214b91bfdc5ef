"""Streamed replies in Anthropic's events.

A block closes and the next one opens when the kind of output changes. A token costs one JSON
string and a join.
"""

from pydantic_core import to_json

from rekindle.api.anthropic.bodies import (
    BlockStart,
    Ending,
    MessageDelta,
    MessageStart,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from rekindle.api.anthropic.response import (
    SIGNATURE,
    begun,
    diagnostics_of,
    stop_reason_of,
    usage_of,
)
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.cache.views import rekindle_of
from rekindle.api.json import pieces, quoted
from rekindle.api.replies import Envelope
from rekindle.chat.reply.events import (
    ReplyCall,
    ReplyCallArguments,
    ReplyCallBegan,
    ReplyDone,
    ReplyEvent,
    ReplyProgress,
    ReplyReasoning,
    ReplyText,
)

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
END = b"}}\n\n"

Block = ThinkingBlock | TextBlock | ToolUseBlock


class MessageEvents:
    """The frames of one reply.

    `message_start` waits for the first progress event, because clients read there how much of the
    prompt was cached. With diagnostics it waits until the prompt is evaluated.
    """

    def __init__(self, body: MessagesRequest, envelope: Envelope) -> None:
        self._diagnostics = body.diagnostics
        self._envelope = envelope
        self._compares = envelope.wanted[0].options.compare_with is not None
        self._is_started = False
        self._index = -1  # of the newest block
        self._open: type[ReplyText | ReplyReasoning | ReplyCallBegan] | None = None
        self._delta = b""  # the open block's frame up to the text

    def begin(self) -> bytes:
        return b""

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        assert index == 0
        if isinstance(event, ReplyText | ReplyReasoning):
            if type(event) is self._open:
                return self._delta + quoted(event.text) + END
            if not event.text:
                return b""
            frames = self._opened(event)
        elif isinstance(event, ReplyCallArguments):
            return b"".join(self._delta + quoted(piece) + END for piece in pieces(event.json))
        elif isinstance(event, ReplyCallBegan):
            frames = self._opened_call(event)
        elif isinstance(event, ReplyCall):
            return self._closed()
        elif isinstance(event, ReplyDone):
            frames = self._closed() + self._ended(event)
        elif self._compares and event.diagnosis is None:
            return b""
        else:
            frames = b""
        return self._started(event) + frames

    def fail(self, error_body: bytes) -> bytes:
        return b"event: error\ndata: " + error_body + b"\n\n"

    def end(self) -> bytes:
        return STOP

    def _started(self, event: ReplyEvent) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        n_prompt = n_cached = 0
        diagnosis = None
        if isinstance(event, ReplyProgress):
            n_prompt, n_cached = event.n_total, event.n_cached
            diagnosis = event.diagnosis
        elif isinstance(event, ReplyDone):
            n_prompt, n_cached = event.stats.n_prompt, event.stats.n_cached
            diagnosis = event.stats.diagnosis
        message = begun(self._envelope, usage_of(self._envelope, n_prompt, n_cached, 0))
        if self._diagnostics is not None:
            message["diagnostics"] = diagnostics_of(self._diagnostics, diagnosis)
        return _frame(MessageStart(type="message_start", message=message))

    def _opened(self, event: ReplyText | ReplyReasoning) -> bytes:
        closed = self._closed()
        block: Block
        if isinstance(event, ReplyText):
            block, kind = TextBlock(type="text", text=""), b'{"type":"text_delta","text":'
        else:
            block = ThinkingBlock(type="thinking", thinking="", signature="")
            kind = b'{"type":"thinking_delta","thinking":'
        start = self._start(block)
        self._open = type(event)
        self._delta = DELTA % self._index + kind
        return closed + start + self._delta + quoted(event.text) + END

    def _closed(self) -> bytes:
        """Close the open block, if there is one."""
        was_open, self._open = self._open, None
        if was_open is None:
            return b""
        signature = b""
        if was_open is ReplyReasoning:
            delta = b'{"type":"signature_delta","signature":' + quoted(SIGNATURE)
            signature = DELTA % self._index + delta + END
        return signature + self._stop()

    def _opened_call(self, event: ReplyCallBegan) -> bytes:
        closed = self._closed()
        block = ToolUseBlock(type="tool_use", id=event.id, name=event.name, input={})
        start = self._start(block)
        self._open = ReplyCallBegan
        self._delta = DELTA % self._index + b'{"type":"input_json_delta","partial_json":'
        return closed + start

    def _start(self, block: Block) -> bytes:
        self._index += 1
        return _frame(
            BlockStart(type="content_block_start", index=self._index, content_block=block)
        )

    def _stop(self) -> bytes:
        return (
            b"event: content_block_stop\n"
            b'data: {"type":"content_block_stop","index":%d}\n\n' % self._index
        )

    def _ended(self, event: ReplyDone) -> bytes:
        stats = event.stats
        usage = usage_of(self._envelope, stats.n_prompt, stats.n_cached, stats.n_generated)
        return _frame(
            MessageDelta(
                type="message_delta",
                delta=Ending(stop_reason=stop_reason_of(event), stop_sequence=event.stop_sequence),
                usage=usage,
                rekindle=rekindle_of([stats]),
            )
        )


def _frame(data: MessageStart | BlockStart | MessageDelta) -> bytes:
    name = data["type"].encode()
    return b"event: " + name + b"\ndata: " + to_json(data, ensure_ascii=True) + b"\n\n"
