"""Pages of other origins: none may use this server from a browser unless `--cors` allows it.

A browser sends simple requests of any page without a preflight. CORS then hides only the reply.
"""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from rekindle.api.admission.head_checks import MAX_SHOWN_CHARS, RequestHead
from rekindle.api.errors import Failure, failure
from rekindle.local_hosts import name_in

ANY = "*"
LOCALHOST = "localhost"  # pages of this machine, on any port
# Pages of installed programs (Electron, Tauri, Capacitor, VS Code). No web page has such an origin.
PROGRAM_SCHEMES = frozenset({"app", "capacitor", "tauri", "vscode-file", "vscode-webview"})
PROGRAM_ORIGINS = frozenset({"http://tauri.localhost", "https://tauri.localhost"})
WEB_PORTS = {"http": 80, "https": 443}
CODE = "origin_not_allowed"
OWN_SITES = frozenset({"same-origin", "none"})  # none: typed, bookmarked, or a trusted extension


class AllowedOrigins:
    """Origins given with `--cors`: exact ones, `SCHEME://*`, `localhost`, or `*`."""

    def __init__(self, origins: Iterable[str]) -> None:
        cleaned = [
            origin if origin.endswith("://") else origin.removesuffix("/") for origin in origins
        ]
        patterns = {origin: _pattern(origin) for origin in cleaned}
        self.exact = tuple(origin for origin, pattern in patterns.items() if pattern is None)
        self.pattern = "|".join(filter(None, patterns.values())) or None
        self._regex = re.compile(self.pattern) if self.pattern else None

    def __bool__(self) -> bool:
        return bool(self.exact or self.pattern)

    def __contains__(self, origin: str) -> bool:
        if ANY in self.exact or origin in self.exact:
            return True
        return self._regex is not None and self._regex.fullmatch(origin) is not None


def _pattern(origin: str) -> str | None:
    """Return a regular expression for several origins; None: it is one."""
    if origin == LOCALHOST:  # llama-server's word
        return r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]+)?"
    return f"{re.escape(origin[:-1])}.*" if origin.endswith("://*") else None


class OriginCheck:
    def __init__(self, allowed: AllowedOrigins) -> None:
        self._allowed = allowed

    def __call__(self, head: RequestHead) -> Failure | None:
        site = head.first("sec-fetch-site")
        origins = head.all("origin")
        if site in OWN_SITES or (site is None and not origins):
            return None
        if site is not None and not origins:
            # A link to the dashboard may stand in any page. An image or a frame may not.
            return None if _is_visit(head) else _NO_ORIGIN
        foreign = [origin for origin in origins if not self._admits(origin, site, head)]
        return _refusal(foreign[0]) if foreign else None

    def _admits(self, origin: str, site: str | None, head: RequestHead) -> bool:
        if origin in self._allowed or origin in PROGRAM_ORIGINS:
            return True
        if origin.partition("://")[0] in PROGRAM_SCHEMES:
            return True
        # Old browsers, and all browsers over plain HTTP in a network, send no `Sec-Fetch-Site`.
        return site is None and _is_same(origin, head.first("host") or "")


def _is_same(origin: str, host: str) -> bool:
    """Compare names and ports. The scheme may differ, as a proxy may end TLS."""
    try:
        parts = urlsplit(origin)
        default = WEB_PORTS[parts.scheme]
        port = parts.port or default
    except (ValueError, KeyError):
        return False
    name = name_in(host)
    if name is None or (parts.hostname or "").removesuffix(".") != name:
        return False
    host_port = re.search(r":(\d+)$", host)
    return port == (int(host_port[1]) if host_port else default)


def _is_visit(head: RequestHead) -> bool:
    return (
        head.method in ("GET", "HEAD")
        and head.first("sec-fetch-mode") == "navigate"
        and head.first("sec-fetch-dest") == "document"
    )


def _refusal(origin: str) -> Failure:
    shown = origin[:MAX_SHOWN_CHARS]
    if origin == "null":
        return _NULL
    return failure(
        403,
        f"Pages of the origin '{shown}' may not use this server. To allow them, start it with"
        f" `--cors {shown}`.",
        CODE,
    )


_NO_ORIGIN = failure(
    403,
    "Pages of other sites may not load this address. To allow the pages of an origin, start the"
    " server with `--cors ORIGIN`, and let them use fetch.",
    CODE,
)
_NULL = failure(
    403,
    "Pages without an origin (`Origin: null`: a file, a sandboxed frame) may not use this server."
    " Serve the page over HTTP, and start this server with `--cors` and the page's origin.",
    CODE,
)
