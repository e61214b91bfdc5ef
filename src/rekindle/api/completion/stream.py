"""Streamed replies in llama-server's own events.

The head of a frame is made once per reply. A token costs one JSON string and a join.
"""

import time

from pydantic_core import to_json

from rekindle.api.completion.response import chances_of, last_entry, selected, slot_of
from rekindle.api.completion.schema import NativeFields
from rekindle.api.json import quoted
from rekindle.api.openai.bodies import PromptProgress, Timings
from rekindle.api.openai.response import timings_from
from rekindle.api.replies import Envelope
from rekindle.chat.reply.events import ReplyDone, ReplyEvent, ReplyProgress, ReplyText

END = b"}\n\n"


class _StreamedReply:
    """A reply while it is streamed."""

    def __init__(self, index: int, slot: int, n_prompt: int) -> None:
        self.head = b'data: {"index":%d,"content":' % index
        self.tail = b'],"stop":false,"id_slot":%d,"tokens_evaluated":%d,"tokens_predicted":' % (
            slot,
            n_prompt,
        )
        self.n_predicted = 0
        self.has_new_line = False
        self.progress = ReplyProgress(0, n_prompt, 0, 0.0)  # the last report
        self.first_at = 0.0  # time of the first text

    def frame(self, text: str, tokens: tuple[int, ...], extra: bytes = b"") -> bytes:
        listed = ",".join(map(str, tokens)).encode()
        count = b"%d" % self.n_predicted
        return b"".join(
            (self.head, quoted(text), b',"tokens":[', listed, self.tail, count, extra, END)
        )

    def timings(self) -> Timings:
        progress = self.progress
        return timings_from(
            n_cached=progress.n_cached,
            n_prefilled=progress.n_total - progress.n_cached,
            prefill_seconds=progress.elapsed_seconds,
            n_generated=self.n_predicted,
            decode_seconds=time.monotonic() - self.first_at,
        )


class NativeEvents:
    """The frames of one request."""

    def __init__(self, body: NativeFields, envelope: Envelope) -> None:
        self._body = body
        self._envelope = envelope
        self._shows_progress = body.return_progress is True
        self._shows_timings = body.timings_per_token is True
        self._running = [
            _StreamedReply(index, slot_of(body), len(each.prompt.tokens))
            for index, each in enumerate(envelope.wanted)
        ]

    def begin(self) -> bytes:
        return b""

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        running = self._running[index]
        if isinstance(event, ReplyText):
            return self._text(running, event)
        if isinstance(event, ReplyDone):
            return self._last(index, event)
        if isinstance(event, ReplyProgress):
            running.progress = event
            return _progress(running, event) if self._shows_progress else b""
        return b""  # raw text has neither reasoning nor calls

    def fail(self, error_body: bytes) -> bytes:
        return b"data: " + error_body + b"\n\n"

    def end(self) -> bytes:
        return b""  # llama-server ends these streams without a mark

    def _text(self, running: _StreamedReply, event: ReplyText) -> bytes:
        if not running.n_predicted:
            running.first_at = time.monotonic()
        running.n_predicted += len(event.tokens)
        running.has_new_line |= "\n" in event.text
        extra = b""
        if self._shows_timings:
            extra += b',"timings":' + to_json(running.timings())
        if event.scored:
            chances = chances_of(event.scored, self._body)
            extra += b',"completion_probabilities":' + to_json(chances, ensure_ascii=True)
        return running.frame(event.text, event.tokens, extra)

    def _last(self, index: int, event: ReplyDone) -> bytes:
        entry = last_entry(
            self._body,
            self._envelope,
            index,
            event,
            content="",
            tokens=(),
            has_new_line=self._running[index].has_new_line,
        )
        return b"data: " + to_json(selected(entry, self._body), ensure_ascii=True) + b"\n\n"


def _progress(running: _StreamedReply, event: ReplyProgress) -> bytes:
    progress = PromptProgress(
        total=event.n_total,
        cache=event.n_cached,
        processed=event.n_done,
        time_ms=round(event.elapsed_seconds * 1e3),
    )
    return running.frame("", (), b',"prompt_progress":' + to_json(progress))
