"""A streamed reply as server-sent events, written directly to ASGI.

This code runs for every token of every stream, so there is one frame per event and no layer in
between. An `Encoder` of the wire format makes the frames.

The response's head waits for the first event, whose cache statistics go into a header. The
first keep-alive ends the wait.
"""

import asyncio
import logging
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from rekindle.api.errors import failure_of
from rekindle.api.http.cache_header import CACHE_HEADER, PENDING, cache_header_value
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.replies import Replies
from rekindle.chat.reply.events import ReplyEvent
from rekindle.errors import RekindleError, UpstreamFailed

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies
KEEP_ALIVE = b": keep-alive\n\n"


class Encoder(Protocol):
    """Maker of the frames of one request, each with its blank line. Some events make none."""

    def begin(self) -> bytes: ...

    def encode(self, index: int, event: ReplyEvent) -> bytes: ...

    def fail(self, error_body: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class EventStream(Response):
    def __init__(
        self,
        replies: Replies,
        encoder: Encoder,
        *,
        keep_alive_seconds: float,
        keep_alive: bytes,
        media_type: str = MEDIA_TYPE,
    ) -> None:
        self.media_type = media_type
        self._replies = replies
        self._encoder = encoder
        self._keep_alive_seconds = keep_alive_seconds
        self._keep_alive_frame = keep_alive
        self._last_write = 0.0
        self._has_begun = False
        self._beginning: asyncio.Task[None] | None = None
        self.status_code = 200
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._write_all(scope, receive, send))
        except ClientGone:
            logger.info("request=%s: client disconnected", scope["request_id"])
            if self._beginning is None:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        finally:
            self._replies.close()

    async def _write_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        encode = self._encoder.encode

        async def write(index: int, event: ReplyEvent) -> None:
            if not self._has_begun:
                await self._begin(send, cache_header_value(event))
            if frame := encode(index, event):
                self._last_write = loop.time()
                await send({"type": "http.response.body", "body": frame, "more_body": True})

        self._last_write = loop.time()
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._replies.pour(write)
            last = self._encoder.end()
        except Exception as error:
            if isinstance(error, UpstreamFailed) and self._beginning is None:
                # Nothing was sent yet, so the status can make proxies and clients retry elsewhere.
                await failure_of(error, scope).response(scope)(scope, receive, send)
                return
            # Clients of a stream expect errors as events, even before the first token.
            if not isinstance(error, RekindleError):
                logger.exception("request=%s: stream failed", scope["request_id"])
            await self._begin(send, PENDING)
            last = self._encoder.fail(failure_of(error, scope).body(scope))
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send, cache: str) -> None:
        """Send the head once. A second caller waits, and cancellation does not interrupt it."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._send_head(send, cache))
        await asyncio.shield(self._beginning)

    async def _send_head(self, send: Send, cache: str) -> None:
        self.headers[CACHE_HEADER] = cache
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if first := self._encoder.begin():
            await send({"type": "http.response.body", "body": first, "more_body": True})
        self._has_begun = True

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet_seconds = loop.time() - self._last_write
            if quiet_seconds >= self._keep_alive_seconds:
                self._last_write = loop.time()
                await self._begin(send, PENDING)
                frame = self._keep_alive_frame
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            else:
                await asyncio.sleep(self._keep_alive_seconds - quiet_seconds)
