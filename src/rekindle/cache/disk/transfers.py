"""The disk tier's jobs on the transfer threads: opening, listing, looking up, names."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Key, Retention
from rekindle.cache.names import Named
from rekindle.cache.stores.transfers import (
    EntryTransfers,
    Lane,
    TransferPool,
    Vanished,
)
from rekindle.errors import TierFailed

_log = logging.getLogger(__name__)

N_READERS = 2  # one reads while the other checks sums; picked
PROGRESS_SECONDS = 2.0  # picked
RETRY_SECONDS = 5.0  # between attempts to write to a disk that refused; picked
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


@dataclass(frozen=True, slots=True)
class Relisted:
    """The directory was replaced, or was away for a while; these keys are all it has now."""

    keys: frozenset[Key]


def disk_pool(notify: Callable[[], None]) -> TransferPool:
    n_threads = {Lane.WRITE: 1, Lane.READ: N_READERS}
    return TransferPool("cache", n_threads, notify, abandon_seconds=ABANDON_SECONDS)


class DiskTransfers(EntryTransfers):
    def __init__(self, tier: DiskTier, pool: TransferPool) -> None:
        super().__init__(tier, pool, retry_seconds=RETRY_SECONDS, reads_overlap=False)
        self.tier = tier
        self._n_opens_listed = 0

    def start(self) -> None:
        self.pool.submit(Lane.WRITE, self._open)
        super().start()

    def look_up(self, path: Sequence[Key], answers: SimpleQueue[list[CatalogRow]]) -> None:
        """Put the stored entries along a prompt's keys into `answers`, ahead of other events."""
        self.pool.submit(Lane.READ, lambda: answers.put(self._rows_along(path)))

    def mark(self, key: Key, retention: Retention) -> None:
        self.submit_optional(lambda: self.tier.mark(key, retention))

    def give_name(self, named: Named) -> None:
        self.submit_optional(lambda: self.tier.give_name(named))

    def drop_names(self, names: Sequence[Named]) -> None:
        self.submit_deletion(lambda: self.tier.drop_names(names))

    def close(self, grace_seconds: float) -> bool:
        has_ended = super().close(grace_seconds)
        if has_ended:
            self.quietly(self.tier.close)
        return has_ended

    def _open(self) -> None:
        """List the catalogue first: looking at every file takes far longer."""
        names = []
        try:
            self.tier.open_as_it_is()
            self._n_opens_listed = self.tier.n_opens
            self._list()
            differences = self.tier.reconcile(on_progress=_ProgressLog())
            if differences.gone:
                self.pool.emit(Vanished(differences.gone))
            if differences.n_unknown:
                self._list()
            names = self.tier.names()
        except TierFailed as error:
            self.rest(error)
        except Exception as error:  # the start waits for an event
            _log.exception("cache: opening the directory failed")
            self.rest(TierFailed(f"it failed: {error}"))
        self.pool.emit(CatalogueOpened(self.trouble, names))

    def _list(self) -> None:
        for rows in self.tier.rows():
            self.pool.emit(FoundEntries(rows))

    def _after_change(self) -> None:
        """List everything again if the tier was reopened: the known entries may be gone."""
        if self.tier.n_opens == self._n_opens_listed:
            return
        batches = list(self.tier.rows())
        self._n_opens_listed = self.tier.n_opens
        self.pool.emit(Relisted(frozenset(row.header.key for batch in batches for row in batch)))
        for rows in batches:
            self.pool.emit(FoundEntries(rows))

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

    def __init__(self) -> None:
        self._next_at = time.monotonic() + PROGRESS_SECONDS

    def __call__(self, n_done: int, n_total: int) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at += PROGRESS_SECONDS
            _log.info("cache: reading headers, %d of %d files", n_done, n_total)
