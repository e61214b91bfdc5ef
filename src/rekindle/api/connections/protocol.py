"""One HTTP connection, bounded: uvicorn's protocol with limits for heads and for waiting.

uvicorn collects a head without a limit, and waits for its end without a deadline. All of that
happens before a key can be checked.
"""

import asyncio
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rekindle.api.connections.limits import (
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    OpenConnections,
)
from rekindle.api.connections.refusals import (
    BUSY,
    MALFORMED,
    TOO_LARGE,
    TOO_MANY,
    TOO_SLOW,
    reply_of,
)
from rekindle.api.errors import Failure
from rekindle.api.http.drain import HEALTH_PATHS


class Arrival(Enum):
    """How far the newest request of a connection has arrived."""

    NONE = auto()  # no byte of it
    HEAD = auto()
    BODY = auto()
    REFUSED = auto()  # the reply is written; the rest is read and dropped


class BoundedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        open_connections: OpenConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._open_connections = open_connections
        self._arrival = Arrival.NONE
        self.url = b""
        self._n_head_bytes = 0
        self._n_framing_bytes = 0  # of a body: chunk lines and trailers since the last chunk
        self._n_unparsed_bytes = 0  # of a body that the parser does not see
        self._refusal = MALFORMED  # for a callback of the parser that raises
        self._running: RequestResponseCycle | None = None  # `self.cycle` is the newest one
        self._due_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    # Protocol interface
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._open_connections.open(self):
            self._set_deadline(self._open_connections.receive_seconds)
        else:
            self._refuse(BUSY)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_running()
        self._open_connections.close(self)
        self._due_at = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and self._arrival is not Arrival.REFUSED:
            if self._arrival is Arrival.NONE:
                self._begin_head()
            if self._arrival is Arrival.HEAD:
                room = MAX_HEAD_BYTES - self._n_head_bytes
                piece, data = data[:room], data[room:]
                self._n_head_bytes += len(piece)
                self._parse(piece)
                if self._arrival is Arrival.HEAD and self._n_head_bytes >= MAX_HEAD_BYTES:
                    self._refuse(TOO_LARGE)
            elif self._n_unparsed_bytes:
                data = self._pass_on(data)
            else:
                self._n_framing_bytes += len(data)
                self._parse(data)
                data = b""
                if self._arrival is Arrival.BODY and self._n_framing_bytes > MAX_HEAD_BYTES:
                    self._refuse(TOO_LARGE)

    # Parser callbacks
    def on_message_begin(self) -> None:
        if self._arrival is not Arrival.HEAD:  # pipelined, in the data of an earlier request
            self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arrival is Arrival.BODY:
            return  # A trailer. No client of these APIs sends one, and keys were checked.
        if len(self.headers) >= MAX_HEADERS:
            self._fail(TOO_MANY)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._n_unparsed_bytes = self._declared_length()
        self._split_target()
        is_health = self._path in HEALTH_PATHS
        is_refused = not is_health and not self._open_connections.may_run(self)
        if is_refused or len(self.pipeline) >= MAX_PIPELINED:
            self._fail(BUSY)
        super().on_headers_complete()
        if not is_health:
            self._open_connections.run(self)
        self._arrival = Arrival.BODY
        self._n_framing_bytes = 0
        self._due_at = None

    def on_body(self, body: bytes) -> None:
        self._n_framing_bytes -= len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._n_framing_bytes = 0

    def on_message_complete(self) -> None:
        if self._n_unparsed_bytes:
            return
        self._arrival = Arrival.NONE
        super().on_message_complete()
        if self._is_answered:
            # The end of a body that nobody wanted. Its data stopped uvicorn's own timer.
            self._set_deadline(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answered:  # a pipelined request has begun
            return
        self._open_connections.wait(self)
        if self._arrival is not Arrival.NONE:
            # The rest of a body that nobody wanted, or half a head that came meanwhile.
            self._set_deadline(self._open_connections.receive_seconds)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Bounds
    def evict(self) -> None:
        if self._arrival is Arrival.HEAD:
            self._open_connections.on_refused(BUSY.status)
            self.transport.write(reply_of(BUSY, self._path))
        self._arrival = Arrival.REFUSED
        if self.transport.get_write_buffer_size() == 0:
            self.transport.close()
        else:
            self.transport.abort()  # `close` would wait for a client that does not read

    def _begin_head(self) -> None:
        self._arrival = Arrival.HEAD
        self.url = b""
        self._n_head_bytes = 0
        if self._is_answered:
            self._set_deadline(self._open_connections.receive_seconds)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal)
        except httptools.HttpParserUpgrade as upgrade:
            # Answered as a plain request, which HTTP allows. Java's client offers h2c this way.
            (offset,) = upgrade.args
            self.data_received(data[offset:])

    def _pass_on(self, data: bytes) -> bytes:
        """Take the body of a request that offers an upgrade. Return what follows it.

        The parser takes the body for bytes of the other protocol, and would parse it as requests.
        """
        body, rest = data[: self._n_unparsed_bytes], data[self._n_unparsed_bytes :]
        self._n_unparsed_bytes -= len(body)
        super().on_body(body)
        if not self._n_unparsed_bytes:
            self.on_message_complete()
        return rest

    def _declared_length(self) -> int:
        headers = dict(self.headers)
        if b"transfer-encoding" in headers:
            self._fail(MALFORMED)
        return int(headers.get(b"content-length", b"0"))

    def _fail(self, refusal: Failure) -> None:
        """Stop the parser, which calls this."""
        self._refusal = refusal
        raise _StopParsing

    def _split_target(self) -> None:
        """Split an absolute request target into `Host` and path, as RFC 9112 (3.2) asks."""
        if self.url.startswith((b"/", b"*")):
            return
        target = httptools.parse_url(self.url)
        host = target.host or b""
        host = b"[" + host + b"]" if b":" in host else host
        port = b":%d" % target.port if target.port else b""
        self.headers[:] = [each for each in self.headers if each[0] != b"host"]
        self.headers.append((b"host", host + port))
        self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def _refuse(self, refusal: Failure) -> None:
        is_body = self._arrival is Arrival.BODY and not self._is_answered
        self._arrival = Arrival.REFUSED
        if is_body and not self.pipeline and not self.cycle.response_started:
            self._end_running()  # the body is malformed
        elif not self._is_answered:
            self.cycle.keep_alive = False  # earlier requests are answered, then it is closed
            return
        else:
            self._open_connections.on_refused(refusal.status)
        self.transport.write(reply_of(refusal, self._path))
        # A client that is still sending would lose the reply if the connection closed now.
        self.transport.write_eof()
        self._open_connections.wait(self)
        self._set_deadline(LINGER_SECONDS)

    def _end_running(self) -> None:
        """End the running request as if the client had left."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.waiting_for_100_continue = False
            self._running.message_event.set()

    def _set_deadline(self, seconds: float) -> None:
        self._due_at = self.loop.time() + seconds
        # The timer is reused by later requests: a deadline costs an assignment.
        if self._timer is None or self._timer.when() > self._due_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._due_at, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._due_at is None or self.transport.is_closing():
            return
        if self.loop.time() < self._due_at:
            self._timer = self.loop.call_at(self._due_at, self._look_at_deadline)
        elif self._arrival is Arrival.HEAD and self._is_answered:
            self._refuse(TOO_SLOW)
        else:
            # Silent where no request has begun: a browser would take a 408 for the next reply.
            self.transport.abort()

    @property
    def _is_answered(self) -> bool:
        """Whether no reply is owed for an earlier request."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")


class _StopParsing(Exception):
    pass
