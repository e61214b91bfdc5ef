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
class RequestContext:
    models: Models
    telemetry: Telemetry
    ping_seconds: float
    namespace_by: NamespaceBy
    explains: bool  # why the cache missed, even unasked

    def caller(self, request: Request, hints: Hints = NO_HINTS) -> Caller:
        """Find the caller, and name its session in the reply's headers."""
        caller = caller_of(request.headers, hints, self.namespace_by)
        if caller.session != DEFAULT_SESSION:
            show_session(request.scope, caller.session)
        return caller
