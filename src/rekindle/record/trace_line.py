"""One exchange of the proxy as a line of the trace, as `replay` and `lint` read it."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from rekindle.record.redaction import Redaction

MAX_REPLY_BYTES = 4 * 2**20  # of a recorded reply; the client gets all of it; picked
MAX_BODY_BYTES = 64 * 2**20  # of a recorded body, unpacked; picked

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
    return content[:MAX_REPLY_BYTES].decode("utf-8", "replace")


def _unpacked(content: bytes, headers: Headers, max_bytes: int) -> bytes:
    """Return the content without its encoding, such as gzip. Empty: it cannot be unpacked."""
    encoding = [(name, value) for name, value in headers if name == "content-encoding"]
    if not encoding:
        return content
    unpacked = bytearray()
    response = httpx.Response(200, headers=encoding, stream=httpx.ByteStream(content))
    try:
        for piece in response.iter_bytes():
            unpacked += piece
            if len(unpacked) > max_bytes:
                break
    except httpx.DecodingError:
        pass  # a reply that was cut off: what came before counts
    return bytes(unpacked)
