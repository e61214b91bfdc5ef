"""An upstream that answers as a test says, piece by piece, and keeps what it was sent."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Upstream:
    """Sends its pieces, and waits for `go_on` before each one after the first."""

    status: int = 200
    headers: Headers = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    waits: bool = False
    breaks: bool = False  # the connection breaks after the last piece
    go_on: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)  # the caller has disconnected
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = scope["query_string"].decode()
        target = scope["raw_path"].decode() + (f"?{query}" if query else "")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((f"{scope['method']} {target}", headers, body))
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        await send(start)
        for number, piece in enumerate(self.pieces):
            if number and self.waits and await self._wait(receive) is False:
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not self.breaks:
            await send({"type": "http.response.body", "body": b""})

    async def _wait(self, receive: Receive) -> bool:
        """Return False if the caller left before the test let the stream go on."""
        leaving = asyncio.ensure_future(receive())
        while not self.go_on.is_set():
            await asyncio.wait((leaving,), timeout=0.02)
            if leaving.done():
                self.left.set()
                return False
        leaving.cancel()
        self.go_on.clear()
        return True


@contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """Serve the application on a free port; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        log_level="critical",
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
