"""API keys: which request is admitted, whose it is, and what only the administrator may do."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_plus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.errors import failure
from rekindle.api.http.error_shapes import GOOGLE

OPEN_PATHS = frozenset({"/health", "/"})
OPEN_FOLDER = "/dashboard/"  # static files; the page itself asks for a key
KEY_HEADERS = ("x-api-key", "x-goog-api-key")  # Anthropic's and Google's
QUERY_KEY = b"key="  # Google's
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

    def identify(
        self, headers: Mapping[str, str], in_query: Sequence[str] = ()
    ) -> KeyHolder | None:
        """Return who sends a request with these headers; None: it has no valid key.

        `in_query`: the keys in the request's query.
        """
        offered = [*_offered(headers), *in_query]
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
            holder = self._keys.identify(Headers(scope=scope), _taken_from_query(scope))
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


def _taken_from_query(scope: Scope) -> list[str]:
    """Remove Google's `key=` from the query, so that nobody behind can log it."""
    query: bytes = scope["query_string"]
    if QUERY_KEY not in query or not GOOGLE.covers(scope["path"]):
        return []
    pairs = query.split(b"&")
    scope["query_string"] = b"&".join(each for each in pairs if not each.startswith(QUERY_KEY))
    keys = (each.removeprefix(QUERY_KEY) for each in pairs if each.startswith(QUERY_KEY))
    return [key for each in keys if (key := unquote_plus(each, "latin-1"))]


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


_UNAUTHORIZED = failure(
    401,
    "A valid API key is required, as a bearer token, in `x-api-key` or in `x-goog-api-key`.",
    "invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
