"""Worker threads that move entries between memory and one store.

The engine thread submits jobs and polls for events; it never waits here. Disk and shared store
use the same classes. One thread writes, in order: room is made before it is used.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Protocol

from rekindle.cache.entry import Entry, Key
from rekindle.cache.stores.read_queue import ReadOrder, ReadQueue
from rekindle.errors import CacheError, EntryCorrupt, TierFailed, TierFull

_log = logging.getLogger(__name__)

STOPPING = "the server is stopping"

Job = Callable[[], None]


class Lane(Enum):
    """A queue of jobs with threads of its own."""

    WRITE = "writer"
    READ = "reader"
    LOOKUP = "lookup"


class BackTier(Protocol):
    """A byte store behind memory. Only transfer threads call it."""

    def get(self, key: Key) -> Entry:
        """Return the verified entry. Raises EntryMissing, EntryCorrupt or TierFailed."""
        ...

    def put(self, entry: Entry) -> list[Key]:
        """Store the entry. Return the keys evicted for it. Raises TierFailed."""
        ...

    def drop(self, keys: Sequence[Key]) -> None:
        """Delete the entries. Raises TierFailed."""
        ...

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """Mark the entries as used. Return the keys that are missing. Raises TierFailed."""
        ...

    def quarantine(self, key: Key, why: str) -> None:
        """Remove an entry that the backend refused although its checksums match."""
        ...


@dataclass(frozen=True, slots=True)
class Written:
    key: Key
    evicted: list[Key]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    key: Key
    trouble: str | None  # None: the tier works, but has no room for this entry


@dataclass(frozen=True, slots=True)
class Dropped:
    """Deleted on request. An entry listed later under such a key is a new one."""

    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Vanished:
    """Deleted by another process: another server, `rekindle cache`, `rm -rf`."""

    keys: list[Key]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The entry that a read asked for."""

    entry: Entry
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    key: Key
    error: CacheError


class TransferPool:
    """Threads by lane, and the queue of their events.

    `n_threads` gives the threads of each lane. The threads call `notify` after each event.
    Jobs still queued `abandon_seconds` after the grace period of `close` are lost.
    """

    def __init__(
        self,
        name: str,
        n_threads: Mapping[Lane, int],
        notify: Callable[[], None],
        *,
        abandon_seconds: float,
    ) -> None:
        self.name = name
        self.notify = notify
        self.is_abandoned = False
        self._abandon_seconds = abandon_seconds
        self._events: SimpleQueue[object] = SimpleQueue()
        self._jobs: dict[Lane, SimpleQueue[Job | None]] = {lane: SimpleQueue() for lane in Lane}
        self._threads = [
            threading.Thread(
                target=_run_jobs,
                args=(self._jobs[lane],),
                name=f"{name}-{lane.value}-{n}" if n_of_lane > 1 else f"{name}-{lane.value}",
                daemon=True,
            )
            for lane, n_of_lane in n_threads.items()
            for n in range(n_of_lane)
        ]
        self._n_threads = n_threads

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Lane, job: Job) -> None:
        self._jobs[lane].put(job)

    def emit(self, event: object) -> None:
        self._events.put(event)
        self.notify()

    def poll(self) -> object | None:
        """Return the next event without waiting; None if there is none."""
        return None if self._events.empty() else self._events.get()

    def wait(self, timeout_seconds: float) -> object | None:
        """Return the next event, for callers with nothing else to do: start-up and shutdown."""
        try:
            return self._events.get(timeout=timeout_seconds)
        except Empty:
            return None

    def close(self, grace_seconds: float) -> bool:
        """Finish the queued jobs within the grace period. Return False if a thread hangs."""
        for lane, n_of_lane in self._n_threads.items():
            for _ in range(n_of_lane):
                self._jobs[lane].put(None)
        if not self._join(grace_seconds):
            self.is_abandoned = True
        has_ended = self._join(self._abandon_seconds)
        if not has_ended:
            _log.warning("%s: threads still running, pending transfers are lost", self.name)
        return has_ended

    def _join(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class EntryTransfers:
    """Writes, reads, touches and deletes the entries of one tier on the threads of a pool.

    After a failure, writes pause for `retry_seconds`: each attempt copies the bytes.
    Reads overlap, so a read's time starts where the previous read ended.
    """

    def __init__(
        self,
        tier: BackTier,
        pool: TransferPool,
        *,
        retry_seconds: float,
    ) -> None:
        self.trouble: str | None = None
        self.pool = pool
        self.reads = ReadQueue()
        self._tier = tier
        self._retry_seconds = retry_seconds
        self._retry_at = 0.0
        self._quiet_until = 0.0
        self._deferred: list[Job] = []  # deletions that the tier refused
        self._lock = threading.Lock()
        self._read_ended_at = 0.0

    def start(self) -> None:
        self.pool.start()

    def write(self, entry: Entry) -> None:
        self.pool.submit(Lane.WRITE, lambda: self._write(entry))

    def read(self, key: Key, order: ReadOrder) -> None:
        self.reads.put(key, order)
        self.pool.submit(Lane.READ, self._read_next)

    def touch(self, keys: Sequence[Key]) -> None:
        self.submit_optional(lambda: self._touch(keys))

    def quarantine(self, key: Key, why: str) -> None:
        self.submit_optional(lambda: self._tier.quarantine(key, why))

    def drop(self, keys: Sequence[Key]) -> None:
        self.submit_deletion(lambda: self._drop(keys))

    def submit_optional(self, action: Job) -> None:
        """Run the action on the write thread; skip it while writes are paused."""
        self.pool.submit(Lane.WRITE, lambda: self._unless_resting(action))

    def submit_deletion(self, action: Job) -> None:
        """Run the action on the write thread; if the tier refuses, retry after the next write.

        A deleted entry must not be there after a restart.
        """
        self.pool.submit(Lane.WRITE, lambda: self._delete_or_defer(action))

    def close(self, grace_seconds: float) -> bool:
        """Finish the queued jobs within the grace period. Return False if a thread hangs."""
        self.pool.submit(Lane.WRITE, self._flush_deferred_deletes)
        return self.pool.close(grace_seconds)

    def rest(self, error: TierFailed) -> None:
        self._retry_at = time.monotonic() + self._retry_seconds
        self.trouble = error.message

    def quietly(self, action: Job) -> None:
        """Run an action that may fail without harm: the next write reports the failure."""
        try:
            action()
        except CacheError as error:
            _log.debug("%s: %s", self.pool.name, error.message)
            # The call may have waited for seconds, and writes queue behind it.
            self._quiet_until = time.monotonic() + self._retry_seconds

    def _after_change(self) -> None:
        """Run on the write thread after each put and touch."""

    @property
    def _is_resting(self) -> bool:
        return self.pool.is_abandoned or time.monotonic() < self._retry_at

    def _write(self, entry: Entry) -> None:
        key = entry.header.key
        if self._is_resting:
            self.pool.emit(WriteFailed(key, self.trouble or STOPPING))
            return
        try:
            evicted = self._tier.put(entry)
            self._after_change()
        except TierFull as error:
            _log.debug("%s: not written entry=%s: %s", self.pool.name, key.hex(), error.message)
            self.pool.emit(WriteFailed(key, None))
        except TierFailed as error:
            self.rest(error)
            self.pool.emit(WriteFailed(key, error.message))
        except Exception as error:  # the engine expects an event for every job
            _log.exception("%s: write failed entry=%s", self.pool.name, key.hex())
            self.pool.emit(WriteFailed(key, f"it failed: {error}"))
        else:
            self._retry_at, self.trouble = 0.0, None
            if not self._is_quiet:
                self._flush_deferred_deletes()
            self.pool.emit(Written(key, evicted))

    def _read_next(self) -> None:
        key = self.reads.take()
        if key is not None:  # else a read was withdrawn
            event = self._read(key)
            self.reads.end(key)
            self.pool.emit(event)

    def _read(self, key: Key) -> Arrived | ReadFailed:
        began = time.perf_counter()
        try:
            if self.pool.is_abandoned:
                raise TierFailed(STOPPING)
            entry = self._tier.get(key)
        except CacheError as error:
            level = logging.WARNING if isinstance(error, EntryCorrupt) else logging.INFO
            _log.log(
                level, "%s: read failed entry=%s: %s", self.pool.name, key.hex(), error.message
            )
            return ReadFailed(key, error)
        except Exception as error:
            _log.exception("%s: read failed entry=%s", self.pool.name, key.hex())
            return ReadFailed(key, TierFailed(f"it failed: {error}"))
        return Arrived(entry, self._seconds_since(began))

    def _seconds_since(self, began: float) -> float:
        with self._lock:
            ended = time.perf_counter()
            began = max(began, self._read_ended_at)
            self._read_ended_at = ended
        return ended - began

    def _touch(self, keys: Sequence[Key]) -> None:
        if gone := self._tier.touch(keys):
            self.pool.emit(Vanished(gone))
        self._after_change()

    def _drop(self, keys: Sequence[Key]) -> None:
        self._tier.drop(keys)
        self.pool.emit(Dropped(keys))

    @property
    def _is_quiet(self) -> bool:
        """Whether something other than a write failed a moment ago."""
        return time.monotonic() < self._quiet_until

    def _unless_resting(self, action: Job) -> None:
        if not self._is_resting and not self._is_quiet:
            self.quietly(action)

    def _delete_or_defer(self, action: Job) -> None:
        if time.monotonic() < self._retry_at or self._is_quiet:
            self._deferred.append(action)
        else:
            self._delete(action)

    def _delete(self, action: Job) -> None:
        try:
            action()
        except TierFailed as error:
            _log.warning("%s: delete failed, retrying later: %s", self.pool.name, error.message)
            self._quiet_until = time.monotonic() + self._retry_seconds
            self._deferred.append(action)

    def _flush_deferred_deletes(self) -> None:
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self._delete(action)


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # without this thread nothing would be written any more
            _log.exception("cache: a transfer job failed")
