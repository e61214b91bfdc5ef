"""Which entries are on disk, on their way there, or on their way back.

Decides what is written, and applies the events of the transfer threads to the holdings. Owned
by the engine thread.
"""

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.transfers import (
    CatalogueOpened,
    DiskTransfers,
    FoundEntries,
    Relisted,
)
from rekindle.cache.entry import Key, Kind
from rekindle.cache.index import Node, Where
from rekindle.cache.names import Named, Names
from rekindle.cache.policy import Speed, WriteBudget, WriteRules, admits_to_disk
from rekindle.cache.residency import Residency
from rekindle.cache.stores.back_store import BackStore
from rekindle.cache.stores.transfers import (
    Dropped,
    Vanished,
    WriteFailed,
    Written,
)
from rekindle.generation.events import CacheSource
from rekindle.generation.status import TierCounters, TierStatus

_log = logging.getLogger("rekindle.cache")

# All picked.
MAX_FAILED = 4096
INDEX_SECONDS = 1.0  # wait for the index at the start, and for a query about all entries
LONG_INDEX = 1000  # entries; a longer index is read while we serve
LOOK_UP_SECONDS = 0.25  # longest wait of the engine for the entries of one prompt


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
        self._was_awaited = False  # True once `wait_for_index` has waited
        self._answers: SimpleQueue[list[CatalogRow]] = SimpleQueue()
        self._n_unanswered = 0  # look-ups
        self._failed: deque[Node] = deque(maxlen=MAX_FAILED)  # written when the disk works again
        # When a write of each key failed last, and why.
        self._failures: BoundedCache[Key, tuple[float, str]] = BoundedCache(max_items=MAX_FAILED)
        self._dropping: Counter[Key] = Counter()  # being deleted, and may still be listed

    def start(self) -> None:
        """Read the index of the disk tier. A long index is still being read when this returns."""
        self._started_at = time.monotonic()
        super().start()
        self._handle_until(lambda: self.is_listed or self._holdings.n_on_disk >= LONG_INDEX)
        if not self.is_listed:
            _log.info("cache: still reading the index, %d entries so far", self._holdings.n_on_disk)

    def poll(self) -> bool:
        """Handle finished transfers. Return True if more are waiting: a long index takes time."""
        while (event := self.transfers.pool.poll()) is not None:
            self._on(event)
            if isinstance(event, FoundEntries):
                return True
        return False

    def look_up(self, path: Callable[[], Sequence[Key]]) -> None:
        """Add the entries along these keys, a root first, while the index is being read."""
        if self.is_listed:
            return
        while self._n_unanswered and self._handle_answer(0.0):
            pass
        if self._n_unanswered:
            return  # the disk is slow: only one prompt waits for it
        self.transfers.look_up(path(), self._answers)
        self._n_unanswered += 1
        self._handle_answer(LOOK_UP_SECONDS)

    def wait_for_index(self) -> None:
        """Wait for the whole index on the first call only: the disk may hang."""
        if not self.is_listed and not self._was_awaited:
            self._was_awaited = True
            self._handle_until(lambda: self.is_listed)

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

    def status(self) -> TierStatus:
        return TierStatus(
            name=CacheSource.DISK,
            n_entries=self._holdings.n_on_disk,
            n_bytes=self.transfers.tier.n_bytes,
            budget_bytes=self._budget_bytes,
            trouble=self.trouble,
            directory=str(self.transfers.tier.directory),
        )

    def _handle_answer(self, seconds: float) -> bool:
        try:
            rows = self._answers.get(block=seconds > 0, timeout=seconds)
        except Empty:
            return False
        self._n_unanswered -= 1
        self._on_found(rows)
        return True

    def _handle_until(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + INDEX_SECONDS
        while not is_enough() and (left := deadline - time.monotonic()) > 0:
            if not self.wait(left):
                return

    def _on(self, event: object) -> None:
        match event:
            case FoundEntries(rows):
                self._on_found(rows)
            case CatalogueOpened(trouble, names):
                self._on_opened(trouble, names)
            case Written(_, evicted):
                self._after_write(evicted)
            case WriteFailed(key, trouble):
                self._on_write_failed(self.writing[key], trouble)
            case Relisted(there):
                known = self._holdings.index.nodes()
                event = Vanished([node.key for node in known if node.key not in there])
            case Dropped(keys):
                for key in keys:
                    self._dropping[key] -= 1
                    if not self._dropping[key]:
                        del self._dropping[key]
        super()._on(event)

    def _on_found(self, rows: Sequence[CatalogRow]) -> None:
        for row in rows:
            if row.header.key not in self._dropping:
                node = self._holdings.add(row.header, Where.DISK, row.retention)
                node.hits = max(node.hits, row.hits - 1)
                node.used_at = max(node.used_at, row.last_used_at)

    def _on_opened(self, trouble: str | None, names: Sequence[Named]) -> None:
        self.is_listed = True
        for named in names:
            newer = self._names.get(named.root, named.name)
            if newer is None or newer.named_at < named.named_at:
                self._names.give(named)
        self._note_trouble(trouble)
        self._log_found()
        # A full collection over a million nodes would stop the engine for half a second.
        gc.freeze()

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

    def _log_found(self) -> None:
        n_tokens = n_bytes = 0
        for node in self._holdings.index.nodes():
            n_bytes += node.payload_bytes
            n_tokens += node.n_tokens if node.kind is Kind.BLOCK else 0
        _log.info(
            "cache: found %d entries, %d tokens, %.1f MB in %.2f s; budgets: memory %s, disk %s",
            self._holdings.n_on_disk,
            n_tokens,
            n_bytes / 1e6,
            time.monotonic() - self._started_at,
            self._capacity(self._holdings.memory.budget_bytes),
            self._capacity(self._budget_bytes),
        )

    def _capacity(self, n_bytes: int) -> str:
        """Describe a budget in bytes, and in tokens if the size of a row is known."""
        gigabytes = f"{n_bytes / 1e9:.1f} GB"
        if not self._row_bytes:
            return gigabytes
        return f"{gigabytes} (about {n_bytes // self._row_bytes} tokens)"
