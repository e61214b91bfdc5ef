"""A deadline for request bodies that stop arriving, or arrive in drops."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.errors import failure

MIN_BYTES_PER_SECOND = 1024  # picked: a modem of 1990 sends more


class BodyDeadline:
    """Middleware that answers 408 if no part of a body arrives for `pause_seconds`.

    Each KiB that has arrived extends the time for the whole body by a second.
    """

    def __init__(self, app: ASGIApp, *, pause_seconds: float) -> None:
        self._app = app
        self._pause_seconds = pause_seconds
        message = (
            "The rest of the body did not arrive in time: no part of it for"
            f" {pause_seconds:g} seconds, or less than {MIN_BYTES_PER_SECOND} bytes per second."
        )
        headers = {"connection": "close"}
        self._refusal = failure(408, message, "request_timeout", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":  # whose body nobody reads
            await self._app(scope, receive, send)
            return

        now = asyncio.get_running_loop().time
        start: float | None = None
        n_received = 0
        is_complete = False

        async def receive_in_time() -> Message:
            nonlocal start, n_received, is_complete
            if is_complete:  # then it waits for the client to leave
                return await receive()
            start = now() if start is None else start
            slowest = start + n_received / MIN_BYTES_PER_SECOND
            try:
                async with asyncio.timeout_at(min(now(), slowest) + self._pause_seconds):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooSlow from None
            n_received += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_in_time, send)
        except _BodyTooSlow:
            await self._refusal.response(scope)(scope, receive, send)


class _BodyTooSlow(Exception):
    pass
