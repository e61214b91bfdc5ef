"""State that endpoints share."""

import time
from dataclasses import dataclass

from fastapi import Request

from rekindle.api.admission.keys import SCOPE_KEY, KeyHolder, Keys
from rekindle.api.body import BodyReader
from rekindle.api.errors import Forbidden
from rekindle.api.http.caller import Caller, Hints, caller_of
from rekindle.api.http.session_header import show_session
from rekindle.api.http.usage_window import UsageWindow, usage_scale
from rekindle.api.models import Models
from rekindle.config.choices import MediaPolicy
from rekindle.generation.request import DEFAULT_SESSION
from rekindle.observe.telemetry import Telemetry

NO_HINTS = Hints()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    keys: Keys
    cors_origins: tuple[str, ...]  # none: no CORS headers at all
    server_names: tuple[str, ...]  # that `Host` may have, beside localhost and addresses
    body_limit_bytes: int
    receive_seconds: float  # a pause in a body before it is refused
    ping_seconds: float  # silence in a stream before a keep-alive is sent
    separates_keys: bool  # each API key has a namespace of its own
    admin_metrics: bool  # only the administrator may read `/metrics`
    serves_slots: bool  # `GET /slots`
    serves_dashboard: bool  # the page; its events are always served
    explains: bool  # every reply says why the cache missed
    media: MediaPolicy
    usage_windows: tuple[UsageWindow, ...]  # that clients believe in


@dataclass(frozen=True, slots=True)
class RequestContext:
    models: Models
    telemetry: Telemetry
    settings: ApiSettings
    bodies: BodyReader

    def caller(self, request: Request, hints: Hints = NO_HINTS) -> Caller:
        """Find the caller, and name its session in the reply's headers."""
        key = _holder(request).key if self.settings.separates_keys else None
        asked_at = request.scope.setdefault("asked_at", time.time())
        caller = caller_of(request.headers, hints, key, asked_at)
        if caller.session != DEFAULT_SESSION:
            show_session(request.scope, caller.session)
        return caller

    def usage_scale(self, request: Request, n_ctx: int) -> float:
        """Return the factor for the counts that this client compares with its own window."""
        return usage_scale(self.settings.usage_windows, request.headers, n_ctx=n_ctx)

    def visible_namespace(self, request: Request) -> str | None:
        """Return the namespace whose requests the caller may see; None: all of them."""
        return None if _holder(request).is_admin else self.caller(request).namespace

    def require_admin(self, request: Request, what: str) -> None:
        """Refuse a request of anybody but the administrator, where there is one.

        Raises Forbidden. `what` begins the sentence: "Unloading a model".
        """
        if self.settings.keys.admin is not None and not _holder(request).is_admin:
            raise Forbidden(f"{what} requires the administrator's key of this server.")

    @property
    def is_shared(self) -> bool:
        """Whether several API keys share one namespace."""
        return len(self.settings.keys.clients) > 1 and not self.settings.separates_keys


def _holder(request: Request) -> KeyHolder:
    holder: KeyHolder = request.scope[SCOPE_KEY]
    return holder
