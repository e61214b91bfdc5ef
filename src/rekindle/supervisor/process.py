"""One engine process, from its start to its end, as the server sees it."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from rekindle.errors import EngineDied, ShuttingDown, StartupError
from rekindle.generation.status import DeathCause
from rekindle.link.activity_page import ActivityPage, LastActivity, new_page_file
from rekindle.link.encoding import decode_report, encode
from rekindle.link.frames import can_receive, framed, receive
from rekindle.link.messages import Load, Loaded, LoadedModel, LoadFailed, Loading, Logged, Order

_log = logging.getLogger("rekindle.engine")

LAST_LINES = 40  # of stderr, for the log; picked
LOOK_SECONDS = 0.5  # between two looks at a process that loads; picked
LOAD_HANG_SECONDS = 60.0  # without a heartbeat while a process loads; picked
START_SECONDS = 600.0  # without progress of the load, or until the first step; picked
EXIT_SECONDS = 5.0  # for a process that has closed its link to end; picked


_CAUSES = {
    -signal.SIGSEGV: DeathCause.SEGFAULT,
    -signal.SIGBUS: DeathCause.SEGFAULT,
    -signal.SIGABRT: DeathCause.ABORT,
    -signal.SIGKILL: DeathCause.KILLED,
}


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended, and what it did last."""

    cause: DeathCause
    code: int  # exit code; a negative one is a signal
    doing: LastActivity
    last_words: str
    lived_seconds: float

    def __str__(self) -> str:
        if self.cause is DeathCause.HANG:
            return "it made no step for too long and was ended"
        if self.code >= 0:
            return f"it exited with code {self.code}"
        with suppress(ValueError):  # a real-time signal has no name
            return f"it was ended by {signal.Signals(-self.code).name}"
        return f"it was ended by signal {-self.code}"


class EngineProcess:
    module = "rekindle.engine_process"  # that the process runs

    def __init__(self) -> None:
        """Start the process, which then waits for a `Load`."""
        self.sock, theirs = socket.socketpair()
        page_file = new_page_file()
        self.page = ActivityPage(page_file)
        descriptors = (theirs.fileno(), page_file)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # When the server dies, the kernel wakes a stopped process of an orphaned group.
                process_group=0,
            )
        finally:
            theirs.close()
            os.close(page_file)
        self.pid = self._process.pid
        self.was_hung = False
        self._began_at = time.monotonic()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        assert self._process.stderr is not None
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stderr,), name="engine-stderr", daemon=True
        )
        self._listener.start()

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                text = line.decode("utf-8", "replace").rstrip()
                self._lines.append(text)
                _log.debug("engine: stderr pid=%d: %s", self.pid, text)

    def send(self, order: Order) -> None:
        """Send an order and wait until the kernel takes it. Only before the link is served."""
        try:
            self.sock.sendall(framed(encode(order)))
        except OSError:
            raise EngineDied(f"The engine process has ended: {self.death()}.") from None

    def load(self, order: Load, on_progress: Callable[[float], bool]) -> LoadedModel:
        """Load the model and wait for it. Blocks.

        Raises StartupError, EngineDied, and ShuttingDown if `on_progress` returns False.
        """
        self.send(order)
        fraction = 0.0
        while (message := self._next_message(partial(on_progress, fraction))) is not None:
            match decode_report(message):
                case Loading(fraction):
                    pass
                case Loaded(model):
                    return model
                case LoadFailed(reason):
                    self.kill()
                    raise StartupError(reason)
                case Logged() as line:
                    write_log(line)
        death = self.death()
        if death.last_words:
            _log.error("engine: last words pid=%d:\n%s", self.pid, death.last_words)
        raise EngineDied(f"The engine process died while it loaded the model: {death}.")

    def _next_message(self, may_go_on: Callable[[], bool]) -> bytes | None:
        """Return the next message of a process that loads; None: it has ended.

        Raises ShuttingDown if `may_go_on` says no. A process without a heartbeat, or without
        progress for very long, is killed.
        """
        n_looks, n_silent, last = 0, 0, self.page.pulse()
        while True:
            if not may_go_on():
                self.kill()
                raise ShuttingDown("The server is shutting down.")
            if can_receive(self.sock, LOOK_SECONDS):
                return receive(self.sock)
            n_silent += 1
            pulse = self.page.pulse()
            n_looks = n_looks + 1 if pulse == last else 0
            last = pulse
            is_still = n_looks * LOOK_SECONDS > LOAD_HANG_SECONDS
            if is_still or n_silent * LOOK_SECONDS > START_SECONDS:
                self.kill(is_hung=True)

    def hang_up(self) -> None:
        """Close the link: the process stores what it holds, and ends."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def kill(self, *, is_hung: bool = False) -> None:
        self.was_hung |= is_hung
        self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process. Return False if it still runs."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> Death:
        """Wait for the end of a process whose link is closed, and return how it ended. Blocks."""
        if not self.wait(EXIT_SECONDS):
            self.kill(is_hung=True)
            self._process.wait()
        self._listener.join(EXIT_SECONDS)
        code = self._process.returncode
        cause = DeathCause.EXIT if code >= 0 else _CAUSES.get(code, DeathCause.SIGNAL)
        return Death(
            DeathCause.HANG if self.was_hung else cause,
            code,
            self.page.last(),
            "\n".join(self._lines),
            time.monotonic() - self._began_at,
        )

    def close(self) -> None:
        """End the process if it runs, and free what belongs to it. Blocks for a moment."""
        self.kill()
        self._process.wait()
        self.sock.close()


def write_log(line: Logged) -> None:
    logging.getLogger(line.logger).log(line.level, "%s", line.text)
