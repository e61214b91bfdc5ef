"""Counts stalls: times over 100 ms in which a thread that others wait for does not serve them.

A thread `watchdog` looks at the watched thread four times a second: where all cores compute, each
look costs 0.2 ms. While a stall lasts, it takes the stack of the watched thread for the log; a
stall between two looks is counted without one. Time in which the machine ran something else does
not count: Linux tells how long a thread was ready and had no core, and how long the host of a
virtual machine ran another one.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from rekindle.generation.status import Stalls

STALL_SECONDS = 0.1
BEAT_SECONDS = 0.1  # between two beats of the event loop; picked
LOOK_SECONDS = 0.25  # between two looks; picked
LOOKS_PER_NOTE = 2  # after so many, the delays of all threads are noted; picked
LOG_SECONDS = 10.0  # between two lines of the log; picked
MAX_FRAMES = 8
IDLE = ("threading:", "queue:", "selectors:", "concurrent.futures.thread:")  # threads that wait

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ThreadWatchdog:
    """Counts times over 100 ms in which a thread was busy and served nobody.

    The thread says when it is busy. `on_stall` gets the seconds of a stall, on that thread.
    """

    def __init__(self, what: str, on_stall: Callable[[float], None]) -> None:
        self._on_stall = on_stall
        self._log = _StallLog(what)
        self._is_stopped = threading.Event()
        self._busy_since = 0.0  # 0: the thread is not busy
        self._watched: _WatchedThread | None = None
        # Of the thread `watchdog`:
        self._seen = 0.0  # the last `_busy_since` that it saw
        self._stack = ""  # taken since then
        self._delay_before, self._last_delay = 0.0, 0.0
        self._others = _OtherDelays()

    def start(self) -> None:
        """Watch this thread."""
        self._others = _OtherDelays(threading.get_native_id())
        self._watched = _WatchedThread(threading.get_ident(), _RunDelay(threading.get_native_id()))
        self._last_delay = self._watched.delay.read()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self.free()
        self._is_stopped.set()

    def busy(self, since: float = 0.0) -> None:
        """Note that the thread works and others may wait, now or from `since` on."""
        self._busy_since = since or time.monotonic()

    def free(self) -> None:
        """Note that nobody waits for the thread any more."""
        since, self._busy_since = self._busy_since, 0.0
        if since and (seconds := time.monotonic() - since) > STALL_SECONDS:
            self._note(seconds, since)

    def _note(self, seconds: float, since: float) -> None:
        stack = ""
        if self._watched is not None:
            was_seen = self._seen == since
            before = self._delay_before if was_seen else self._last_delay
            stack = self._stack if was_seen else ""
            seconds -= self._watched.delay.read() - before + self._others.seconds()
        if seconds > STALL_SECONDS:
            self._on_stall(seconds)
            self._log.write(seconds, stack)

    def _watch(self) -> None:
        watched = self._watched
        assert watched is not None
        while not self._is_stopped.wait(LOOK_SECONDS):
            since = self._busy_since
            if since != self._seen:
                self._delay_before, self._stack = self._last_delay, ""
                self._seen = since
            if since and not self._stack and time.monotonic() - since > STALL_SECONDS:
                self._stack = watched.stack()
            self._last_delay = watched.delay.read()
            if not since or time.monotonic() < since:
                self._others.note()
        watched.delay.close()


class EngineWatchdog(ThreadWatchdog):
    """Counts times over 100 ms between two computations of the engine thread.

    The engine thread is free while it computes or waits for an order: a batch of a large model
    may take long.
    """

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        super().__init__("engine: thread", on_stall)


class EventLoopWatchdog:
    """Counts how often a callback of the event loop came over 100 ms late.

    A stall may be a long callback, a native call that holds the GIL, or many callbacks at once.
    """

    def __init__(self) -> None:
        self.stalls = Stalls()
        self._watchdog = ThreadWatchdog("server: event loop", self.stalls.note)
        self._next_beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch the event loop of this thread."""
        self._watchdog.start()
        self._beat(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._watchdog.stop()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watchdog.free()
        self._watchdog.busy(since=time.monotonic() + BEAT_SECONDS)
        self._next_beat = loop.call_later(BEAT_SECONDS, self._beat, loop)


class _WatchedThread:
    def __init__(self, ident: int, delay: "_RunDelay") -> None:
        self.ident = ident
        self.delay = delay

    def stack(self) -> str:
        """Return where the thread is now, the innermost call first.

        The cause may be a call of another thread that holds the GIL, so these are named too.
        """
        frames = sys._current_frames()
        others = [
            calls[0]
            for ident, frame in frames.items()
            if ident not in (self.ident, threading.get_ident())
            and (calls := _calls(frame))
            and not calls[0].startswith(IDLE)
        ]
        beside = f" beside={', '.join(others[:MAX_FRAMES])}" if others else ""
        return " < ".join(_calls(frames.get(self.ident))) + beside


def _calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < MAX_FRAMES:
        module = frame.f_globals.get("__name__", "?")
        calls.append(f"{module}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return calls


class _RunDelay:
    """Tells how long a thread was ready to run and had no core. Always 0 except on Linux."""

    def __init__(self, native_id: int) -> None:
        self.native_id = native_id
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)

    def read(self) -> float:
        if self._descriptor is None:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended
            return 0.0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _OtherDelays:
    """How long another Python thread of the process was ready and had no core.

    A thread that holds the GIL and has no core stops all others. The last note is up to
    `LOOKS_PER_NOTE` looks old.
    """

    def __init__(self, *without: int) -> None:
        self._without = without  # native ids of threads
        self._n_looks = 0
        self._noted, self._stolen = self._read(), _stolen_seconds()

    def note(self) -> None:
        self._n_looks += 1
        if self._n_looks % LOOKS_PER_NOTE == 0:
            self._noted, self._stolen = self._read(), _stolen_seconds()

    def seconds(self) -> float:
        """Return the longest delay since the last note, and the time that a core was taken away."""
        return _growth(self._noted, self._read()) + _growth(self._stolen, _stolen_seconds())

    def _read(self) -> dict[int, float]:
        ids = [each.native_id for each in threading.enumerate()]
        return {each: _run_delay(each) for each in ids if each and each not in self._without}


def _growth(before: dict[T, float], now: dict[T, float]) -> float:
    return max((now[each] - before.get(each, 0.0) for each in now), default=0.0)


def _run_delay(native_id: int) -> float:
    delay = _RunDelay(native_id)
    try:
        return delay.read()
    finally:
        delay.close()


def _stolen_seconds() -> dict[str, float]:
    """Return how long the host gave each core to another virtual machine."""
    try:
        lines = Path("/proc/stat").read_text("ascii").splitlines()
    except OSError:
        return {}
    cores = [line.split() for line in lines if line.startswith("cpu")]
    return {core[0]: int(core[8]) / os.sysconf("SC_CLK_TCK") for core in cores[1:]}


class _StallLog:
    def __init__(self, what: str) -> None:
        self._what = what
        self._next_at = 0.0

    def write(self, seconds: float, stack: str) -> None:
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + LOG_SECONDS
            _log.warning("%s stalled seconds=%.2f at=%s", self._what, seconds, stack or "unknown")
