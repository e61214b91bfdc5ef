"""The disk tier's jobs on the transfer threads: opening, listing, looking up, names."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.deletion import RowsForgotten
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Key, Kind, Retention
from rekindle.cache.names import Named
from rekindle.cache.stores.transfers import (
    EntryTransfers,
    Job,
    Lane,
    TransferPool,
    Vanished,
)
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Deleted, Tombstone

_log = logging.getLogger(__name__)

N_READERS = 2  # one reads while the other checks sums; picked
PROGRESS_SECONDS = 2.0  # picked
EVENT_ENTRIES = 256  # entries in one event: the engine handles them in a few ms; picked
RETRY_SECONDS = 5.0  # between attempts to write to a disk that refused; picked
OPEN_SECONDS = 5.0  # for the catalogue to open, before a lookup gives up; picked
DISK_IS_SLOW = "The disk has not finished. It deletes the rest in the background."
DISK_FAILED = "The disk failed, and deletes what it holds when it works again: {why}."
ABANDON_SECONDS = 2.0  # grace for the write under way after queued jobs are dropped; picked


@dataclass(frozen=True, slots=True)
class FoundEntries:
    """Entries that the catalogue lists."""

    rows: list[CatalogRow]


@dataclass(frozen=True, slots=True)
class CatalogueOpened:
    """The catalogue and the files have been read."""

    trouble: str | None
    names: list[Named]
    n_tokens: int  # of the listed entries
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Relisted:
    """The directory was replaced, or was away for a while; these keys are all it has now."""

    keys: frozenset[Key]


@dataclass(frozen=True, slots=True)
class RowsDeleted:
    """Entries that a deletion has removed. The index may have read some of them since."""

    keys: Sequence[Key]
    tombstone: Tombstone | None  # None: one prompt was deleted, by its key


@dataclass(slots=True, eq=False)
class DiskDeletion:
    """A deletion on its way. A transfer thread sets the answer."""

    delete: Callable[[], RowsForgotten]
    tombstone: Tombstone | None  # None: one prompt is deleted, by its key
    gone: RowsForgotten | None = None  # rows and files are deleted, copies of them may be left
    deleted: Deleted | None = None
    trouble: str | None = None  # why it failed the last time

    @property
    def is_over(self) -> bool:
        """Whether there is an answer. A deletion that failed is tried again."""
        return self.deleted is not None or self.trouble is not None

    @property
    def answer(self) -> Deleted:
        """Return what was deleted so far, for a client that waits no longer."""
        if self.deleted is not None:
            return self.deleted
        line = DISK_IS_SLOW if self.trouble is None else DISK_FAILED.format(why=self.trouble)
        return Deleted(counts={}, unreached=(line,))


def disk_pool(notify: Callable[[], None]) -> TransferPool:
    n_threads = {Lane.WRITE: 1, Lane.READ: N_READERS}
    return TransferPool("cache", n_threads, notify, abandon_seconds=ABANDON_SECONDS)


class DiskTransfers(EntryTransfers):
    def __init__(self, tier: DiskTier, pool: TransferPool) -> None:
        super().__init__(tier, pool, retry_seconds=RETRY_SECONDS)
        self.tier = tier
        self._n_opens_listed = 0
        self._lookups: SimpleQueue[Job] = SimpleQueue()
        self._deletions: SimpleQueue[DiskDeletion] = SimpleQueue()
        self._is_open = threading.Event()
        self._n_listed_tokens = 0
        self._n_listed_bytes = 0

    def start(self) -> None:
        self.pool.submit(Lane.WRITE, self._open)
        super().start()

    def look_up(self, path: Sequence[Key], on_answer: Callable[[list[CatalogRow]], None]) -> None:
        """Find the stored entries along a prompt's keys. A transfer thread calls `on_answer`.

        A lookup overtakes the reads that wait: a request waits for it.
        """

        def find() -> None:
            self._is_open.wait(OPEN_SECONDS)  # the first prompt may come before the catalogue
            on_answer(self._rows_along(path))
            self.pool.notify()

        self._lookups.put(find)
        self.pool.submit(Lane.READ, self._read_next)

    def mark(self, key: Key, retention: Retention) -> None:
        self.submit_optional(lambda: self.tier.mark(key, retention))

    def give_name(self, named: Named) -> None:
        self.submit_optional(lambda: self.tier.give_name(named))

    def drop_names(self, names: Sequence[Named]) -> None:
        self.submit_deletion(lambda: self.tier.drop_names(names))

    def begin_deletion(self, deletion: DiskDeletion) -> None:
        """Delete on the write thread; if the tier refuses, retry after the next write.

        A deletion does not wait until a long index is read.
        """
        self._deletions.put(deletion)
        self.pool.submit(Lane.WRITE, self._run_deletions)

    def _run_deletions(self) -> None:
        waiting = []
        while not self._deletions.empty():
            waiting.append(self._deletions.get())
        if waiting:
            self._delete(lambda: self._delete_all(waiting))

    def _delete_all(self, deletions: Sequence[DiskDeletion]) -> None:
        try:
            gone = [deletion.gone or self._delete_rows(deletion) for deletion in deletions]
        except TierFailed as error:
            for deletion in deletions:
                deletion.trouble = error.message
            self.pool.notify()
            raise
        erased = self.tier.erase()  # once for all of them
        for deletion, each in zip(deletions, gone, strict=True):
            each += erased
            deletion.deleted = each.deleted
            erased.n_quarantined = 0  # counted with the first
        self.pool.notify()

    def _delete_rows(self, deletion: DiskDeletion) -> RowsForgotten:
        deletion.gone = gone = deletion.delete()
        for first in range(0, len(gone.keys), EVENT_ENTRIES):
            keys = gone.keys[first : first + EVENT_ENTRIES]
            self.pool.emit(RowsDeleted(keys, deletion.tombstone))
        return gone

    def close(self, grace_seconds: float) -> bool:
        has_ended = super().close(grace_seconds)
        if has_ended:
            self.quietly(self.tier.close)
        return has_ended

    def _read_next(self) -> None:
        try:
            look_up = self._lookups.get_nowait()
        except Empty:
            super()._read_next()
        else:
            look_up()

    def _open(self) -> None:
        """List the catalogue first: looking at every file takes far longer."""
        names = []
        try:
            self.tier.open_as_it_is()
            self._n_opens_listed = self.tier.n_opens
            self._is_open.set()
            self._list()
            differences = self.tier.reconcile(on_progress=_ProgressLog(self._run_deletions))
            self.emit_vanished(differences.gone)
            if differences.n_unknown:
                self._list()
            names = self.tier.names()
        except TierFailed as error:
            self.rest(error)
        except Exception as error:  # the start waits for an event
            _log.exception("cache: opening the directory failed")
            self.rest(TierFailed(f"it failed: {error}"))
        self._is_open.set()
        self.pool.emit(
            CatalogueOpened(self.trouble, names, self._n_listed_tokens, self._n_listed_bytes)
        )

    def emit_vanished(self, keys: Sequence[Key]) -> None:
        for first in range(0, len(keys), EVENT_ENTRIES):
            self.pool.emit(Vanished([*keys[first : first + EVENT_ENTRIES]]))

    def _emit_found(self, rows: list[CatalogRow]) -> None:
        for first in range(0, len(rows), EVENT_ENTRIES):
            self.pool.emit(FoundEntries(rows[first : first + EVENT_ENTRIES]))

    def _list(self) -> None:
        self._n_listed_tokens = self._n_listed_bytes = 0
        for rows in self.tier.rows():
            self._emit_found(rows)
            self._run_deletions()
            # Summed here: the engine would pause to look at a million entries.
            headers = [row.header for row in rows]
            self._n_listed_bytes += sum(header.payload_bytes for header in headers)
            self._n_listed_tokens += sum(
                header.n_tokens for header in headers if header.kind is Kind.BLOCK
            )

    def _after_change(self) -> None:
        """List everything again if the tier was reopened: the known entries may be gone."""
        if self.tier.n_opens == self._n_opens_listed:
            return
        batches = list(self.tier.rows())
        self._n_opens_listed = self.tier.n_opens
        self.pool.emit(Relisted(frozenset(row.header.key for batch in batches for row in batch)))
        for rows in batches:
            self._emit_found(rows)

    def _rows_along(self, path: Sequence[Key]) -> list[CatalogRow]:
        try:
            return self.tier.along(path)
        except TierFailed as error:
            _log.info("cache: lookup failed: %s", error.message)
        except Exception:  # the engine waits for an answer
            _log.exception("cache: lookup failed")
        return []


class _ProgressLog:
    """Logs every few seconds: files that the catalogue does not know are read one by one."""

    def __init__(self, between: Job) -> None:
        self._next_at = time.monotonic() + PROGRESS_SECONDS
        self._between = between

    def __call__(self, n_done: int, n_total: int) -> None:
        self._between()
        if time.monotonic() >= self._next_at:
            self._next_at += PROGRESS_SECONDS
            _log.info("cache: reading headers, %d of %d files", n_done, n_total)
