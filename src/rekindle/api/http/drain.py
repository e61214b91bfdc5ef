"""Draining: a server that shuts down still listens, and refuses new requests."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from fastapi import Response
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.errors import failure_of
from rekindle.errors import ShuttingDown

HEALTH_PATH = "/health"
HEALTH_PATHS = frozenset({HEALTH_PATH, "/v1/health"})  # the second is llama-server's
LIVE_QUERY = b"live"  # `/health?live`: a liveness check, answered even while draining
METRICS_PATH = "/metrics"
MAX_RETRY_SECONDS = 60  # clients ignore longer waits; picked


class Drain:
    """The drain state: off until `expect_end` is called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: float | None = None

    @property
    def is_on(self) -> bool:
        return self._ends_at is not None

    def expect_end(self, seconds: float) -> None:
        """Refuse new requests from now on. The process ends within `seconds`."""
        self._ends_at = self._clock() + seconds

    @property
    def retry_after_seconds(self) -> int:
        assert self._ends_at is not None
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self._ends_at - self._clock())))


class DrainGate:
    """Middleware that answers 503 while draining, except for metrics and liveness checks."""

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._drain.is_on or _is_exempt(scope):
            await self._app(scope, receive, send)
            return
        # Read the body: closing a connection with unread data may discard the answer.
        while (await receive()).get("more_body"):
            pass
        await self._refusal(scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response:
        headers = {"retry-after": str(self._drain.retry_after_seconds), "connection": "close"}
        if scope["path"] in HEALTH_PATHS:
            body = to_json({"status": "draining"})
            return Response(body, 503, headers=headers, media_type="application/json")
        failure = failure_of(ShuttingDown("The server is shutting down."), scope)
        return replace(failure, headers=headers).response(scope)


def _is_exempt(scope: Scope) -> bool:
    if scope["path"] in HEALTH_PATHS:
        return LIVE_QUERY in scope["query_string"].split(b"&")
    return bool(scope["path"] == METRICS_PATH)
