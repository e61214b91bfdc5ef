"""A server that is started for one run of an agent, and ends with it."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rekindle.errors import StartupError

_POLL_SECONDS = 0.1
_STOP_SECONDS = 30.0  # picked; beyond the grace that running requests have by default
_SHOWN_LINES = 5


class ChildServer:
    """`rekindle serve` as a child. It is not in the terminal's group: Ctrl-C is the agent's."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rekindle", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, is_ready: Callable[[], bool], show: Callable[[str], None]) -> None:
        """Wait for the server, and show the last line of its log. Raises StartupError."""
        while not is_ready():
            if self._process.poll() is not None:
                raise StartupError(f"The server did not start.\n{self.last_lines(_SHOWN_LINES)}")
            show(self.last_lines(1))
            time.sleep(_POLL_SECONDS)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def last_lines(self, count: int = _SHOWN_LINES) -> str:
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-count:])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave through SystemExit on SIGTERM and SIGHUP, so that a child does not stay behind."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
