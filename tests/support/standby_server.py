"""`rekindle serve` that is imported in advance and dies at a given moment.

    python -m tests.support.standby_server serve MODEL ...

Importing takes longer than all else of a start. Then it waits for a line on its standard input
and serves. One more line, a `Moment`, and the next write to the cache that comes to it ends the
process as `kill -9` would: what is left in the directory is what a kill there leaves.
"""

import os
import signal
import sys
import threading
from enum import Enum

import rekindle.server  # noqa: F401
from rekindle.cli import main


class Moment(Enum):
    EMPTY_FILE = "the temporary file was made"
    HALF_A_FILE = "half of it was written"
    WHOLE_FILE = "all of it was, and it was not renamed yet"
    RENAMED = "it was renamed, and its row may be missing"
    REMOVED_ROW = "the row was removed, and its file was not yet"


_SHARE_WRITTEN = {Moment.EMPTY_FILE: 0.0, Moment.HALF_A_FILE: 0.5}


def armed(moment: Moment) -> str:
    """The line in the log from which on the moment counts."""
    return f"standby: dies at {moment.name}"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_when_gone(path: str) -> None:
    while os.path.exists(path):
        pass
    _die()


def _die_at(moment: Moment) -> None:
    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        """Python calls this before each system call."""
        if event not in ("os.rename", "os.remove"):
            return
        path = os.fspath(arguments[0])  # type: ignore[call-overload]
        if event == "os.remove":
            if moment is Moment.REMOVED_ROW and path.endswith(".kv"):
                _die()
        elif path.endswith(".tmp") and moment is Moment.RENAMED:
            threading.Thread(target=_die_when_gone, args=(path,), daemon=True).start()
        elif path.endswith(".tmp") and moment is not Moment.REMOVED_ROW:
            if moment in _SHARE_WRITTEN:
                os.truncate(path, int(os.path.getsize(path) * _SHARE_WRITTEN[moment]))
            _die()

    sys.addaudithook(on_event)
    sys.stderr.write(f"{armed(moment)}\n")


def _obey() -> None:
    if line := sys.stdin.readline():
        _die_at(Moment[line.strip()])


if __name__ == "__main__":
    if sys.stdin.readline():
        threading.Thread(target=_obey, daemon=True).start()
        main()
