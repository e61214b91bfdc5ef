"""Names under which a server answers: the defence against DNS rebinding.

A page of evil.example can let that name resolve to this machine. Its browser then treats this
server as the page's own origin, but still sends `Host: evil.example`.
"""

import socket
from collections.abc import Iterable

from rekindle.api.admission.head_checks import MAX_SHOWN_CHARS, RequestHead
from rekindle.api.errors import Failure, failure
from rekindle.api.http.drain import HEALTH_PATHS
from rekindle.local_hosts import is_ip, is_loopback, is_safe_name, name_in

ANY = "*"

_SEVERAL = failure(400, "The request has more than one `Host` header.", "invalid_host")


def server_names(bound_to: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """List the names of a server that listens on `bound_to`.

    The machine's own name is one of them if other machines can reach the server. An attacker who
    controls that name in the local network could then also connect without a browser.
    """
    names = [*allowed]
    if not is_ip(bound_to):
        names.append(bound_to)
    if not is_loopback(bound_to):
        machine = socket.gethostname()
        names += [machine, f"{machine}.local"]
    return tuple(names)


class HostCheck:
    """Refuses names that are not in `names`. IP addresses and names of this machine always pass.

    A name that begins with `.` or `*.` also allows the names below it; `*` allows all.
    """

    def __init__(self, names: Iterable[str]) -> None:
        plain = {name.lower().removesuffix(".") for name in names}
        self._allows_all = ANY in plain
        below = {name.removeprefix("*").removeprefix(".") for name in plain if name[:1] in "*."}
        below -= {""}
        self._names = {*plain, *below}
        self._suffixes = tuple(f".{name}" for name in below)

    def __call__(self, head: RequestHead) -> Failure | None:
        # Load balancers name a server as they like, and its health is no secret.
        if self._allows_all or head.path in HEALTH_PATHS:
            return None
        match head.all("host"):
            case [] | [""]:  # HTTP/1.0. A browser always sends one.
                return None
            case [host]:
                return None if self._is_allowed(host) else _refusal(host)
            case _:
                return _SEVERAL

    def _is_allowed(self, host: str) -> bool:
        name = name_in(host)
        if name is None:
            return False
        return name in self._names or name.endswith(self._suffixes) or is_safe_name(name)


def _refusal(host: str) -> Failure:
    shown = host[:MAX_SHOWN_CHARS]
    name = name_in(shown) or "NAME"
    return failure(
        403,
        f"This server does not answer to the host '{shown}'. If that is a name of this server,"
        f" start it with `--allowed-hosts {name}`.",
        "host_not_allowed",
    )
