"""State that endpoints share."""

from dataclasses import dataclass

from fastapi import Request

from rekindle.api.http.caller import Caller, Hints, caller_of
from rekindle.api.http.session_header import show_session
from rekindle.api.models import Models
from rekindle.config import NamespaceBy
from rekindle.generation.request import DEFAULT_SESSION
from rekindle.observe.telemetry import Telemetry

NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    api_keys: tuple[str, ...]  # none: no key is needed
    cors_origins: tuple[str, ...]  # none: no CORS headers at all
    body_limit_bytes: int
    ping_seconds: float  # silence in a stream before a keep-alive is sent
    namespace_by: NamespaceBy
    explains: bool  # every reply says why the cache missed


@dataclass(frozen=True, slots=True)
class RequestContext:
    models: Models
    telemetry: Telemetry
    settings: ApiSettings

    def caller(self, request: Request, hints: Hints = NO_HINTS) -> Caller:
        """Find the caller, and name its session in the reply's headers."""
        caller = caller_of(request.headers, hints, self.settings.namespace_by)
        if caller.session != DEFAULT_SESSION:
            show_session(request.scope, caller.session)
        return caller
