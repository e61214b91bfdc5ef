"""An ASGI application that passes every request to an upstream, and every reply back as it is.

The request is read whole, because it is recorded. The reply passes piece by piece, as the
upstream packed it.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Iterable

import httpx
from starlette.types import Receive, Scope, Send

from rekindle.errors import StartupError
from rekindle.local_hosts import LOOPBACK, is_safe_name, name_in
from rekindle.record.trace_line import MAX_REPLY_BYTES, Exchanged, Headers
from rekindle.record.trace_writer import TraceWriter

CONNECT_SECONDS = 10.0  # picked; a prompt may take minutes after that
# They concern one connection. The others pass.
HOP_HEADERS = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "proxy-connection", "expect"),
    }
)
# No `HTTP_PROXY` stands before a server of this machine.
_DIRECT: dict[str, httpx.AsyncBaseTransport | None] = {
    f"all://[{host}]" if ":" in host else f"all://{host}": None for host in LOOPBACK
}


class Proxy:
    """`is_local`: only this machine can connect, so a foreign `Host` is a web page's attack."""

    def __init__(self, upstream: str, writer: TraceWriter, *, is_local: bool = True) -> None:
        # Clients send paths with `/v1`, and users often give a base URL that ends in it.
        self.upstream = upstream.rstrip("/").removesuffix("/v1")
        url = _url(self.upstream)
        if url.scheme not in ("http", "https") or not url.host:
            raise StartupError(f"{upstream!r} is not the URL of a server.")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(CONNECT_SECONDS, read=None, write=None, pool=None),
            limits=httpx.Limits(max_connections=None),
            mounts=_DIRECT,
        )
        self._writer = writer
        self._is_local = is_local
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http" and self._is_local and not _is_safe(scope):
            message = "This proxy answers to IP addresses and `localhost` only."
            await _refuse(send, 403, "host_not_allowed", message)
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self._http.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchanged = Exchanged(
            seq=next(self._numbers),
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=_texts(scope["headers"]),
            body=await _body(receive),
            started=time.time(),
        )
        exchanging = asyncio.ensure_future(self._exchange(scope, exchanged, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((exchanging, leaving), return_when=asyncio.FIRST_COMPLETED)
            if exchanging.done():
                exchanging.result()
        finally:
            # A client that leaves ends its request at the upstream.
            for task in (exchanging, leaving):
                task.cancel()
            await asyncio.gather(exchanging, leaving, return_exceptions=True)
            self._writer.put(exchanged)

    async def _exchange(self, scope: Scope, exchanged: Exchanged, send: Send) -> None:
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        target = raw_path.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        headers = [each for each in _passing(scope["headers"]) if each[0].lower() != b"host"]
        try:
            # No defaults of the HTTP library: the upstream sees the client's own headers.
            request = httpx.Request(
                exchanged.method,
                self.upstream + target,
                headers=headers,
                content=exchanged.body or None,
            )
            response = await self._http.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = f"{self.upstream} cannot be reached: {error or type(error)}."
            await _refuse(send, 502, "upstream_unreachable", message)
            return
        try:
            await self._answer(response, exchanged, send)
        finally:
            await response.aclose()

    async def _answer(self, response: httpx.Response, exchanged: Exchanged, send: Send) -> None:
        headers = list(_passing(response.headers.raw))
        exchanged.status, exchanged.reply_headers = response.status_code, _texts(headers)
        start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
        await send(start)
        async for piece in response.aiter_raw():
            exchanged.first_byte = exchanged.first_byte or time.time()
            exchanged.reply += piece[: MAX_REPLY_BYTES - len(exchanged.reply)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        exchanged.ended = time.time()
        await send({"type": "http.response.body", "body": b""})


def _url(text: str) -> httpx.URL:
    try:
        return httpx.URL(text)
    except httpx.InvalidURL as error:
        raise StartupError(f"{text!r} is not a URL: {error}.") from error


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _passing(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name.lower().decode() not in HOP_HEADERS)


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]


def _is_safe(scope: Scope) -> bool:
    hosts = [value for name, value in _texts(scope["headers"]) if name == "host" and value]
    return all(is_safe_name(name_in(host) or "") for host in hosts)


async def _refuse(send: Send, status: int, kind: str, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": kind}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
