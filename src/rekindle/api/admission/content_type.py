"""Content types of request bodies: JSON, and what command-line clients send by default."""

from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.admission.head_checks import MAX_SHOWN_CHARS, RequestHead, head_of
from rekindle.api.errors import Failure, failure

JSON = "application/json"
# curl -d, wget, PowerShell and Python's urllib; Python's requests sends none.
DEFAULTS = frozenset({"", "application/x-www-form-urlencoded"})


class ContentType:
    """Middleware that refuses bodies of other types. Unknown routes go on to their 404."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = _check(head_of(scope))
            if refusal is not None and _is_known(scope):
                await refusal.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_known(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _check(head: RequestHead) -> Failure | None:
    """Refuse a body of another type.

    Browsers send a few types for any page without a preflight, but always with `Origin` or
    `Sec-Fetch-Site`. Without both, a client is no browser, and the defaults above mean JSON.
    """
    if head.first("content-length") in (None, "0") and not head.all("transfer-encoding"):
        return None
    kind = (head.first("content-type") or "").partition(";")[0].strip().lower()
    if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    is_browser = head.all("origin") or head.all("sec-fetch-site")
    if kind in DEFAULTS and not is_browser:
        return None
    was = f"is `{kind[:MAX_SHOWN_CHARS]}`" if kind else "is missing"
    message = f"The content type of the body {was}. Send JSON with `Content-Type: {JSON}`."
    return failure(415, message, "unsupported_media_type")
