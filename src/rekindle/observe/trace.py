"""`--trace FILE`: one line of JSON per reply, written in the background.

No reply waits for the disk. When too many lines wait for it, new lines are dropped and counted.
"""

import itertools
import json
import os
import stat
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.errors import StartupError
from rekindle.observe.request_record import RequestRecord
from rekindle.write_behind import WriteBehind

MAX_WAITING_BYTES = 64 * 2**20  # of unwritten lines; picked
LINE_BYTES = 4096  # upper estimate for a line without its prompt and its body
CLOSE_SECONDS = 5.0  # to write the waiting lines; picked
PRIVATE = 0o600


@dataclass(slots=True)
class Sent:
    """A request as the client sent it. Recorders read it when a reply ends."""

    path: str
    traceparent: str = ""
    body: bytearray = field(default_factory=bytearray)

    def take_body(self) -> bytearray:
        """Return the body, once: the first reply that ends takes it."""
        body, self.body = self.body, bytearray()
        return body


sent_request: ContextVar[Sent | None] = ContextVar("sent_request", default=None)


class SentRequests:
    """Middleware that sets `sent_request`. Copies the body only if `keeps_bodies`."""

    def __init__(self, app: ASGIApp, *, keeps_bodies: bool) -> None:
        self._app = app
        self._keeps_bodies = keeps_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        sent = Sent(scope["path"], headers.get(b"traceparent", b"").decode("latin-1"))

        async def receive_and_keep() -> Message:
            message = await receive()
            sent.body += message.get("body", b"")
            return message

        sent_request.set(sent)
        await self._app(scope, receive_and_keep if self._keeps_bodies else receive, send)


@dataclass(frozen=True, slots=True)
class _Line:
    record: RequestRecord
    path: str | None
    body: bytes | bytearray

    @property
    def n_bytes(self) -> int:
        return LINE_BYTES + len(self.body) + len(self.record.prompt_text)


class Trace:
    """A recorder that writes the trace. Raises StartupError if the file cannot be written."""

    def __init__(self, path: Path, *, max_bytes: int, has_prompts: bool) -> None:
        self._file = _TraceFile(path, max_bytes)
        self._has_prompts = has_prompts
        self._line_numbers = itertools.count()
        self.n_written = 0
        self.n_dropped = 0
        self._writer: WriteBehind[int, _Line] = WriteBehind(
            "trace",
            self._write,
            retry_seconds=None,
            max_batch=1,
            size_of=lambda line: line.n_bytes,
            on_dropped=self._count_dropped,
        )

    def observe(self, record: RequestRecord) -> None:
        sent = sent_request.get()
        body = sent.take_body() if sent else b""
        line = _Line(record, sent.path if sent else None, body)
        n_waiting_bytes = self._writer.n_bytes
        if n_waiting_bytes and n_waiting_bytes + line.n_bytes > MAX_WAITING_BYTES:
            self.n_dropped += 1
        else:
            self._writer.put(next(self._line_numbers), line)

    def counts(self) -> tuple[int, int]:
        return self.n_written, self.n_dropped

    def close(self) -> None:
        """Write the waiting lines, for at most CLOSE_SECONDS. May be called again."""
        if self._writer.close(CLOSE_SECONDS):
            self._file.close()

    def _write(self, batch: dict[int, _Line]) -> None:
        for line in batch.values():
            data = encode(line.record, line.path, line.body, has_prompt=self._has_prompts)
            self._file.write(data)
            self.n_written += 1

    def _count_dropped(self, _line_number: int) -> None:
        self.n_dropped += 1


class _TraceFile:
    """Appends whole lines. A full file is renamed to FILE.1, and a new one begins."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._n_bytes = 0
        self._can_rotate = False
        self._is_torn = False  # the last line has no line break
        try:
            self._open()
        except OSError as error:
            raise StartupError(f"The trace {path} cannot be written: {error.strerror}.") from error

    def write(self, line: bytes) -> None:
        if self._can_rotate and self._n_bytes and self._n_bytes + len(line) > self._max_bytes:
            self._rotate()
        data = memoryview(b"\n" + line if self._is_torn else line)
        while data:
            n_written = os.write(self._fd, data)
            self._n_bytes += n_written
            data = data[n_written:]
            self._is_torn = bool(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _rotate(self) -> None:
        full = self._fd
        with suppress(FileNotFoundError):  # deleted meanwhile
            os.replace(self._path, f"{self._path}.1")
        self._open()
        os.close(full)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        self._is_torn = False
        found = os.fstat(self._fd)
        self._n_bytes = found.st_size
        self._can_rotate = stat.S_ISREG(found.st_mode)
        if not self._can_rotate:
            return
        self._path.chmod(PRIVATE)  # an existing file may be readable by others
        if self._n_bytes:
            os.lseek(self._fd, -1, os.SEEK_END)
            self._is_torn = os.read(self._fd, 1) != b"\n"


def encode(
    record: RequestRecord, path: str | None, body: bytes | bytearray, *, has_prompt: bool
) -> bytes:
    """Return the line of a reply. `body` is the JSON that the client sent, or empty."""
    content = _content(record, path)
    if has_prompt:
        content["prompt"] = record.prompt_text
    line = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    if body:
        # In JSON a line break is white space; strings cannot contain one.
        one_line = body.replace(b"\n", b" ").replace(b"\r", b" ")
        line = line[:-1] + b',"body":' + one_line + b"}"
    return line + b"\n"


def _content(record: RequestRecord, path: str | None) -> dict[str, Any]:
    return {
        "t": round(record.started_at, 6),
        "t_end": round(record.started_at + record.total_seconds, 6),
        "id": record.id,
        "path": path,
        "model": record.model,
        "session": record.session,
        "class": record.rank.name.lower(),
        "namespace": record.namespace,  # a digest
        "finish": record.finish,
        "prompt_tokens": record.n_prompt,
        "cached_tokens": record.n_cached,
        "prefilled_tokens": record.n_prefilled,
        "prefilled_twice_tokens": record.n_recomputed,
        "generated_tokens": record.n_generated,
        "drafts": [
            {"source": source.value, "tokens": count.n_tokens, "accepted": count.n_accepted}
            for source, count in record.drafts.by_source().items()
        ],
        "sources": [
            {"source": span.source.value, "start": span.start, "stop": span.stop}
            for span in record.spans
        ],
        "remembered_turns": record.n_remembered_turns,
        "dropped_messages": record.n_dropped_messages,
        "media_omitted": record.n_media_omitted,
        "miss": asdict(record.miss) if record.miss else None,
        "ms": {
            "render": _ms(record.build_seconds),
            "queue": _ms(record.queue_seconds),
            "restore": _ms(record.restore_seconds),
            "prefill": _ms(record.prefill_seconds),
            "first_token": _ms(record.first_token_seconds),
            "decode": _ms(record.decode_seconds),
            "total": _ms(record.total_seconds),
        },
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
