"""What of the holdings is on disk, on its way there, or on its way back.

Decides what is worth writing, keeps count of what moves, and turns what the transfer threads
report into changes of the holdings. Owned by the engine thread.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rekindle.cache.block import Entry, Key
from rekindle.cache.holdings import Holdings
from rekindle.cache.names import Named, Names
from rekindle.cache.policy import Speed, WriteBudget, admits_to_disk
from rekindle.cache.prefix_index import Node, Where
from rekindle.cache.transfers import (
    Arrived,
    Event,
    Found,
    Opened,
    ReadFailed,
    Relisted,
    Transfers,
    Vanished,
    WriteFailed,
    Written,
)
from rekindle.config import WritePolicy
from rekindle.errors import EntryCorrupt, EntryMissing
from rekindle.generation import CacheSource, TierStatus

_log = logging.getLogger("rekindle.cache")

MAX_FAILED = 4096  # picked
HANG_SECONDS = 10.0  # without one write that ended, well or not; picked
START_SECONDS = 1.0  # how long the first request waits for the index of a huge store; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRules:
    bytes_per_hour: int  # 0: no limit
    policy: WritePolicy
    min_tokens: int


class Failure(NamedTuple):
    at: float
    why: str


class DiskStore:
    def __init__(
        self,
        transfers: Transfers,
        holdings: Holdings,
        names: Names,
        rules: WriteRules,
        counters: dict[str, int],
        read_speed: Speed,
    ) -> None:
        self._transfers = transfers
        self._holdings = holdings
        self._names = names
        self._rules = rules
        self._counters = counters
        self._read_speed = read_speed
        self._budget = WriteBudget(rules.bytes_per_hour)
        self._n_bytes = 0
        self._trouble: str | None = None
        self._writing: dict[Key, Node] = {}  # each leased until it is written
        self._write_ended_at = 0.0  # or the first of them began
        self._failed: deque[Node] = deque(maxlen=MAX_FAILED)  # written when the disk is well again
        self._failures: dict[Key, Failure] = {}  # of the same, and why
        self._reading: dict[Key, int] = {}  # bytes reserved for each

    @property
    def trouble(self) -> str | None:
        """Why the disk takes nothing in at the moment."""
        return self._trouble

    @property
    def n_writing(self) -> int:
        return len(self._writing)

    @property
    def is_writing(self) -> bool:
        """A disk that hangs is none to wait for."""
        return bool(self._writing) and time.monotonic() < self._write_ended_at + HANG_SECONDS

    def start(self) -> bool:
        """Reads the index of what is there; False: a huge one goes on being read while we serve."""
        began = time.monotonic()
        self._transfers.start()
        while (left := began + START_SECONDS - time.monotonic()) > 0:
            if (event := self._transfers.wait(left)) is None:
                return False
            self._on(event)
            if isinstance(event, Opened):
                return True
        return False

    def close(self, grace_seconds: float) -> None:
        self._transfers.close(grace_seconds)
        while (event := self._transfers.poll()) is not None:
            self._on(event)

    def poll(self) -> bool:
        """Takes in what is finished; True: there is more, but it would take too long at once."""
        while (event := self._transfers.poll()) is not None:
            self._on(event)
            if isinstance(event, Found):
                return True
        return False

    def wait(self, timeout_seconds: float) -> bool:
        event = self._transfers.wait(timeout_seconds)
        if event is not None:
            self._on(event)
        return event is not None

    def is_writing_it(self, node: Node) -> bool:
        return node.key in self._writing

    def failure_since(self, node: Node, since: float) -> str | None:
        """Why it was not written, if that was tried since then."""
        failure = self._failures.get(node.key)
        return failure.why if failure is not None and failure.at >= since else None

    def offer(self, node: Node, *, was_reused: bool, must: bool = False) -> None:
        """Writes the entry, and what leads to it, unless that would wear out the disk.

        It `must` where somebody waits for it: then only the budget counts.
        """
        if Where.DISK in node.where or node.key in self._writing or _is_orphan(node):
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
        for each in self._only_in_memory(node) if is_admitted else [node]:
            if not is_admitted or not self._budget.take(each.payload_bytes, now):
                self._counters["writes_refused"] += 1
                return
            if not self._writing:
                self._write_ended_at = now
            self._writing[each.key] = each
            self._holdings.lease(each)
            entry = self._holdings.memory.get(each.key)
            self._transfers.write(replace(entry, standing=each.standing))

    def fetch(self, node: Node, *, must: bool) -> None:
        """Starts reading a leased node. Unless it `must`, only where there is room."""
        if node.key in self._reading or Where.MEMORY in node.where:
            return
        if not self._holdings.make_room(node.payload_bytes) and not must:
            return
        self._holdings.memory.reserve(node.payload_bytes)
        self._reading[node.key] = node.payload_bytes
        self._transfers.read(node.key)

    def touch(self, nodes: Sequence[Node]) -> None:
        if keys := [node.key for node in nodes if Where.DISK in node.where]:
            self._transfers.touch(keys)

    def mark(self, node: Node) -> None:
        """Behind the write that may still be under way, as jobs are done in order."""
        if Where.DISK in node.where or node.key in self._writing:
            self._transfers.mark(node.key, node.standing)

    def give_name(self, named: Named) -> None:
        self._transfers.give_name(named)

    def drop_names(self, names: Sequence[Named]) -> None:
        self._transfers.drop_names(names)

    def drop(self, keys: Sequence[Key]) -> None:
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

    def _only_in_memory(self, node: Node) -> list[Node]:
        """The end of the path to `node` that is neither on disk nor on its way there."""
        path: list[Node] = []
        step: Node | None = node
        while step and Where.DISK not in step.where and step.key not in self._writing:
            path.append(step)
            step = step.parent
        return path[::-1]

    def _on(self, event: Event) -> None:
        match event:
            case Found(rows):
                for row in rows:
                    node = self._holdings.add(row.header, Where.DISK, row.standing)
                    node.hits = max(node.hits, row.hits - 1)
                    node.used_at = max(node.used_at, row.last_used_at)
            case Opened(trouble, n_bytes, names):
                self._n_bytes = n_bytes
                for named in names:
                    self._names.give(named)
                self._note_trouble(trouble)
                # A full collection over a million nodes would stop the engine for half a second.
                gc.freeze()
            case Written(key, evicted, n_bytes):
                self._n_bytes = n_bytes
                self._on_written(key, evicted)
            case WriteFailed(key, trouble):
                self._counters["writes_failed"] += 1
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
            case Arrived(entry, seconds):
                self._on_arrived(entry, seconds)
            case ReadFailed(key, error):
                self._holdings.memory.give_back(self._reading.pop(key))
                self._counters["quarantined"] += isinstance(error, EntryCorrupt)
                self._counters["vanished"] += isinstance(error, EntryMissing)
                if (missed := self._holdings.index.get(key)) is not None:
                    self._holdings.remove(missed, Where.DISK)

    def _on_written(self, key: Key, evicted: list[Key]) -> None:
        self._note_trouble(None)
        node = self._writing[key]
        self._counters["writes"] += 1
        self._counters["written_bytes"] += node.payload_bytes
        # One after another: since the one before it ended, or the first of them began.
        self._counters["write_microseconds"] += _microseconds_since(self._write_ended_at)
        if self._holdings.index.get(key) is node:
            self._holdings.note_on_disk(node)
        else:
            self.drop([key])  # it was dropped while it was being written
        self._end_write(key)
        again = self._holdings.index.get(key)
        if again is not None and again is not node:
            self._offer_again([again])  # and then computed once more
        self._counters["disk_evictions"] += len(evicted)
        for evicted_key in evicted:
            if (gone := self._holdings.index.get(evicted_key)) is not None:
                self._holdings.remove(gone, Where.DISK)
        failed = list(self._failed)
        self._failed.clear()
        self._offer_again(failed)

    def _on_vanished(self, keys: list[Key]) -> None:
        # What is being read right now has a word of its own to come.
        nodes = [self._holdings.index.get(key) for key in keys if key not in self._reading]
        gone = [node for node in nodes if node is not None and Where.DISK in node.where]
        if gone:
            _log.info("cache: %d entries are no longer on disk", len(gone))
        self._counters["vanished"] += len(gone)
        for node in gone:
            self._holdings.remove(node, Where.DISK)
        self._offer_again(gone)

    def _offer_again(self, nodes: list[Node]) -> None:
        for node in nodes:
            if Where.MEMORY in node.where:
                self.offer(node, was_reused=True)

    def _note_failure(self, key: Key, why: str) -> None:
        self._budget.give_back(self._writing[key].payload_bytes)
        self._failures[key] = Failure(time.monotonic(), why)
        while len(self._failures) > MAX_FAILED:
            del self._failures[next(iter(self._failures))]

    def _end_write(self, key: Key) -> None:
        self._write_ended_at = time.monotonic()
        self._holdings.release(self._writing.pop(key))
        self._holdings.shrink()

    def _on_arrived(self, entry: Entry, seconds: float) -> None:
        key, n_bytes = entry.header.key, entry.header.payload_bytes
        self._holdings.memory.give_back(self._reading.pop(key))
        self._read_speed.observe(n_bytes, seconds)
        self._counters["read_bytes"] += n_bytes
        self._counters["read_microseconds"] += int(seconds * 1e6)
        if self._holdings.index.get(key) is not None and key not in self._holdings.memory:
            self._holdings.hold(entry)
        self._holdings.shrink()

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        if trouble is not None:
            _log.warning("cache: the disk takes nothing in, memory goes on: %s", trouble)
        elif self._trouble is not None:
            _log.info("cache: the disk takes entries again")
        self._trouble = trouble


def _microseconds_since(began: float) -> int:
    return int((time.monotonic() - began) * 1e6)


def _is_orphan(node: Node) -> bool:
    """A checkpoint may be stored before the block that leads to it; it is offered again then."""
    return node.parent is None and node.start > 0
