"""HTTP by hand: requests that no client library sends."""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

WAIT_SECONDS = 60  # a machine under load; nothing is measured here


@dataclass(frozen=True, slots=True)
class RawReply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port or 80), timeout=WAIT_SECONDS) as raw:
        yield raw


def exchange(url: str, request: bytes) -> RawReply:
    with connected(url) as raw:
        raw.sendall(request)
        return read_reply(raw)


def request_of(
    method: str = "GET", path: str = "/v1/models", *headers: str, body: bytes = b""
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *headers]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_reply(raw: socket.socket) -> RawReply:
    """Read one reply that declares its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(raw, data)
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += _more(raw, data + body)
    return RawReply(int(status_line.split()[1]), headers, body)


def read_until(raw: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        data += _more(raw, data[-100:])
    return data


def is_closed(raw: socket.socket) -> bool:
    """Wait until the server closes the connection. Return False if it sends something instead."""
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


def has_reply(raw: socket.socket) -> bool:
    return bool(select.select([raw], [], [], 0)[0])


def drip(raw: socket.socket, byte: bytes = b" ", *, pause_seconds: float = 0.05) -> None:
    """Send one byte at a time until the server replies or closes the connection."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not has_reply(raw):
        assert time.monotonic() < deadline, "the server goes on reading"
        try:
            raw.send(byte)
        except (BrokenPipeError, ConnectionResetError):
            return
        time.sleep(pause_seconds)


def _more(raw: socket.socket, data: bytes) -> bytes:
    more = raw.recv(65536)
    assert more, f"the connection ended after {data!r}"
    return more
