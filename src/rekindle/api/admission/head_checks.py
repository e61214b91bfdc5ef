"""Checks of a request's head, before its body is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.api.errors import Failure

# One pass over the headers picks these. Starlette's own type searches all of them for each name.
_CHECKED = {
    name.encode(): name
    for name in (
        "host",
        "origin",
        "sec-fetch-site",
        "sec-fetch-mode",
        "sec-fetch-dest",
        "content-type",
        "content-length",
        "transfer-encoding",
    )
}


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str
    path: str
    _values: dict[str, list[str]] = field(default_factory=dict)

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def first(self, name: str) -> str | None:
        values = self._values.get(name)
        return values[0] if values else None


HeadCheck = Callable[[RequestHead], Failure | None]
MAX_SHOWN_CHARS = 255  # of a header, in a refusal; no name in the DNS is longer


class HeadChecks:
    """Middleware that refuses a request at the first check that fails, without reading its body."""

    def __init__(self, app: ASGIApp, *, checks: Sequence[HeadCheck]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            head = head_of(scope)
            for check in self._checks:
                if refusal := check(head):
                    await refusal.response(scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def head_of(scope: Scope) -> RequestHead:
    values: dict[str, list[str]] = {}
    for raw, value in scope["headers"]:
        if name := _CHECKED.get(raw):
            values.setdefault(name, []).append(value.decode("latin-1"))
    return RequestHead(scope["method"], scope["path"], values)
