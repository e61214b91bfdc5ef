"""Names and addresses of this machine, and the rule that no proxy stands before them."""

from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address

LOCALHOST = "localhost"
LOOPBACK = ("127.0.0.1", LOCALHOST, "::1")
# This machine, as a container on it calls it. The public DNS has no names below `.internal`.
CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
MAX_PORT_DIGITS = 5


def without_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which programs reach this machine without a proxy."""
    found = dict(variables)
    for name in ("NO_PROXY", "no_proxy"):
        excluded = [each for each in found.get(name, "").split(",") if each]
        found[name] = ",".join(dict.fromkeys((*excluded, *LOOPBACK)))
    return found


@lru_cache(maxsize=64)
def is_ip(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback if is_ip(host) else host.lower() == LOCALHOST


def is_safe_name(name: str) -> bool:
    """Return whether the host of a request, in lower case, is none that a web page can choose.

    Another name may be one of the page's own that resolves to this machine: DNS rebinding.
    """
    is_local = name == LOCALHOST or name.endswith(f".{LOCALHOST}")
    return is_local or name in CONTAINER_HOSTS or is_ip(name)


def name_in(host: str) -> str | None:
    """Return the name or address in a `Host` header, in lower case, or None if it is malformed."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        if not bracket or colon not in ("", ":"):
            return None
    else:
        name, _, port = host.partition(":")
    if port and not (port.isascii() and port.isdigit() and len(port) <= MAX_PORT_DIGITS):
        return None
    return name.lower().removesuffix(".") or None
