"""The shared store's circuit breaker, and the calls that it guards.

While it is open, calls to the store fail at once. A thread pings the store, less and less often,
and closes the breaker when the store answers.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rekindle.cache.shared.objects import KEEP_SECONDS, ObjectStore
from rekindle.errors import StoreUnreachable, TierFailed, TierFull
from rekindle.generation.model_state import Payload

_log = logging.getLogger(__name__)

# All four are picked.
PING_SECONDS, DEAR_PING_SECONDS = 0.25, 1.0  # a ping that takes longer has failed
MIN_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 15.0
MAX_FAILURES = 2  # in a row; a refused connection is enough alone

_CLOSE_SECONDS = 1.0

Answer = TypeVar("Answer")


class StoreHealth:
    """Any thread may call. `ping` raises TierFailed."""

    def __init__(
        self,
        place: str,
        ping: Callable[[], None],
        *,
        ping_seconds: float,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._place = place
        self._ping = ping
        self._ping_seconds = ping_seconds
        self.now = now  # the clock of `began_at`
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self.trouble: str | None = None  # why the breaker is open; None while it is closed
        self._troubled_since = 0.0
        self._n_failures = 0  # in a row
        self._failed_at = float("-inf")
        # A store whose pings succeed but whose calls fail must not be tried twice a second.
        self._wait_seconds = MIN_WAIT_SECONDS
        self._watcher: threading.Thread | None = None

    @property
    def is_well(self) -> bool:
        return self.trouble is None

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, in any thread, when the breaker opens or closes.

        Return a function that removes the listener.
        """
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._remove(listener)

    def check(self) -> None:
        """Ping once, at the start. A store that is down opens the breaker at once."""
        if why := self._ping_trouble():
            self.note_failure(why, is_final=True)

    def note_success(self, *, began_at: float | None = None) -> None:
        """Reset the failure count, unless the call began before the last failure.

        A reply to a call that already timed out does not count. `began_at` is in terms of `now`.
        """
        with self._lock:
            if self.trouble is None and (began_at is None or began_at >= self._failed_at):
                self._n_failures = 0
                self._wait_seconds = MIN_WAIT_SECONDS

    def note_failure(self, why: str, *, is_final: bool = False) -> None:
        """Count a call that failed, or that took longer than its caller could wait.

        A final failure, such as a refused connection, opens the breaker at once.
        """
        with self._lock:
            if self.trouble is not None or self._closed.is_set():
                return
            self._failed_at = self.now()
            self._n_failures += MAX_FAILURES if is_final else 1
            if self._n_failures < MAX_FAILURES:
                return
            self.trouble = why
            self._troubled_since = self._failed_at
            self._watcher = threading.Thread(target=self._watch, name="store-health", daemon=True)
            self._watcher.start()
        _log.warning(
            "cache: shared store down, continuing with local tiers: store=%s: %s",
            self._place,
            why,
        )
        self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._listeners.clear()
            watcher = self._watcher
        if watcher is not None:
            watcher.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        while True:
            self._wait(self._next_wait_seconds())
            if self._closed.is_set():
                return
            if self._ping_trouble() is None:
                break
        with self._lock:
            seconds = self.now() - self._troubled_since
            self.trouble = None
            self._n_failures = 0
        if not self._closed.is_set():
            _log.info("cache: shared store up again: store=%s after=%.0fs", self._place, seconds)
            self._notify()

    def _next_wait_seconds(self) -> float:
        with self._lock:
            seconds = self._wait_seconds
            self._wait_seconds = min(2 * seconds, MAX_WAIT_SECONDS)
        return seconds

    def _ping_trouble(self) -> str | None:
        began_at = self.now()
        try:
            self._ping()
        except TierFailed as error:
            return error.message
        except Exception as error:  # without its watcher the breaker would never close
            return f"it failed: {error!r}"
        seconds = self.now() - began_at
        return f"a ping took {seconds:.2f} s" if seconds > self._ping_seconds else None

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _remove(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)


class GuardedObjects:
    """An ObjectStore behind its circuit breaker: calls fail at once while the store is down."""

    def __init__(self, objects: ObjectStore) -> None:
        ping_seconds = DEAR_PING_SECONDS if objects.reads_are_dear else PING_SECONDS
        self.health = StoreHealth(objects.place, objects.ping, ping_seconds=ping_seconds)
        self.place = objects.place
        self.reads_are_dear = objects.reads_are_dear
        self._objects = objects

    def read(self, names: Sequence[str], *, max_bytes: int) -> list[bytes | None]:
        return self._ask(lambda: self._objects.read(names, max_bytes=max_bytes))

    def write(self, name: str, parts: Sequence[Payload]) -> None:
        self._ask(lambda: self._objects.write(name, parts))

    def overwrite(self, name: str, start: Payload) -> None:
        self._ask(lambda: self._objects.overwrite(name, start))

    def add(self, group: str, member: str, *, keep_seconds: int = KEEP_SECONDS) -> None:
        self._ask(lambda: self._objects.add(group, member, keep_seconds=keep_seconds))

    def members(self, groups: Sequence[str], *, limit: int) -> list[list[str]]:
        return self._ask(lambda: self._objects.members(groups, limit=limit))

    def touch(self, names: Sequence[str]) -> list[bool]:
        return self._ask(lambda: self._objects.touch(names))

    def discard(self, group: str, members: Sequence[str]) -> None:
        self._ask(lambda: self._objects.discard(group, members))

    def remove(self, names: Sequence[str]) -> None:
        self._ask(lambda: self._objects.remove(names))

    def pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        pages = self._ask(lambda: self._objects.pages(kinds, folder))
        while (page := self._ask(lambda: next(pages, None))) is not None:
            yield page

    def ping(self) -> None:
        self._ask(self._objects.ping)

    def close(self) -> None:
        self.health.close()
        self._objects.close()

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        if trouble := self.health.trouble:
            raise TierFailed(f"the shared store at {self.place} is down: {trouble}")
        began_at = self.health.now()
        try:
            answer = call()
        except TierFailed as error:
            if not isinstance(error, TierFull):  # a full store works
                is_final = isinstance(error, StoreUnreachable)
                self.health.note_failure(error.message, is_final=is_final)
            raise
        self.health.note_success(began_at=began_at)
        return answer
