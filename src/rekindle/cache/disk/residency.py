"""What of the holdings is on disk, on its way there, or on its way back.

Decides what is worth writing, keeps count of what moves, and turns what the transfer threads
report into changes of the holdings. Owned by the engine thread.
"""

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.transfers import (
    Arrived,
    CatalogueOpened,
    Dropped,
    Event,
    FoundEntries,
    ReadFailed,
    Relisted,
    Transfers,
    Vanished,
    WriteFailed,
    Written,
)
from rekindle.cache.entry import Key
from rekindle.cache.index import Node, Where
from rekindle.cache.listing.names import Named, Names
from rekindle.cache.policy import Speed, WriteBudget, admits_to_disk
from rekindle.cache.residency import Holdings
from rekindle.cache.stores.back_store import BackStore, WriteRules
from rekindle.errors import EntryCorrupt, EntryMissing
from rekindle.generation.events import CacheSource
from rekindle.generation.status import TierStatus

_log = logging.getLogger("rekindle.cache")

MAX_FAILED = 4096  # picked
# All picked.
INDEX_SECONDS = 1.0  # that a start waits for the index, and later whoever must know all of it
LONG_INDEX = 1000  # entries; it is read while we serve
LOOK_UP_SECONDS = 0.25  # that the engine waits for what there is of one prompt


class WriteFailure(NamedTuple):
    at: float
    why: str


class DiskStore(BackStore):
    def __init__(
        self,
        transfers: Transfers,
        holdings: Holdings,
        names: Names,
        rules: WriteRules,
        count: Callable[[str, int], None],
        read_speed: Speed,
    ) -> None:
        super().__init__(Where.DISK, transfers, holdings, count, read_speed)
        self._transfers = transfers
        self._names = names
        self._rules = rules
        self._budget = WriteBudget(rules.bytes_per_hour)
        self._n_bytes = 0
        self.is_listed = False  # all that was there at the start
        self._was_awaited = False  # all of the index, once after the start
        self._answers: SimpleQueue[list[CatalogRow]] = SimpleQueue()
        self._n_unanswered = 0  # look-ups
        self._trouble: str | None = None
        self._failed: deque[Node] = deque(maxlen=MAX_FAILED)  # written when the disk is well again
        self._failures: dict[Key, WriteFailure] = {}  # of the same, and why
        self._dropping: Counter[Key] = Counter()  # still there, and may be listed once more

    @property
    def trouble(self) -> str | None:
        """Why the disk takes nothing in at the moment."""
        return self._trouble

    def start(self) -> bool:
        """Reads the index of what is there; False: a long one goes on being read while we serve."""
        self._transfers.start()
        self._take_in_until(lambda: self.is_listed or self._holdings.n_on_disk >= LONG_INDEX)
        return self.is_listed

    def look_up(self, path: Callable[[], Sequence[Key]]) -> None:
        """While the index is being read: takes in what lies along these keys, first a root."""
        if self.is_listed:
            return
        while self._n_unanswered and self._take_in_answer(0.0):
            pass
        if self._n_unanswered:
            return  # the disk is slow: nobody waits for it twice
        self._transfers.look_up(path(), self._answers)
        self._n_unanswered += 1
        self._take_in_answer(LOOK_UP_SECONDS)

    def _take_in_answer(self, seconds: float) -> bool:
        try:
            rows = self._answers.get(block=seconds > 0, timeout=seconds)
        except Empty:
            return False
        self._n_unanswered -= 1
        self._on_found(rows)
        return True

    def wait_for_index(self) -> None:
        """For whoever must know all of it; once, as a disk may hang."""
        if not self.is_listed and not self._was_awaited:
            self._was_awaited = True
            self._take_in_until(lambda: self.is_listed)

    def _take_in_until(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + INDEX_SECONDS
        while not is_enough() and (left := deadline - time.monotonic()) > 0:
            if (event := self._transfers.wait(left)) is None:
                return
            self._on(event)

    def close(self, grace_seconds: float) -> None:
        self._transfers.close(grace_seconds)
        while (event := self._transfers.poll()) is not None:
            self._on(event)

    def poll(self) -> bool:
        """Takes in what is finished; True: there is more, but it would take too long at once."""
        while (event := self._transfers.poll()) is not None:
            self._on(event)
            if isinstance(event, FoundEntries):
                return True
        return False

    def wait(self, timeout_seconds: float) -> bool:
        event = self._transfers.wait(timeout_seconds)
        if event is not None:
            self._on(event)
        return event is not None

    def failure_since(self, node: Node, since: float) -> str | None:
        """Why it was not written, if that was tried since then."""
        failure = self._failures.get(node.key)
        return failure.why if failure is not None and failure.at >= since else None

    def offer(self, node: Node, *, was_reused: bool, must: bool = False) -> None:
        """Writes the entry, and what leads to it, unless that would wear out the disk.

        It `must` where somebody waits for it: then only the budget counts.
        """
        if not self._may_be_offered(node):
            return
        now = time.monotonic()
        is_admitted = must or admits_to_disk(
            self._rules.policy,
            n_prefix_tokens=node.stop,
            min_tokens=self._rules.min_tokens,
            was_reused=was_reused,
            budget_left_share=self._budget.left_share(now),
        )
        # Parents first: an entry that nothing on disk leads to would never be found.
        for each in self._unwritten_path(node) if is_admitted else [node]:
            if not is_admitted or not self._budget.take(each.payload_bytes, now):
                self._count("writes_refused", 1)
                return
            self._begin_write(each)

    def touch(self, nodes: Sequence[Node]) -> None:
        if keys := [node.key for node in nodes if Where.DISK in node.where]:
            self._transfers.touch(keys)

    def mark(self, node: Node) -> None:
        """Behind the write that may still be under way, as jobs are done in order."""
        if Where.DISK in node.where or node.key in self._writing:
            self._transfers.mark(node.key, node.retention)

    def give_name(self, named: Named) -> None:
        self._transfers.give_name(named)

    def drop_names(self, names: Sequence[Named]) -> None:
        self._transfers.drop_names(names)

    def drop(self, keys: Sequence[Key]) -> None:
        self._dropping.update(keys)
        self._transfers.drop(keys)

    def quarantine(self, node: Node, why: str) -> None:
        if Where.DISK in node.where:
            self._transfers.quarantine(node.key, why)

    def status(self, budget_bytes: int) -> TierStatus:
        return TierStatus(
            name=CacheSource.DISK,
            n_entries=self._holdings.n_on_disk,
            n_bytes=self._n_bytes,
            budget_bytes=budget_bytes,
            trouble=self._trouble,
            directory=str(self._transfers.directory),
        )

    def _on(self, event: Event) -> None:
        match event:
            case FoundEntries(rows):
                self._on_found(rows)
            case CatalogueOpened(trouble, n_bytes, names):
                self._n_bytes = n_bytes
                self.is_listed = True
                for named in names:
                    newer = self._names.get(named.root, named.name)
                    if newer is None or newer.named_at < named.named_at:
                        self._names.give(named)
                self._note_trouble(trouble)
                # A full collection over a million nodes would stop the engine for half a second.
                gc.freeze()
            case Written():
                self._n_bytes = event.n_bytes
                self._take_in(event)
            case WriteFailed(key, trouble):
                self._count("writes_failed", 1)
                self._note_trouble(trouble)
                if trouble is not None:
                    self._failed.append(self._writing[key])
                self._note_failure(key, trouble or "the disk has no room for it")
                self._end_write(key)
            case Vanished(keys):
                self._on_vanished(keys)
            case Relisted(there):
                known = self._holdings.index.nodes()
                self._on_vanished([node.key for node in known if node.key not in there])
            case Dropped(keys):
                self._on_dropped(keys)
            case Arrived(entry, seconds):
                self._on_arrived(entry, seconds)
            case ReadFailed(key, error):
                self._count("quarantined", isinstance(error, EntryCorrupt))
                self._count("vanished", isinstance(error, EntryMissing))
                self._on_read_failed(key)

    def _on_found(self, rows: Sequence[CatalogRow]) -> None:
        for row in rows:
            if row.header.key not in self._dropping:
                node = self._holdings.add(row.header, Where.DISK, row.retention)
                node.hits = max(node.hits, row.hits - 1)
                node.used_at = max(node.used_at, row.last_used_at)

    def _on_dropped(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._dropping[key] -= 1
            if not self._dropping[key]:
                del self._dropping[key]

    def _take_in(self, written: Written) -> None:
        self._note_trouble(None)
        self._on_written(written.key)
        self._count("disk_evictions", len(written.evicted))
        for key in written.evicted:
            if (gone := self._holdings.index.get(key)) is not None:
                self._holdings.remove(gone, Where.DISK)
        failed = list(self._failed)
        self._failed.clear()
        self._offer_again(failed)

    def _note_failure(self, key: Key, why: str) -> None:
        self._budget.give_back(self._writing[key].payload_bytes)
        self._failures[key] = WriteFailure(time.monotonic(), why)
        while len(self._failures) > MAX_FAILED:
            del self._failures[next(iter(self._failures))]

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        if trouble is not None:
            _log.warning("cache: the disk takes nothing in, memory goes on: %s", trouble)
        elif self._trouble is not None:
            _log.info("cache: the disk takes entries again")
        self._trouble = trouble
