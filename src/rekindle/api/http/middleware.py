"""Middleware for every request, as plain ASGI.

From the outside in: `HeadAsGet`, `RequestScope` (id, counters, last resort for bugs), CORS
(Starlette's), `ApiKeys`, `BodyLimit`, `DrainGate` (`drain.py`). Only `HeadAsGet` touches the
bytes of a reply.
"""

import hmac
import logging
import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.errors import failure, internal_error, is_anthropic
from rekindle.api.http.caller import offered_keys
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST
from rekindle.api.http.session_header import SCOPE_KEY, SESSION_HEADER
from rekindle.observe.telemetry import Telemetry

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/dashboard/"  # static files; the page itself asks for a key
MAX_REQUEST_ID_CHARS = 128
NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")
UNMATCHED = "unmatched"


class HeadAsGet:
    """Middleware that answers HEAD for every GET route: the same answer without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_empty(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_empty)


class RequestScope:
    """Middleware that names and counts requests, and answers 500 for a bug."""

    def __init__(self, app: ASGIApp, *, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        scope["request_id"] = request_id
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope):
                    headers["request-id"] = request_id
                if SCOPE_KEY in scope:
                    headers[SESSION_HEADER] = scope[SCOPE_KEY]
            await send(message)

        self._telemetry.request_began()
        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
            logger.info("request=%s: client disconnected before the body was complete", request_id)
        except Exception:
            logger.exception("request=%s: internal error", request_id)
            if status is None:
                await internal_error(scope).response(scope)(scope, receive, send_named)
        finally:
            self._telemetry.request_ended(
                route=_route(scope), status=500 if status is None else status
            )


class ApiKeys:
    def __init__(self, app: ASGIApp, *, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._admits(scope):
            await self._app(scope, receive, send)
        else:
            await _UNAUTHORIZED.response(scope)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        offered = offered_keys(Headers(scope=scope))
        # Compare every pair, so that the time does not depend on which one matches.
        matches = [
            hmac.compare_digest(offer.encode("latin-1"), key)
            for offer in offered
            for key in self._keys
        ]
        return any(matches)


class BodyLimit:
    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        message = f"The body is larger than {limit_bytes} bytes."
        self._refusal = failure(413, message, "body_too_large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
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


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _request_id(offered: str) -> str:
    kept = NOT_IN_REQUEST_ID.sub("", offered)[:MAX_REQUEST_ID_CHARS]
    return kept or f"req-{secrets.token_hex(6)}"


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return route.path if isinstance(route, Route) else UNMATCHED


_UNAUTHORIZED = failure(
    401,
    "A valid API key is required, as a bearer token or in `x-api-key`.",
    "invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
