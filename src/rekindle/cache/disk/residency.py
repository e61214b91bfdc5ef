"""Which entries are on disk, on their way there, or on their way back.

Decides what is written, and applies the events of the transfer threads to the holdings. Owned
by the engine thread.
"""

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.transfers import (
    CatalogueOpened,
    DiskDeletion,
    DiskTransfers,
    FoundEntries,
    Relisted,
    RowsDeleted,
)
from rekindle.cache.entry import BLOCK_TOKENS, TOKEN_BYTES, Key
from rekindle.cache.index import Node, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.names import Named, Names
from rekindle.cache.policy import Speed, WriteBudget, WriteRules, admits_to_disk
from rekindle.cache.residency import Residency
from rekindle.cache.stores.back_store import BackStore
from rekindle.cache.stores.transfers import Dropped, WriteFailed, Written
from rekindle.generation.events import CacheSource
from rekindle.generation.forgetting import Tombstone
from rekindle.generation.status import TierCounters, TierStatus

_log = logging.getLogger("rekindle.cache")

# All picked.
MAX_FAILED = 4096
INDEX_SECONDS = 1.0  # longest wait for the index at the start
LONG_INDEX = 1000  # entries; a longer index is read while we serve
LOOK_UP_SECONDS = 1.0  # longest wait of a prompt for its entries


@dataclass(slots=True, eq=False)
class DiskLookup:
    """A lookup of a prompt's entries. The prompt waits for it; the engine does not."""

    deadline: float
    is_answered: bool = False
    is_stale: bool = False  # the answer does not count

    def is_over(self, now: float) -> bool:
        return self.is_answered or now >= self.deadline


class DiskResidency(BackStore):
    place = Where.DISK
    transfers: DiskTransfers

    def __init__(
        self,
        transfers: DiskTransfers,
        holdings: Residency,
        rules: WriteRules,
        counters: TierCounters,
        read_speed: Speed,
        *,
        names: Names,
        budget_bytes: int,
        row_bytes: int,
    ) -> None:
        super().__init__(transfers, holdings, rules, counters, read_speed)
        self.is_listed = False  # True once all entries found at the start are listed
        self.trouble: str | None = None  # why the disk refuses writes at the moment
        self._names = names
        self._budget_bytes = budget_bytes
        self._row_bytes = row_bytes
        self._writable = WriteBudget(rules.bytes_per_hour)
        self._started_at = 0.0
        self._answers: SimpleQueue[tuple[DiskLookup, list[CatalogRow]]] = SimpleQueue()
        self._unanswered: list[DiskLookup] = []
        self._failed: deque[Node] = deque(maxlen=MAX_FAILED)  # written when the disk works again
        # When a write of each key failed last, and why.
        self._failures: BoundedCache[Key, tuple[float, str]] = BoundedCache(max_items=MAX_FAILED)
        # Prompts deleted by their keys, with their roots, while the index is read.
        self._forgotten_prefixes: list[tuple[Key, bytes]] = []
        self._dropping: Counter[Key] = Counter()  # being deleted, and may still be listed

    def start(self) -> None:
        """Read the index of the disk tier. A long index is still being read when this returns."""
        self._started_at = time.monotonic()
        super().start()
        self._handle_until(lambda: self.is_listed or self._holdings.n_on_disk >= LONG_INDEX)
        if not self.is_listed:
            _log.info("cache: still reading the index, %d entries so far", self._holdings.n_on_disk)

    def poll(self) -> bool:
        self._handle_answers()
        return super().poll()

    def look_up(self, path: Callable[[], Sequence[Key]]) -> DiskLookup | None:
        """Start to add the entries along these keys, a root first, while the index is being read.

        Return None if the index is complete, or if the disk is slow to answer others.
        """
        self._handle_answers()
        now = time.monotonic()
        if self.is_listed or any(lookup.is_over(now) for lookup in self._unanswered):
            return None
        lookup = DiskLookup(now + LOOK_UP_SECONDS)
        self._unanswered.append(lookup)
        self.transfers.look_up(path(), lambda rows: self._answers.put((lookup, rows)))
        return lookup

    def failure_since(self, node: Node, since: float) -> str | None:
        """Return why a write of the node failed after `since`; None if no write failed."""
        failed_at, why = self._failures.peek(node.key) or (since, None)
        return why if failed_at >= since else None

    def offer(self, node: Node, *, was_reused: bool, must: bool = False) -> None:
        """Write the entry and its ancestors, unless that would wear out the disk.

        With `must`, a client waits for the write: only the write budget can refuse it.
        """
        if not self._may_write(node):
            return
        now = time.monotonic()
        is_admitted = must or admits_to_disk(
            self._rules,
            n_prefix_tokens=node.stop,
            was_reused=was_reused,
            budget_left_share=self._writable.left_share(now),
        )
        # Parents first: an entry without its ancestors on disk would never be found.
        for each in self._unwritten_path(node) if is_admitted else [node]:
            if not is_admitted or not self._writable.take(each.payload_bytes, now):
                self._counters.writes_refused += 1
                return
            self._begin_write(each)

    def mark(self, node: Node) -> None:
        """Record the node's changed retention. Jobs run in order: a write under way ends first."""
        if Where.DISK in node.where or node.key in self.writing:
            self.transfers.mark(node.key, node.retention)

    def drop(self, keys: Sequence[Key]) -> None:
        self._dropping.update(keys)
        super().drop(keys)

    def discard(self, keys: Sequence[Key]) -> None:
        self.drop(keys)

    def forget(self, tombstone: Tombstone) -> DiskDeletion:
        tier = self.transfers.tier
        return self._begin(DiskDeletion(lambda: tier.forget(tombstone), tombstone))

    def forget_prefix(self, root: Key, prefix: bytes) -> DiskDeletion:
        """Delete entries and names that start with the prefix, also those not read so far."""
        n_whole = len(prefix) // (BLOCK_TOKENS * TOKEN_BYTES)
        keys = PrefixKeys(root, np.frombuffer(prefix, dtype=">u4").tolist())
        holder = keys.after_blocks(n_whole)
        tail = prefix[n_whole * BLOCK_TOKENS * TOKEN_BYTES :]
        if not self.is_listed:
            self._forgotten_prefixes.append((root, prefix))
        tier = self.transfers.tier
        return self._begin(
            DiskDeletion(lambda: tier.forget_after(holder, tail, root, prefix), None)
        )

    def _begin(self, deletion: DiskDeletion) -> DiskDeletion:
        self.transfers.begin_deletion(deletion)
        for lookup in self._unanswered:
            lookup.is_stale = True  # its answer may have been read before the deletion
        return deletion

    def status(self) -> TierStatus:
        return TierStatus(
            name=CacheSource.DISK,
            n_entries=self._holdings.n_on_disk,
            n_bytes=self.transfers.tier.n_bytes,
            budget_bytes=self._budget_bytes,
            trouble=self.trouble,
            directory=str(self.transfers.tier.directory),
        )

    def _handle_answers(self) -> None:
        while not self._answers.empty():
            lookup, rows = self._answers.get()
            if not lookup.is_stale:
                self._on_found(rows)
            lookup.is_answered = True
            self._unanswered.remove(lookup)

    def _handle_until(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + INDEX_SECONDS
        while not is_enough() and (left := deadline - time.monotonic()) > 0:
            if not self.wait(left):
                return

    def _on(self, event: object) -> None:
        match event:
            case FoundEntries(rows):
                self._on_found(rows)
            case CatalogueOpened():
                self._on_opened(event)
            case Written(_, evicted):
                self._after_write(evicted)
            case WriteFailed(key, trouble):
                self._on_write_failed(self.writing[key], trouble)
            case Relisted(there):
                known = [node for node in self._holdings.index.nodes() if Where.DISK in node.where]
                self.transfers.emit_vanished([each.key for each in known if each.key not in there])
            case RowsDeleted(keys, tombstone):
                self._on_deleted(keys, by_key=tombstone is None)
            case Dropped(keys):
                for key in keys:
                    self._dropping[key] -= 1
                    if not self._dropping[key]:
                        del self._dropping[key]
        super()._on(event)

    def _on_found(self, rows: Sequence[CatalogRow]) -> None:
        deletions = self.transfers.tier.deletions
        now = time.time()
        for row in rows:
            kept = row.retention
            if kept.asked_at > now:  # by a wrong clock; no deletion would cover it
                kept = kept._replace(asked_at=now)
            if row.header.key not in self._dropping and not deletions.covers(
                row.root, kept.session, kept.asked_at
            ):
                node = self._holdings.add(row.header, Where.DISK, kept)
                node.hits = max(node.hits, row.hits - 1)
                node.used_at = max(node.used_at, row.last_used_at)
        # A full collection over a million nodes would stop the engine for half a second.
        gc.freeze()

    def _on_deleted(self, keys: Sequence[Key], *, by_key: bool) -> None:
        """Remove what the index has read before the rows were deleted.

        Memory keeps what a newer request or another session has stored there.
        """
        index, deletions = self._holdings.index, self.transfers.tier.deletions
        for node in filter(None, map(index.get, keys)):
            kept = node.retention
            is_old = by_key and Where.DISK in node.where
            if is_old or deletions.covers(index.root_of(node), kept.session, kept.asked_at):
                self._holdings.drop([node], but=Where.DISK)
            else:
                self._holdings.remove(node, Where.DISK)

    def _on_opened(self, opened: CatalogueOpened) -> None:
        self.is_listed = True
        for named in opened.names:
            newer = self._names.get(named.root, named.name)
            if (newer is None or newer.named_at < named.named_at) and not self._is_deleted(named):
                self._names.give(replace(named, named_at=min(named.named_at, time.time())))
        self._forgotten_prefixes.clear()
        self._note_trouble(opened.trouble)
        _log.info(
            "cache: found %d entries, %d tokens, %.1f MB in %.2f s; budgets: memory %s, disk %s",
            self._holdings.n_on_disk,
            opened.n_tokens,
            opened.n_bytes / 1e6,
            time.monotonic() - self._started_at,
            self._capacity(self._holdings.memory.budget_bytes),
            self._capacity(self._budget_bytes),
        )

    def _is_deleted(self, named: Named) -> bool:
        """Return whether a name was deleted after it had been read."""
        deletions = self.transfers.tier.deletions
        return deletions.covers(named.root, named.session, named.named_at) or any(
            named.is_of(root, prefix) for root, prefix in self._forgotten_prefixes
        )

    def _after_write(self, evicted: Sequence[Key]) -> None:
        self._note_trouble(None)
        self._counters.evictions += len(evicted)
        for key in evicted:
            if (gone := self._holdings.index.get(key)) is not None:
                self._holdings.remove(gone, Where.DISK)
        failed = list(self._failed)
        self._failed.clear()
        self._offer_again(failed)

    def _on_write_failed(self, node: Node, trouble: str | None) -> None:
        self._note_trouble(trouble)
        if trouble is not None:
            self._failed.append(node)
        self._writable.give_back(node.payload_bytes)
        why = trouble or "the disk has no room for it"
        self._failures.put(node.key, (time.monotonic(), why))

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        if trouble is not None:
            _log.warning("cache: disk writes failing, continuing in memory: %s", trouble)
        else:
            _log.info("cache: disk writes work again")
        self.trouble = trouble

    def _capacity(self, n_bytes: int) -> str:
        """Describe a budget in bytes, and in tokens if the size of a row is known."""
        gigabytes = f"{n_bytes / 1e9:.1f} GB"
        if not self._row_bytes:
            return gigabytes
        return f"{gigabytes} (about {n_bytes // self._row_bytes} tokens)"
