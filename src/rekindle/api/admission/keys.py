"""API keys: which request is admitted, whose it is, and what only the administrator may do."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.errors import failure
from rekindle.api.http.drain import HEALTH_PATHS
from rekindle.api.http.error_shapes import GOOGLE

OPEN_PATHS = HEALTH_PATHS | {"/"}
OPEN_FOLDER = "/dashboard/"  # static files; the page itself asks for a key
GOOGLE_HEADER = "x-goog-api-key"
KEY_HEADERS = ("x-api-key", GOOGLE_HEADER)  # the first is Anthropic's
QUERY_KEY = b"key="  # Google's
SHARED_PATH = "/v1/models"  # OpenAI's and Google's
SCOPE_KEY = "rekindle.key_holder"  # of a request's ASGI scope


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who sends a request."""

    # The key that was checked. Without keys, the first that is offered: a label, not a proof.
    key: str | None
    is_admin: bool  # it has the administrator's key


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server. Without client keys every request is admitted."""

    clients: tuple[str, ...] = ()
    admin: str | None = None  # None: every client may do what an administrator may

    def identify(self, headers: Mapping[str, str]) -> KeyHolder | None:
        """Return who sends a request with these headers; None: it has no valid key."""
        offered = _offered(headers)
        known = self.clients if self.admin is None else (*self.clients, self.admin)
        # Compare every pair, so that the time does not depend on which one matches.
        matches = [
            key
            for key in known
            for offer in offered
            if hmac.compare_digest(offer.encode("latin-1"), key.encode())
        ]
        if self.admin is not None and self.admin in matches:
            return KeyHolder(self.admin, is_admin=True)
        if matches:
            return KeyHolder(matches[0], is_admin=False)
        if self.clients:
            return None
        return KeyHolder(next(iter(offered), None), is_admin=False)


class ApiKeys:
    """Middleware that finds the key holder of each request, and refuses those without a key."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _move_from_query(scope)
            holder = self._keys.identify(Headers(scope=scope))
            if holder is None and not _is_open(scope["path"]):
                await _UNAUTHORIZED.response(scope)(scope, receive, send)
                return
            scope[SCOPE_KEY] = holder or KeyHolder(None, is_admin=False)
        await self._app(scope, receive, send)


def _offered(headers: Mapping[str, str]) -> list[str]:
    """List the API keys that a request offers; none is empty."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    others = (headers.get(name, "") for name in KEY_HEADERS)
    return [key for key in (bearer, *others) if key]


def _move_from_query(scope: Scope) -> None:
    """Make a header of Google's `key=` in the query, so that nobody behind can log it."""
    query: bytes = scope["query_string"]
    path: str = scope["path"]
    # OpenAI's clients never send one, so on the path that both have it is Google's.
    is_google = GOOGLE.covers(path) or path == SHARED_PATH or path.startswith(f"{SHARED_PATH}/")
    if QUERY_KEY not in query or not is_google:
        return
    pairs = query.split(b"&")
    keys = [unquote_to_bytes(each[len(QUERY_KEY) :]) for each in pairs if _is_key(each)]
    scope["query_string"] = b"&".join(each for each in pairs if not _is_key(each))
    scope["headers"] = [*scope["headers"], *((GOOGLE_HEADER.encode(), key) for key in keys)]


def _is_key(pair: bytes) -> bool:
    return pair.startswith(QUERY_KEY)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


_UNAUTHORIZED = failure(
    401,
    "A valid API key is required, as a bearer token, in `x-api-key` or in `x-goog-api-key`.",
    "invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
