"""Writes in the background: a bounded queue of changes and the thread that writes them."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Generic, TypeVar

from rekindle.bounded_cache import BoundedCache
from rekindle.errors import RekindleError

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class WriteBehind(Generic[K, V]):
    """A queue of changes by key. Any thread may call it; none waits for the disk.

    A change stays in the queue until it is written, so `peek` finds everything unwritten.
    Beyond the bounds, the oldest changes are dropped.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[dict[K, V]], None],
        *,
        retry_seconds: float | None,
        max_batch: int | None = None,
        max_items: int | None = None,
        max_bytes: int | None = None,
        size_of: Callable[[V], int] = lambda value: 0,
        merge: Callable[[V, V], V] = lambda before, new: new,
        is_ready: Callable[[], bool] = lambda: True,
        on_dropped: Callable[[K], None] = lambda key: None,
    ) -> None:
        """`name` is for log lines. `write` gets up to `max_batch` changes and may raise.

        After an error the changes are written again `retry_seconds` later; None: dropped.
        `merge` combines an unwritten change with a new one of its key. Nothing is written unless
        `is_ready`. `on_dropped` is called with the key of each dropped change.
        """
        self._name = name
        self._write = write
        self._retry_seconds = retry_seconds
        self._max_batch = max_batch
        self._size_of = size_of
        self._merge = merge
        self._is_ready = is_ready
        self._on_dropped = on_dropped
        self._changed = threading.Condition()  # guards everything below
        self._queue: BoundedCache[K, V] = BoundedCache(max_items=max_items, max_bytes=max_bytes)
        self._is_woken = False
        self._is_writing = False
        self._is_failing = False
        self._retry_at = 0.0
        self._close_by: float | None = None
        self._gave_up = False  # a write failed while closing
        self._thread = threading.Thread(target=self._work, name=f"{name}-writer", daemon=True)
        self._thread.start()

    @property
    def n_bytes(self) -> int:
        return self._queue.n_bytes

    def peek(self, key: K) -> V | None:
        """Return the unwritten change; None if there is none."""
        with self._changed:
            return self._queue.peek(key)

    def unwritten(self) -> list[K]:
        """Return the keys of all unwritten changes."""
        with self._changed:
            return list(self._queue)

    def put(self, key: K, value: V) -> None:
        self.put_all({key: value})

    def put_all(self, changes: Mapping[K, V]) -> None:
        dropped = []
        with self._changed:
            for key, value in changes.items():
                before = self._queue.peek(key)
                merged = value if before is None else self._merge(before, value)
                if evicted := self._queue.put(key, merged, n_bytes=self._size_of(merged)):
                    dropped += evicted
            self._changed.notify_all()
        for key, _ in dropped:
            self._on_dropped(key)

    def discard(self, key: K) -> V | None:
        """Remove and return an unwritten change. A write under way may still include it."""
        with self._changed:
            return self._queue.pop(key)

    def wake(self) -> None:
        """Have `write` called soon, with an empty batch if the queue is empty."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def report(self, error: Exception) -> None:
        """Log a failure of the storage: once, until a write succeeds."""
        with self._changed:
            is_known, self._is_failing = self._is_failing, True
        if not is_known:
            is_dropped = self._retry_seconds is None
            _log.warning(
                "%s: storage failing, %s: %s",
                self._name,
                "records are being dropped" if is_dropped else "continuing in memory",
                error,
                exc_info=None if _is_expected(error) else error,
            )

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty or `is_ready` is false. Return whether it is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle() or not self._is_ready(), timeout_seconds)
            return self._is_idle()

    def close(self, timeout_seconds: float) -> bool:
        """Write the queue and end the thread. Return False if the thread is still writing."""
        with self._changed:
            self._close_by = time.monotonic() + timeout_seconds
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.warning("%s: closed before everything was written", self._name)
        return not self._thread.is_alive()

    def settle(self, batch: dict[K, V]) -> None:
        """Remove the changes that were not replaced while they were written.

        `write` may call it too, so that no change is at once in the queue and on the disk.
        """
        with self._changed:
            for key, value in batch.items():
                if self._queue.peek(key) is value:
                    self._queue.pop(key)

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._write(batch)
            except Exception as error:  # without this thread nothing would be written any more
                self.report(error)
                if self._retry_seconds is not None and _is_expected(error):
                    self._retry_in(self._retry_seconds)
                else:
                    self.settle(batch)
                    for key in batch:
                        self._on_dropped(key)
            else:
                self.settle(batch)
                self._note_success(batch)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _next_batch(self) -> dict[K, V] | None:
        with self._changed:
            while not self._is_done():
                seconds_left = self._retry_at - time.monotonic()
                is_due = seconds_left <= 0 or self._close_by is not None
                has_work = bool(self._queue) or self._is_woken
                if is_due and has_work and self._is_ready():
                    self._is_woken = False
                    self._is_writing = True
                    return dict(islice(self._queue.items(), self._max_batch))
                self._changed.wait(seconds_left if has_work and not is_due else None)
        return None

    def _is_done(self) -> bool:
        return self._close_by is not None and (
            not self._queue
            or self._gave_up
            or not self._is_ready()
            or time.monotonic() >= self._close_by
        )

    def _is_idle(self) -> bool:
        return not self._queue and not self._is_writing

    def _retry_in(self, seconds: float) -> None:
        with self._changed:
            self._retry_at = time.monotonic() + seconds
            self._is_woken = True
            self._gave_up = self._close_by is not None

    def _note_success(self, batch: dict[K, V]) -> None:
        with self._changed:
            self._retry_at = 0.0
            has_recovered = bool(batch) and self._is_failing
            if has_recovered:
                self._is_failing = False
        if has_recovered:
            _log.info("%s: storage works", self._name)


def _is_expected(error: Exception) -> bool:
    return isinstance(error, (RekindleError, OSError))
