"""Stores behind memory, as the prefix cache sees them, and their entries in transit.

`disk.residency` and `shared.residency` decide what is written. All of this belongs to the
engine thread.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from rekindle.cache.entry import Entry, Key
from rekindle.cache.index import Node, Where
from rekindle.cache.policy import Speed, WriteRules
from rekindle.cache.residency import HoldingsListener, Residency
from rekindle.cache.stores.read_queue import ReadOrder
from rekindle.cache.stores.transfers import (
    Arrived,
    EntryTransfers,
    ReadFailed,
    Vanished,
    WriteFailed,
    Written,
)
from rekindle.errors import CacheError, EntryCorrupt, EntryMissing
from rekindle.generation.status import TierCounters, TierStatus

_log = logging.getLogger("rekindle.cache")

# Both are picked.
HANG_SECONDS = 10.0  # the store hangs if no write has ended for this long
POLL_SECONDS = 0.005  # for the events of finished transfers, in one step of the engine


class BackStore(HoldingsListener, ABC):
    """A store behind memory, and the entries on their way to it and back.

    An entry is leased while it is written. A read reserves its bytes in memory.
    """

    def __init__(
        self,
        transfers: EntryTransfers,
        holdings: Residency,
        rules: WriteRules,
        counters: TierCounters,
        read_speed: Speed,
    ) -> None:
        self.writing: dict[Key, Node] = {}
        self.n_events = 0  # handled so far
        self._reading: dict[Key, int] = {}  # bytes reserved for each
        self.transfers = transfers
        self._holdings = holdings
        self._rules = rules
        self._counters = counters
        self._read_speed = read_speed
        self._write_ended_at = 0.0  # end of the last write, or start of the first in a series

    @abstractmethod
    def offer(self, node: Node, *, was_reused: bool) -> None:
        """Write the entry and its ancestors, if the store admits them."""

    @abstractmethod
    def status(self) -> TierStatus: ...

    def start(self) -> None:
        self.transfers.start()

    def close(self, grace_seconds: float) -> None:
        """Finish the transfers under way within the grace period."""
        self.transfers.close(grace_seconds)
        self._handle_events()

    def poll(self) -> bool:
        """Handle finished transfers for a moment. Return True if more may be waiting."""
        return self._handle_events(POLL_SECONDS)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for one transfer to finish. Return False if none did in time."""
        event = self.transfers.pool.wait(timeout_seconds)
        if event is not None:
            self._on(event)
        return event is not None

    def touch(self, nodes: Sequence[Node]) -> None:
        """Tell the store that these entries were used."""
        if keys := [node.key for node in nodes if self.place in node.where]:
            self.transfers.touch(keys)

    def drop(self, keys: Sequence[Key]) -> None:
        self.transfers.drop(keys)

    def holds(self, node: Node) -> bool:
        return self.place in node.where or node.key in self.writing

    def quarantine(self, node: Node, why: str) -> None:
        """Remove an entry that the backend refused."""
        if self.place in node.where:
            self.transfers.quarantine(node.key, why)

    @property
    def is_writing(self) -> bool:
        """Whether writes are under way in a store that does not hang."""
        return bool(self.writing) and time.monotonic() < self._write_ended_at + HANG_SECONDS

    def _may_write(self, node: Node) -> bool:
        is_orphan = node.parent is None and node.start > 0  # offered again with its parent
        return self.place not in node.where and node.key not in self.writing and not is_orphan

    def _unwritten_path(self, node: Node) -> list[Node]:
        """Return the end of the path to `node` that the store lacks, first block first.

        Empty if memory lacks a part of it: an entry without its ancestors is never found.
        """
        path: list[Node] = []
        step: Node | None = node
        while step and self.place not in step.where and step.key not in self.writing:
            if Where.MEMORY not in step.where:
                return []
            path.append(step)
            step = step.parent
        return path[::-1]

    def _begin_write(self, node: Node) -> None:
        if not self.writing:
            self._write_ended_at = time.monotonic()
        self.writing[node.key] = node
        self._holdings.lease(node)
        entry = self._holdings.memory.get(node.key)
        root = self._holdings.index.root_of(node)
        self.transfers.write(replace(entry, retention=node.retention, root=root))

    def fetch(self, node: Node, order: ReadOrder, *, must: bool) -> None:
        """Queue the read of a leased node. Unless it `must`, only if memory has room."""
        if Where.MEMORY in node.where:
            return
        if node.key in self._reading:
            self.transfers.reads.hasten(node.key, order)
            return
        if not self._holdings.make_room(node.payload_bytes) and not must:
            return
        self._holdings.memory.reserve(node.payload_bytes)
        self._reading[node.key] = node.payload_bytes
        self.transfers.read(node.key, order)

    def withdraw(self, node: Node) -> None:
        """Withdraw the read of a node that no restore leases any more, unless it has begun."""
        if (
            node.key in self._reading
            and not node.leases
            and self.transfers.reads.withdraw(node.key)
        ):
            self._holdings.memory.give_back(self._reading.pop(node.key))

    def _offer_again(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if Where.MEMORY in node.where:
                self.offer(node, was_reused=True)

    def _handle_events(self, seconds: float = inf) -> bool:
        """Handle events for that long. Return True if more may be waiting."""
        deadline = time.monotonic() + seconds
        while (event := self.transfers.pool.poll()) is not None:
            self._on(event)
            if time.monotonic() >= deadline:
                return True
        return False

    def _on(self, event: object) -> None:
        """Apply an event of the transfer threads to the holdings."""
        self.n_events += 1
        match event:
            case Written(key, _):
                self._on_written(key)
            case WriteFailed(key, _):
                self._counters.writes_failed += 1
                self._end_write(key)
            case Vanished(keys):
                self._on_vanished(keys)
            case Arrived(entry, seconds):
                self._on_arrived(entry, seconds)
            case ReadFailed(key, error):
                self._on_read_failed(key, error)

    def _on_written(self, key: Key) -> None:
        node = self.writing[key]
        # Writes run one after another: each began when the one before it ended.
        self._counters.note_write(node.payload_bytes, time.monotonic() - self._write_ended_at)
        current = self._holdings.index.get(key)
        if current is node:
            self._holdings.note_stored(node, self.place)
        else:
            self.drop([key])  # the node was dropped during the write
        self._end_write(key)
        if current is not None and current is not node:
            self._offer_again([current])  # the entry was stored again during the write

    def _end_write(self, key: Key) -> None:
        self._write_ended_at = time.monotonic()
        self._holdings.release(self.writing.pop(key))
        self._holdings.shrink()

    def _on_vanished(self, keys: Sequence[Key]) -> None:
        # An entry being read gets an event of its own.
        nodes = [self._holdings.index.get(key) for key in keys if key not in self._reading]
        gone = [node for node in nodes if node is not None and self.place in node.where]
        if gone:
            _log.info("cache: entries vanished tier=%s n=%d", self.place.cheapest, len(gone))
        self._counters.vanished += len(gone)
        for node in gone:
            self._holdings.remove(node, self.place)
        self._offer_again(gone)

    def _on_arrived(self, entry: Entry, seconds: float) -> None:
        key, n_bytes = entry.header.key, entry.header.payload_bytes
        self._holdings.memory.give_back(self._reading.pop(key))
        self._read_speed.observe(n_bytes, seconds)
        self._counters.note_read(n_bytes, seconds)
        if self._holdings.index.get(key) is not None and key not in self._holdings.memory:
            self._holdings.hold(entry)
        self._holdings.shrink()

    def _on_read_failed(self, key: Key, error: CacheError) -> None:
        self._counters.quarantined += isinstance(error, EntryCorrupt)
        self._counters.vanished += isinstance(error, EntryMissing)
        self._holdings.memory.give_back(self._reading.pop(key))
        if (missed := self._holdings.index.get(key)) is not None:
            self._holdings.remove(missed, self.place)


def fetch(back_stores: Iterable[BackStore], node: Node, order: ReadOrder, *, must: bool) -> None:
    """Queue the read of a leased node from the first store that holds it."""
    for store in back_stores:
        if store.place in node.where:
            store.fetch(node, order, must=must)
            return
