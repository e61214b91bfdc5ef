"""One exchange of the proxy as a line of the trace, as `replay` and `lint` read it."""

import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from rekindle.record.redaction import Redaction

MAX_REPLY_BYTES = 4 * 2**20  # of a recorded reply; the client gets all of it; picked
MAX_BODY_BYTES = 64 * 2**20  # of a recorded body, unpacked; picked
# Formats of `zlib` by the name of the encoding. Some servers send `deflate` without its header.
_GZIP = (zlib.MAX_WBITS + 16,)
_WINDOW_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS)}

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Exchanged:
    """A request and its reply. Times are seconds since the epoch."""

    seq: int
    method: str
    path: str
    query: str
    headers: Headers  # lower-case names
    body: bytes
    started: float
    status: int | None = None  # None: the upstream was not reached
    reply_headers: Headers = field(default_factory=list)
    reply: bytearray = field(default_factory=bytearray)  # as sent, so maybe packed
    first_byte: float | None = None
    ended: float | None = None  # None: the reply was cut off


def line_of(exchanged: Exchanged, redaction: Redaction) -> bytes:
    """Return the line with its line break. Keys of the request are learned first."""
    redaction.learn(dict(exchanged.headers), exchanged.query)
    record = {
        "client": _client(exchanged, redaction),
        "seq": exchanged.seq,
        "t": exchanged.started,
        "t_first": exchanged.first_byte,
        "t_end": exchanged.ended,
        "method": exchanged.method,
        "path": redaction.path(exchanged.path, exchanged.query),
        "headers": redaction.headers(exchanged.headers),
        "body": _body(exchanged, redaction),
        "reply": {
            "status": exchanged.status,
            "content_type": dict(exchanged.reply_headers).get("content-type"),
            "text": redaction.text(_reply_text(exchanged)),
        },
    }
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _client(exchanged: Exchanged, redaction: Redaction) -> str:
    """Return the program's name, from the `User-Agent`."""
    agent = dict(exchanged.headers).get("user-agent", "").split("/")[0].split(" ")[0]
    return redaction.text(agent) or "client"


def _body(exchanged: Exchanged, redaction: Redaction) -> Any:
    """Return the JSON of the body. None: it is empty, or not JSON."""
    content = _unpacked(exchanged.body, exchanged.headers, MAX_BODY_BYTES)
    try:
        return redaction.value(json.loads(content))
    except (ValueError, RecursionError):
        return None


def _reply_text(exchanged: Exchanged) -> str:
    content = _unpacked(bytes(exchanged.reply), exchanged.reply_headers, MAX_REPLY_BYTES)
    return content.decode("utf-8", "replace")


def _unpacked(content: bytes, headers: Headers, max_bytes: int) -> bytes:
    """Return up to `max_bytes` without their encoding, such as gzip. Empty: it is unknown."""
    named = ",".join(value for name, value in headers if name == "content-encoding")
    encodings = [each.strip().lower() for each in named.split(",")]
    for encoding in reversed(encodings):
        if encoding in ("", "identity"):
            continue
        if encoding not in _WINDOW_BITS:
            return b""
        content = _inflated(content, _WINDOW_BITS[encoding], max_bytes)
    return content


def _inflated(content: bytes, choices: tuple[int, ...], max_bytes: int) -> bytes:
    """Unpack with the first choice that fits. Of a reply that was cut off, the rest is missing."""
    for window_bits in choices:
        try:
            return zlib.decompressobj(window_bits).decompress(content, max_bytes)
        except zlib.error:
            continue
    return b""
