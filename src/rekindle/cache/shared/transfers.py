"""Threads that move bytes to and from the shared store, and ask it what it has.

As `transfers`, for a store that may be far away: several reads are under way at once, and a
question about a prompt never waits behind them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rekindle.cache.disk.transfers import (
    Arrived,
    Job,
    ReadFailed,
    Vanished,
    WriteFailed,
    Written,
    do_jobs,
)
from rekindle.cache.entry import Entry, Header, Key
from rekindle.cache.shared.tier import SharedTier
from rekindle.errors import CacheError, TierFailed, TierFull

_log = logging.getLogger(__name__)

N_READERS = 4  # picked; one connection alone does not fill a network
N_PROBERS = 2  # picked
ABANDON_SECONDS = 1.5  # for what is under way when the rest is given up; a timeout or so


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """What follows a known block in a prompt."""

    id: int
    parent: Key  # of the last whole block that is known, or the root
    start: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Probed:
    id: int
    headers: list[Header]  # parents first
    trouble: str | None


SharedEvent = Written | WriteFailed | Vanished | Arrived | ReadFailed | Probed


class SharedTransfers:
    """`notify` is called from these threads whenever there is something to poll."""

    def __init__(
        self,
        tier: SharedTier,
        notify: Callable[[], None],
        *,
        has_rows: bool,
        has_checkpoints: bool,
    ) -> None:
        self._tier = tier
        self._notify = notify
        self._has_rows = has_rows
        self._has_checkpoints = has_checkpoints
        self._events: SimpleQueue[SharedEvent] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._probes: SimpleQueue[Job | None] = SimpleQueue()
        self._is_abandoned = False
        self._undropped: list[Sequence[Key]] = []  # the writer's own
        self._read_ended_at = 0.0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=do_jobs, args=(jobs,), name=name, daemon=True)
            for name, jobs in [
                ("shared-writer", self._writes),
                *((f"shared-reader-{n}", self._reads) for n in range(N_READERS)),
                *((f"shared-prober-{n}", self._probes) for n in range(N_PROBERS)),
            ]
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There is something to look at, though nothing to poll."""
        self._notify()

    def write(self, entry: Entry) -> None:
        self._writes.put(lambda: self._write(entry))

    def read(self, key: Key) -> None:
        self._reads.put(lambda: self._read(key))

    def probe(self, inquiry: Inquiry) -> None:
        self._probes.put(lambda: self._probe(inquiry))

    def touch(self, keys: Sequence[Key]) -> None:
        self._writes.put(lambda: self._quietly(lambda: self._touch(keys)))

    def drop(self, keys: Sequence[Key]) -> None:
        self._writes.put(lambda: self._drop(keys))

    def quarantine(self, key: Key, why: str) -> None:
        self._writes.put(lambda: self._quietly(lambda: self._tier.quarantine(key, why)))

    def poll(self) -> SharedEvent | None:
        return None if self._events.empty() else self._events.get()

    def wait(self, timeout_seconds: float) -> SharedEvent | None:
        try:
            return self._events.get(timeout=timeout_seconds)
        except Empty:
            return None

    def close(self, grace_seconds: float) -> None:
        """Finishes what is queued, for a while, then gives up on the rest."""
        self._writes.put(self._flush_deferred_deletes)
        for jobs, n_threads in (
            (self._writes, 1),
            (self._reads, N_READERS),
            (self._probes, N_PROBERS),
        ):
            for _ in range(n_threads):
                jobs.put(None)
        deadline = time.monotonic() + grace_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._is_abandoned = True
        deadline = time.monotonic() + ABANDON_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("cache: the shared store hangs, and what was on its way there is lost")

    def _emit(self, event: SharedEvent) -> None:
        self._events.put(event)
        self._notify()

    def _write(self, entry: Entry) -> None:
        key = entry.header.key
        if self._is_abandoned:
            self._emit(WriteFailed(key, "the server is stopping"))
            return
        try:
            self._tier.put(entry)
        except TierFull:
            self._emit(WriteFailed(key, None))
        except TierFailed as error:
            self._emit(WriteFailed(key, error.message))
        except Exception as error:  # the loop waits for a word about every job
            _log.exception("an entry could not be written to the shared store")
            self._emit(WriteFailed(key, f"it failed: {error}"))
        else:
            self._flush_deferred_deletes()
            self._emit(Written(key, [], 0))

    def _drop(self, keys: Sequence[Key]) -> None:
        """What somebody deleted must not be found again: a store that is ill is told later."""
        try:
            self._tier.drop(keys)
        except CacheError as error:
            _log.warning("cache: %d entries are still to be deleted: %s", len(keys), error.message)
            self._undropped.append(keys)

    def _flush_deferred_deletes(self) -> None:
        owed, self._undropped = self._undropped, []
        for keys in owed:
            self._drop(keys)

    def _read(self, key: Key) -> None:
        began = time.perf_counter()
        try:
            if self._is_abandoned:
                raise TierFailed("the server is stopping")
            entry = self._tier.get(key)
        except CacheError as error:
            _log.info("cache: %s", error.message)
            self._emit(ReadFailed(key, error))
        except Exception as error:
            _log.exception("entry %s could not be read from the shared store", key.hex())
            self._emit(ReadFailed(key, TierFailed(f"it failed: {error}")))
        else:
            self._emit(Arrived(entry, self._seconds_since(began)))

    def _seconds_since(self, began: float) -> float:
        """Reads overlap, so the time of one starts where the one before it ended."""
        with self._lock:
            ended = time.perf_counter()
            seconds = ended - max(began, self._read_ended_at)
            self._read_ended_at = ended
        return seconds

    def _probe(self, inquiry: Inquiry) -> None:
        try:
            if self._is_abandoned:
                raise TierFailed("the server is stopping")
            headers = self._tier.probe(
                inquiry.parent,
                inquiry.start,
                inquiry.tokens,
                has_rows=self._has_rows,
                has_checkpoints=self._has_checkpoints,
            )
        except CacheError as error:
            self._emit(Probed(inquiry.id, [], error.message))
        except Exception as error:  # a request waits for a word
            _log.exception("the shared store could not be asked")
            self._emit(Probed(inquiry.id, [], f"it failed: {error}"))
        else:
            self._emit(Probed(inquiry.id, headers, None))

    def _touch(self, keys: Sequence[Key]) -> None:
        if gone := self._tier.touch(keys):
            self._emit(Vanished(gone))

    def _quietly(self, action: Callable[[], None]) -> None:
        """What may fail without harm; the store's health is told by whoever asked it."""
        if self._is_abandoned:
            return
        try:
            action()
        except CacheError as error:
            _log.debug("the shared store: %s", error.message)
