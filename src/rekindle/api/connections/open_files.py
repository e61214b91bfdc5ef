"""The operating system's limit of open files, which connections count against."""

import logging
import sys

from rekindle.api.connections.limits import SPARE_CONNECTIONS

if sys.platform != "win32":
    import resource

_log = logging.getLogger(__name__)

OTHER_FILES = 256  # models, stores, engine processes, logs; picked


def connections_within_file_limit(wanted: int) -> int:
    """Raise the process's soft limit for `wanted` connections. Return how many it allows."""
    n_others = SPARE_CONNECTIONS + OTHER_FILES
    n_files = _raise_limit(wanted + n_others)
    if n_files >= wanted + n_others:
        return wanted
    allowed = max(1, n_files - n_others)
    _log.warning(
        "http: max_connections=%d lowered to %d, this process may open only %d files",
        wanted,
        allowed,
        n_files,
    )
    return allowed


def _raise_limit(wanted: int) -> int:
    """Let the process open `wanted` files, or as many as it may. Return how many."""
    if sys.platform == "win32":
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (ValueError, OSError):  # macOS has a lower limit beside an infinite one
        return soft
    return raised
