"""Middleware for every request, as plain ASGI.

From the outside in: `HeadAsGet`, `RequestScope` (id, counters, last resort for bugs), `HeadChecks`
(host and origin), CORS (Starlette's), `ApiKeys`, `ContentType`, `BodyDeadline`, `BodyLimit`,
`DrainGate` (`drain.py`). The checks are in `api/admission`. Only `HeadAsGet` touches the bytes
of a reply.
"""

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.errors import internal_error
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone
from rekindle.api.http.error_shapes import ANTHROPIC
from rekindle.api.http.session_header import SCOPE_KEY, SESSION_HEADER
from rekindle.observe.telemetry import UNMATCHED, Telemetry

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")


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
        scope["asked_at"] = time.time()
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if ANTHROPIC.covers(scope["path"]):
                    headers["request-id"] = request_id
                if SCOPE_KEY in scope:
                    headers[SESSION_HEADER] = scope[SCOPE_KEY]
            await send(message)

        self._telemetry.request_began()
        try:
            await self._app(scope, receive, send_named)
        except ClientGone:
            status = CLIENT_CLOSED_REQUEST
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


def _request_id(offered: str) -> str:
    kept = NOT_IN_REQUEST_ID.sub("", offered)[:MAX_REQUEST_ID_CHARS]
    return kept or f"req-{secrets.token_hex(6)}"


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return route.path if isinstance(route, Route) else UNMATCHED
