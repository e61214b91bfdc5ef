"""The disk tier: one file per entry, a catalogue of them, and a budget for both.

Several servers, of one model or of several, may share a directory. Each of them evicts from all
entries, so an entry may vanish although this server never dropped it: that is a miss.

Several threads may call `get` at once. All other methods belong to one thread.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rekindle.cache.disk.catalogue import Catalog, CatalogRow
from rekindle.cache.disk.deletion import RowsForgotten, erase, forget_rows, remove_entries
from rekindle.cache.disk.entry_file import DISK_BLOCK_BYTES, EntryFiles, size_on_disk
from rekindle.cache.disk.owners import followers
from rekindle.cache.disk.reconcile import (
    Differences,
    OnProgress,
    open_as_it_is,
    reconcile,
)
from rekindle.cache.disk.wiping import begin_deletion, is_deletion_unfinished
from rekindle.cache.entry import Entry, Header, Key, Retention
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.names import Named
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.errors import EntryCorrupt, EntryMissing, TierFailed, TierFull
from rekindle.generation.forgetting import Tombstone

_log = logging.getLogger(__name__)

# All three are picked.
_SPARE_SHARE = 0.02  # share of the budget that one eviction frees
_QUARANTINE_SHARE = 1 / 16
_WAL_SHARE = 1 / 128

# A put may need a new folder, and its row a new page of the table and of two indexes.
_MAX_GROWTH_BYTES = 4 * DISK_BLOCK_BYTES
_NOT_THE_FILES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DiskTier:
    """Every method but `close` raises TierFailed if the directory fails."""

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: Key,
        budget_bytes: int,
        is_leased: Callable[[Key], bool],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.n_opens = 0  # more than 1: the directory was replaced while in use
        self.directory = directory
        self._fingerprint = fingerprint
        self._budget_bytes = budget_bytes
        self._is_leased = is_leased
        self._now = now
        self._files = EntryFiles(directory, quarantine_bytes=int(budget_bytes * _QUARANTINE_SHARE))
        self._catalog = Catalog(directory, wal_bytes=int(budget_bytes * _WAL_SHARE))
        self._evicted: list[Key] = []  # keys evicted since the last put returned
        self._stuck_bytes = 0  # of files without a row that could not be deleted
        self._tombstones = TombstoneFile(directory)
        self._kept_tombstones: list[Tombstone] = []
        self.deletions = Deletions(fingerprint)  # of this server, and of all others as they appear
        self.n_bytes = 0  # bytes that count against the budget; any thread may read it

    def open(self) -> None:
        self.open_as_it_is()
        self.reconcile()

    def open_as_it_is(self) -> None:
        """Open the catalogue without looking at the files."""
        open_as_it_is(self._catalog, self._files)
        try:
            self._kept_tombstones = self._tombstones.all()
        except TierFailed as error:  # nothing is written while it cannot be read
            _log.warning("cache: the list of deletions cannot be read: %s", error.message)
        self.deletions.add(self._kept_tombstones)
        self.n_opens += 1
        self._stuck_bytes = 0
        self._count()

    def reconcile(self, *, on_progress: OnProgress | None = None) -> Differences:
        """Compare the catalogue with the files, and read unknown files."""
        differences = reconcile(self._catalog, self._files, on_progress=on_progress)
        differences.gone.extend(self._forget_again())
        self._catalog.drop_lost_names()
        self._count()
        return differences

    def close(self) -> None:
        self._catalog.close()

    def rows(self) -> Iterator[list[CatalogRow]]:
        yield from self._catalog.batches(fingerprint=self._fingerprint)

    def along(self, path: Sequence[Key]) -> list[CatalogRow]:
        """Return the rows of the entries along a prompt's keys."""
        return self._catalog.along(path)

    def names(self) -> list[Named]:
        return self._catalog.names(fingerprint=self._fingerprint)

    def give_name(self, named: Named) -> None:
        self._ensure_open()
        if not self.deletions.covers(named.root, named.session, named.named_at):
            self._catalog.give_name(named, fingerprint=self._fingerprint)

    def drop_names(self, names: Sequence[Named]) -> None:
        self._ensure_open()
        self._catalog.drop_names(names)

    def mark(self, key: Key, retention: Retention) -> None:
        self._ensure_open()
        self._catalog.mark([(key, retention)])

    def get(self, key: Key) -> Entry:
        try:
            entry = self._files.read(key)
            if entry.header.fingerprint != self._fingerprint:
                raise EntryCorrupt("it belongs to another model")
        except FileNotFoundError:
            self._forget(key)
            raise EntryMissing(f"{key.hex()} is no longer on disk") from None
        except OSError as error:
            if error.errno in _NOT_THE_FILES_FAULT:
                raise TierFailed(f"{self.directory}: {error.strerror}") from error
            self._move_to_quarantine(key)
            raise EntryCorrupt(f"it cannot be read: {error.strerror}") from error
        except EntryCorrupt:
            self._move_to_quarantine(key)
            raise
        return entry

    def put(self, entry: Entry) -> list[Key]:
        header = entry.header
        self._ensure_open()
        if not self._touch_if_stored(header):
            # The lock covers both steps: no other server may use the room made here.
            with self._alone():
                # Another server may have written the entry before this one had the lock. Its row
                # describes its file, so the file must stay.
                if not self._touch_if_stored(header):
                    self._refuse_deleted(entry)
                    self._make_room(header)
                    self._write(entry)
        self._count()
        evicted, self._evicted = self._evicted, []
        return evicted

    def _touch_if_stored(self, header: Header) -> bool:
        is_stored = self._files.is_whole(header) and self._catalog.has(header.key)
        if is_stored:
            self._catalog.touch([header.key], used_at=self._now())
        return is_stored

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        self._ensure_open()
        return self._catalog.touch(keys, used_at=self._now())

    def drop(self, keys: Sequence[Key]) -> None:
        self._ensure_open()
        with self._alone():
            self._catalog.remove(keys)
            self._stuck_bytes += self._files.remove(keys)
        self._count()

    def forget(self, tombstone: Tombstone) -> RowsForgotten:
        """Keep the tombstone, and delete what it covers of this model. `erase` must follow."""
        self._ensure_open()
        self.deletions.add([tombstone])
        trouble = []
        try:
            self._tombstones.add(tombstone)
        except TierFailed as error:
            trouble.append(f"The deletion could not be noted for other servers: {error.message}")
        begin_deletion(self._catalog)
        gone = self._forget_rows([tombstone])
        gone.unreached += trouble
        return gone

    def forget_after(self, holder: Key, tail: bytes, root: Key, prefix: bytes) -> RowsForgotten:
        """Delete a prefix that ends `tail` after a block: what follows it, and its names.

        `erase` must follow.
        """
        self._ensure_open()
        begin_deletion(self._catalog)
        keys = followers(self._catalog, holder, tail)
        names = [each for each in self.names() if each.is_of(root, prefix)]
        return remove_entries(self._catalog, self._files, self._alone, keys, names)

    def erase(self) -> RowsForgotten:
        """Leave no copy of what was deleted. Deletions that wait share one call: it is slow."""
        gone = erase(self._catalog, self._files)
        with suppress(TierFailed):
            self._count()
        return gone

    def _forget_rows(self, tombstones: Sequence[Tombstone]) -> RowsForgotten:
        gone = forget_rows(self._catalog, self._files, self._alone, tombstones, self._fingerprint)
        self._stuck_bytes += gone.stuck_bytes
        return gone

    def _forget_again(self) -> list[Key]:
        """End the deletions of servers that were killed."""
        if not self._kept_tombstones:
            return []
        gone = self._forget_rows(self._kept_tombstones)
        if is_deletion_unfinished(self._catalog):
            for line in erase(self._catalog, self._files).unreached:
                _log.warning("cache: a deletion could not be ended: %s", line)
        return gone.keys

    def _refuse_deleted(self, entry: Entry) -> None:
        """Raise TierFull if the entry was deleted, by this server or another."""
        if self._tombstones.changed():
            self._kept_tombstones = self._tombstones.read()
            self.deletions.add(self._kept_tombstones)
        asked_at = entry.retention.asked_at or entry.header.created_at
        if self.deletions.covers(entry.root, entry.retention.session, asked_at):
            raise TierFull("it was deleted")

    def quarantine(self, key: Key, why: str) -> None:
        _log.warning("cache: quarantined entry=%s: %s", key.hex(), why)
        self._move_to_quarantine(key)

    def _ensure_open(self) -> None:
        """Reopen the directory if it was deleted, unmounted or replaced since the last call."""
        if not self._catalog.is_current():
            self.open()

    def _make_room(self, header: Header) -> None:
        room_bytes = self._budget_bytes - self._overhead_bytes()
        needed_bytes = size_on_disk(header) + _MAX_GROWTH_BYTES
        if needed_bytes > room_bytes:
            raise TierFull(
                f"an entry of {needed_bytes} bytes does not fit: entries may use"
                f" {max(room_bytes, 0)} bytes of the budget of {self._budget_bytes}"
            )
        # Deleting is slow, so it is done for several puts at once.
        spare_bytes = max(needed_bytes, int(self._budget_bytes * _SPARE_SHARE))
        while evicted := self._catalog.evict(
            limit_bytes=room_bytes - needed_bytes,
            target_bytes=room_bytes - spare_bytes,
            now=self._now(),
            # Without its parent the new entry would never be found.
            is_spared=lambda key: key == header.parent or self._is_leased(key),
        ):
            self._evicted += evicted
            self._stuck_bytes += self._files.remove(evicted)

    def _write(self, entry: Entry) -> None:
        self._files.write(entry)
        try:
            self._catalog.add(
                [entry.header],
                used_at=self._now(),
                retention=entry.retention,
                root=entry.root,
            )
        except TierFailed:
            self._files.remove([entry.header.key])
            raise

    def _forget(self, key: Key) -> None:
        """Remove the row of a missing file, unless it was written again meanwhile."""
        with suppress(TierFailed):
            self._catalog.remove([key], unless=lambda key: self._files.path(key).exists())
            self._count()

    def _move_to_quarantine(self, key: Key) -> None:
        with suppress(OSError):
            self._files.set_aside(self._files.path(key))
        with suppress(TierFailed):
            self._catalog.remove([key])
            self._count()

    def _overhead_bytes(self) -> int:
        with self._raising_tier_failed():
            files_bytes = self._files.overhead_bytes() + self._tombstones.disk_bytes()
        return files_bytes + self._catalog.disk_bytes() + self._stuck_bytes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._raising_tier_failed(), alone_in(self.directory):
            yield

    @contextmanager
    def _raising_tier_failed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierFailed(f"{self.directory}: {error.strerror}") from error

    def _count(self) -> None:
        totals = self._catalog.totals().values()
        self.n_bytes = sum(each.n_bytes for each in totals) + self._overhead_bytes()
