"""The lock on a cache directory that servers and commands share."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WAIT_SECONDS = 5.0  # no process holds the lock for a tenth of this; picked
_POLL_SECONDS = 0.001


@contextmanager
def alone_in(directory: Path, *, wait_seconds: float = _WAIT_SECONDS) -> Iterator[None]:
    """Lock the directory: no other process replaces a database or adds entries. Do not nest."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, wait_seconds)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_seconds: float) -> None:
    # A blocking flock would wait forever for a server that is stopped or hangs.
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked") from None
            time.sleep(_POLL_SECONDS)
