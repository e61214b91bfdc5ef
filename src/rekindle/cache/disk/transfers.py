"""Threads that move bytes to and from the disk tier, and nothing else.

The engine loop hands over jobs and polls for what became of them; it never waits here. One
thread writes, in order, so that room is made before it is used; a few read.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.reconcile import Differences
from rekindle.cache.entry import Entry, Key, Retention
from rekindle.cache.listing.names import Named
from rekindle.cache.stores.tier import Tier
from rekindle.errors import CacheError, EntryCorrupt, TierFailed, TierFull

_log = logging.getLogger(__name__)

N_READERS = 2  # one reads while the other checks sums; picked
PROGRESS_SECONDS = 2.0  # picked
RETRY_SECONDS = 5.0  # between attempts to write to a disk that refused; picked
ABANDON_SECONDS = 2.0  # for the one write that is under way when the rest is given up; picked


class WritableTier(Tier, Protocol):
    """What a tier behind threads has beyond the four verbs."""

    directory: Path
    n_opens: int  # each may find another directory than the one before

    def open_as_it_is(self) -> None: ...

    def reconcile(
        self, *, on_progress: Callable[[int, int], None] | None = None
    ) -> Differences: ...

    def rows(self) -> Iterator[list[CatalogRow]]: ...

    def along(self, path: Sequence[Key]) -> list[CatalogRow]: ...

    def touch(self, keys: Sequence[Key]) -> list[Key]: ...

    def mark(self, standings: Sequence[tuple[Key, Retention]]) -> None: ...

    def names(self) -> list[Named]: ...

    def give_name(self, named: Named) -> None: ...

    def drop_names(self, names: Sequence[Named]) -> None: ...

    def quarantine(self, key: Key, why: str) -> None: ...

    def usage_bytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FoundEntries:
    """Entries that were there at the start."""

    rows: list[CatalogRow]


@dataclass(frozen=True, slots=True)
class CatalogueOpened:
    """All of them have been found."""

    trouble: str | None
    n_bytes: int
    names: list[Named]


@dataclass(frozen=True, slots=True)
class Written:
    key: Key
    evicted: list[Key]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    key: Key
    trouble: str | None  # None: the tier is well, it had no room for this one


@dataclass(frozen=True, slots=True)
class Vanished:
    """Somebody else deleted them: another server, `rekindle cache`, `rm -rf`."""

    keys: list[Key]


@dataclass(frozen=True, slots=True)
class Relisted:
    """The directory was away, or was replaced: this and nothing else is in it."""

    keys: frozenset[Key]


@dataclass(frozen=True, slots=True)
class Dropped:
    """They are off the disk: what is listed after this and has such a key is new."""

    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Arrived:
    """An entry that was asked for."""

    entry: Entry
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadFailed:
    key: Key
    error: CacheError


Event = (
    FoundEntries
    | CatalogueOpened
    | Written
    | WriteFailed
    | Vanished
    | Relisted
    | Dropped
    | Arrived
    | ReadFailed
)
Job = Callable[[], None]


class Transfers:
    """`notify` is called from these threads whenever there is something to poll."""

    def __init__(self, tier: WritableTier, notify: Callable[[], None]) -> None:
        self._tier = tier
        self._notify = notify
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._retry_at = 0.0
        self._quiet_until = 0.0
        self._trouble: str | None = None
        self._n_opens_told = 0
        self._owed: list[Job] = []  # deletions that the disk refused; the writer's own
        self._abandoned = threading.Event()
        self._threads = [
            threading.Thread(target=do_jobs, args=(jobs,), name=name, daemon=True)
            for name, jobs in [
                ("cache-writer", self._writes),
                *((f"cache-reader-{n}", self._reads) for n in range(N_READERS)),
            ]
        ]

    @property
    def directory(self) -> Path:
        return self._tier.directory

    def start(self) -> None:
        self._writes.put(self._open)
        for thread in self._threads:
            thread.start()

    def write(self, entry: Entry) -> None:
        self._writes.put(lambda: self._write(entry))

    def read(self, key: Key) -> None:
        self._reads.put(lambda: self._read(key))

    def look_up(self, path: Sequence[Key], answers: SimpleQueue[list[CatalogRow]]) -> None:
        """What there is of a prompt goes to `answers`, ahead of whatever else is to be told."""
        self._reads.put(lambda: answers.put(self._rows_along(path)))

    def touch(self, keys: Sequence[Key]) -> None:
        self._writes.put(lambda: self._unless_resting(lambda: self._touch(keys)))

    def mark(self, key: Key, retention: Retention) -> None:
        self._writes.put(lambda: self._unless_resting(lambda: self._tier.mark([(key, retention)])))

    def give_name(self, named: Named) -> None:
        self._writes.put(lambda: self._unless_resting(lambda: self._tier.give_name(named)))

    def drop_names(self, names: Sequence[Named]) -> None:
        self._writes.put(lambda: self._sooner_or_later(lambda: self._tier.drop_names(names)))

    def drop(self, keys: Sequence[Key]) -> None:
        self._writes.put(lambda: self._sooner_or_later(lambda: self._drop(keys)))

    def quarantine(self, key: Key, why: str) -> None:
        self._writes.put(lambda: self._unless_resting(lambda: self._tier.quarantine(key, why)))

    def poll(self) -> Event | None:
        return None if self._events.empty() else self._events.get()

    def wait(self, timeout_seconds: float) -> Event | None:
        """The next event, for callers that have nothing else to do: the start and the end."""
        try:
            return self._events.get(timeout=timeout_seconds)
        except Empty:
            return None

    def close(self, grace_seconds: float) -> None:
        """Finishes what is queued, for a while, then gives up on the rest."""
        for _ in range(N_READERS):
            self._reads.put(None)
        self._writes.put(self._flush_deferred_deletes)
        self._writes.put(None)
        deadline = time.monotonic() + grace_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._abandoned.set()
        for thread in self._threads:
            thread.join(ABANDON_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("cache: the disk hangs, and what was on its way there is lost")
        else:
            self._quietly(self._tier.close)

    def _emit(self, event: Event) -> None:
        self._events.put(event)
        self._notify()

    def _open(self) -> None:
        """What the catalogue says is told at once: looking at every file takes far longer."""
        names = []
        try:
            self._tier.open_as_it_is()
            self._n_opens_told = self._tier.n_opens
            self._tell_all()
            differences = self._tier.reconcile(on_progress=_ProgressLog())
            if differences.gone:
                self._emit(Vanished(differences.gone))
            if differences.n_unknown:
                self._tell_all()
            names = self._tier.names()
        except TierFailed as error:
            self._give_it_time(error)
        except Exception as error:  # the start waits for a word
            _log.exception("the cache directory could not be opened")
            self._give_it_time(TierFailed(f"it failed: {error}"))
        self._emit(CatalogueOpened(self._trouble, self._tier.usage_bytes(), names))

    def _tell_all(self) -> None:
        for rows in self._tier.rows():
            self._emit(FoundEntries(rows))

    @property
    def _is_resting(self) -> bool:
        return self._abandoned.is_set() or time.monotonic() < self._retry_at

    def _tell_what_is_there(self) -> None:
        """After the tier was opened anew: what is known of it may all be wrong."""
        if self._tier.n_opens == self._n_opens_told:
            return
        batches = list(self._tier.rows())
        self._n_opens_told = self._tier.n_opens
        self._emit(Relisted(frozenset(row.header.key for batch in batches for row in batch)))
        for rows in batches:
            self._emit(FoundEntries(rows))

    def _give_it_time(self, error: TierFailed) -> None:
        """A disk that refused is not asked again at once: each attempt copies the bytes."""
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._trouble = error.message

    def _write(self, entry: Entry) -> None:
        key = entry.header.key
        if self._is_resting:
            self._emit(WriteFailed(key, self._trouble or "the server is stopping"))
            return
        try:
            evicted = self._tier.put(entry)
            self._tell_what_is_there()
        except TierFull as error:
            _log.debug("cache entry %s is not written: %s", key.hex(), error.message)
            self._emit(WriteFailed(key, None))
        except TierFailed as error:
            self._give_it_time(error)
            self._emit(WriteFailed(key, error.message))
        except Exception as error:  # the loop waits for a word about every job
            _log.exception("a cache entry could not be written")
            self._emit(WriteFailed(key, f"it failed: {error}"))
        else:
            self._retry_at, self._trouble = 0.0, None
            self._flush_deferred_deletes()
            self._emit(Written(key, evicted, self._tier.usage_bytes()))

    def _touch(self, keys: Sequence[Key]) -> None:
        if gone := self._tier.touch(keys):
            self._emit(Vanished(gone))
        self._tell_what_is_there()

    def _drop(self, keys: Sequence[Key]) -> None:
        self._tier.drop(keys)
        self._emit(Dropped(keys))

    def _rows_along(self, path: Sequence[Key]) -> list[CatalogRow]:
        try:
            return self._tier.along(path)
        except TierFailed as error:
            _log.info("cache: %s", error.message)
        except Exception:  # the engine waits for a word
            _log.exception("a prompt could not be looked up")
        return []

    def _read(self, key: Key) -> None:
        started = time.perf_counter()
        try:
            entry = self._tier.get(key)
        except CacheError as error:
            if isinstance(error, EntryCorrupt):
                _log.warning("cache entry %s is set aside: %s", key.hex(), error.message)
            else:
                _log.info("cache: %s", error.message)
            self._emit(ReadFailed(key, error))
        except Exception as error:
            _log.exception("cache entry %s could not be read", key.hex())
            self._emit(ReadFailed(key, TierFailed(f"it failed: {error}")))
        else:
            self._emit(Arrived(entry, time.perf_counter() - started))

    def _sooner_or_later(self, action: Job) -> None:
        """What somebody deleted must not be there after a restart."""
        try:
            if not self._is_resting:
                action()
                return
        except TierFailed as error:
            self._give_it_time(error)
        self._owed.append(action)

    def _flush_deferred_deletes(self) -> None:
        owed, self._owed = self._owed, []
        for action in owed:
            self._quietly(action)

    def _unless_resting(self, action: Callable[[], None]) -> None:
        if not self._is_resting and time.monotonic() >= self._quiet_until:
            self._quietly(action)

    def _quietly(self, action: Callable[[], None]) -> None:
        """What may fail without harm: the next write will say what is wrong with the disk."""
        try:
            action()
        except TierFailed as error:
            _log.debug("the cache directory: %s", error.message)
            # It may have waited for seconds before it failed, and writes stand behind its like.
            self._quiet_until = time.monotonic() + RETRY_SECONDS


class _ProgressLog:
    """A line every few seconds: files that the catalogue does not know are read one by one."""

    def __init__(self) -> None:
        self._next_at = time.monotonic() + PROGRESS_SECONDS

    def __call__(self, n_done: int, n_total: int) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at += PROGRESS_SECONDS
            _log.info("cache: reading headers, %d of %d files", n_done, n_total)


def do_jobs(jobs: SimpleQueue[Job | None]) -> None:
    """What a transfer thread does, until it is told to end."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # without this thread nothing would be written any more
            _log.exception("a job of the cache failed")
