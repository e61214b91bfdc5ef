"""The server's end of the link to an engine process, on the event loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from rekindle.link.encoding import decode_report, encode
from rekindle.link.frames import FrameBuffer, framed
from rekindle.link.messages import Order, Report
from rekindle.supervisor.process import EngineProcess

_log = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """Calls `on_report` with each report. `closed` is done when the process closes the link."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, order: Order) -> None:
        """Queue an order. Harmless once the link is closed: the order is sent again later."""
        if self._transport is not None and not self.closed.done():
            self._transport.write(framed(encode(order)))

    def abort(self) -> None:
        """Close the link now: the engine process then stores what it holds, and ends."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        for message in self._buffer.feed(data):
            try:
                self._on_report(decode_report(message))
            except Exception:
                # Its events are lost. The next process continues from what was delivered.
                _log.exception("engine: a report cannot be read, the process is ended")
                self.abort()
                return

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def connect(process: EngineProcess, on_report: Callable[[Report], None]) -> EngineLink:
    loop = asyncio.get_running_loop()
    process.sock.setblocking(False)  # noqa: FBT003
    _, link = await loop.create_unix_connection(lambda: EngineLink(on_report), sock=process.sock)
    return link
