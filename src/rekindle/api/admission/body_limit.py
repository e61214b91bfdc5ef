"""A limit for the bytes of request bodies."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.errors import failure


class BodyLimit:
    """Middleware that answers 413 for a body over `limit_bytes`, declared or received."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        message = f"The body is larger than {limit_bytes} bytes."
        self._refusal = failure(413, message, "body_too_large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":  # whose body nobody reads
            await self._app(scope, receive, send)
            return

        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._limit_bytes:
            await self._refusal.response(scope)(scope, receive, send)
            return

        n_received = 0

        async def receive_counted() -> Message:
            nonlocal n_received
            message = await receive()
            n_received += len(message.get("body", b""))
            if n_received > self._limit_bytes:
                raise _BodyTooLarge
            return message

        try:
            await self._app(scope, receive_counted, send)
        except _BodyTooLarge:
            await self._refusal.response(scope)(scope, receive, send)


class _BodyTooLarge(Exception):
    pass
