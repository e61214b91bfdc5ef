"""Which entries are stored where: the index, the memory tier, and the order of eviction.

Every payload in this process is in the memory tier, also while it is written or read, so one
budget covers all of them. A leased entry is never evicted, nor is a pinned one that only memory
holds. Entries of sub-agents and side requests are evicted before those of conversations.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rekindle.cache.entry import ORDINARY, Entry, Header, Key, Kind, Retention
from rekindle.cache.forgetting.verdict import Heir
from rekindle.cache.index import NOWHERE, Node, PrefixIndex, Where
from rekindle.cache.key_heap import KeyHeap
from rekindle.cache.memory.tier import MemoryTier, size_in_memory
from rekindle.cache.pins import Pins
from rekindle.cache.policy import priority
from rekindle.generation.model_state import Payload
from rekindle.generation.request import CacheTerms, Rank
from rekindle.generation.status import CacheCounters

STAGED_ENTRIES = 4  # entries in transit that the memory budget always allows; picked
ELSEWHERE = Where.DISK | Where.SHARED  # not in memory
EVERYWHERE = Where.MEMORY | ELSEWHERE


class HoldingsListener(Protocol):
    """A store behind memory that follows changes of its entries. `place` is its flag on nodes."""

    place: Where

    def holds(self, node: Node) -> bool:
        """Return whether the store has the entry, or is about to."""
        ...

    def mark(self, node: Node) -> None:
        """Record the node's changed retention."""
        ...

    def discard(self, keys: Sequence[Key]) -> None:
        """Delete entries that other entries replace."""
        ...

    def drop(self, keys: Sequence[Key]) -> None:
        """Delete entries on request."""
        ...

    def let_go(self, keys: Sequence[Key]) -> None:
        """Note that entries leave the index. Something else deletes them from the store."""
        return


class Residency:
    """`reload_seconds` estimates the time to read a node back into memory."""

    def __init__(
        self,
        index: PrefixIndex,
        memory: MemoryTier,
        pins: Pins,
        counters: CacheCounters,
        *,
        reload_seconds: Callable[[Node], float | None],
    ) -> None:
        self.index = index
        self.memory = memory
        self.listeners: Sequence[HoldingsListener] = ()  # the back stores, once they exist
        self.on_new: Callable[[Node], None] = lambda node: None
        self.on_dropped: Callable[[], None] = lambda: None  # on request
        self.n_on_disk = 0
        self.n_leases = 0
        self._counters = counters
        self._reload_seconds = reload_seconds
        self._pins = pins
        self._last_checkpoint: Header | None = None
        # Only keys that may be evicted now: see `_requeue`.
        self._queues = {rank: KeyHeap() for rank in sorted(Rank, reverse=True)}

    def add(self, header: Header, where: Where, retention: Retention = ORDINARY) -> Node:
        """Note that a tier holds the entry. `retention` counts for entries not known before."""
        known = self.index.get(header.key)
        before = known.where if known is not None else NOWHERE
        node = self.index.add(header, where)
        if header.kind is Kind.CHECKPOINT:
            self._last_checkpoint = header
        self.n_on_disk += (Where.DISK in node.where) - (Where.DISK in before)
        if known is None:
            asked_at = retention.asked_at or header.created_at
            node.retention = retention._replace(asked_at=asked_at)
            node.used_at = header.created_at
            self._pins.adopt(node, time.time())
            if node.parent is not None:
                self._requeue(node.parent)
            self._drop_covered(node)
            self.on_new(node)
        self._requeue(node)
        return node

    def hold(self, entry: Entry) -> Node:
        """Put an entry into memory. The caller has made room for it."""
        self.memory.put(entry)
        return self.add(entry.header, Where.MEMORY, entry.retention)

    def note_stored(self, node: Node, where: Where) -> None:
        self.n_on_disk += Where.DISK in where & ~node.where
        node.where |= where
        self._drop_covered(node)
        self._requeue(node)

    def remove(self, node: Node, where: Where) -> None:
        """Note that tiers no longer hold the entry. Remove the node once no tier holds it."""
        if Where.MEMORY in where & node.where:
            self.memory.drop([node.key])
        self.n_on_disk -= Where.DISK in where & node.where
        parent = node.parent
        self.index.remove(node, where)
        if not node.where:
            self._pins.release(node.key)
        self._requeue(node)
        if parent is not None:
            self._requeue(parent)

    def discard(self, node: Node, where: Where = EVERYWHERE) -> None:
        """Drop an entry that other entries replace."""
        for store in self.listeners:
            if store.place in where & node.where:
                store.discard([node.key])
        self.remove(node, where)

    def drop(self, nodes: Sequence[Node], *, but: Where = NOWHERE) -> None:
        """Drop entries on request, with one call per store. List children before their parents.

        The stores `but` delete their own.
        """
        for store in self.listeners:
            if keys := [node.key for node in nodes if store.holds(node)]:
                store.let_go(keys) if store.place in but else store.drop(keys)
        for node in nodes:
            self.remove(node, EVERYWHERE)
        self.on_dropped()

    def _drop_covered(self, node: Node) -> None:
        """Discard shorter blocks from the tiers that hold this longer one.

        Elsewhere they stay: a crash before the longer one is written would lose both.
        """
        for short in self.index.covered_by(node):
            if not short.leases:
                until = max(node.retention.pinned_until, short.retention.pinned_until)
                rank = min(node.retention.rank, short.retention.rank)
                self._set_retention(node, node.retention._replace(rank=rank, pinned_until=until))
                self._counters.covered += 1
                self.discard(short, node.where)
                self._pins.adopt(node, time.time())

    def lease(self, node: Node) -> None:
        node.leases += 1
        self.n_leases += 1
        self._requeue(node)

    def release(self, node: Node) -> None:
        node.leases -= 1
        self.n_leases -= 1
        assert node.leases >= 0
        self._requeue(node)

    def note_use(self, node: Node, terms: CacheTerms) -> None:
        """Count a use. An entry takes the highest rank among its users."""
        node.hits += 1
        node.used_at = time.time()
        retention = node.retention
        if terms.rank < retention.rank:
            retention = retention._replace(rank=terms.rank, session=terms.session)
        self._set_retention(node, retention)

    def pin(self, session: str, nodes: Iterable[Node], until: float) -> list[Node]:
        """Pin nodes as far as the session's quota lasts. Return those newly pinned or extended."""
        self._unpin(time.time())
        pinned = list(self._pins.grant(session, nodes, until))
        for node in pinned:
            self._requeue(node)
            self._mark(node)
        return pinned

    def set_pin(self, nodes: Iterable[Node], until: float) -> None:
        """Set the end of the nodes' pins, whatever it was before."""
        for node in nodes:
            self._pins.release(node.key)
            self._set_retention(node, node.retention._replace(pinned_until=until))
            self._pins.adopt(node, time.time())

    def hand_over(self, node: Node, heir: Heir) -> None:
        """Give an entry to another request that has sent it, too."""
        self._set_retention(node, node.retention._replace(**heir._asdict()))

    def _set_retention(self, node: Node, retention: Retention) -> None:
        if retention != node.retention:
            self._queues[node.retention.rank].discard(node.key)
            node.retention = retention
            self._mark(node)
        self._requeue(node)

    def _mark(self, node: Node) -> None:
        for store in self.listeners:
            store.mark(node)

    def payload(self, node: Node) -> Payload | None:
        return self.memory.get(node.key).payload if Where.MEMORY in node.where else None

    def make_room(self, payload_bytes: int) -> bool:
        """Evict until a payload fits. Return False if too few entries may be evicted."""
        # With a budget near 0, a few entries may still be in transit to or from the disk.
        size = size_in_memory(payload_bytes)
        return self._evict_to(max(self.memory.budget_bytes, STAGED_ENTRIES * size) - size)

    def shrink(self) -> None:
        self._evict_to(self.memory.budget_bytes)

    def _evict_to(self, n_bytes: int) -> bool:
        if self.memory.n_bytes > n_bytes:
            self._unpin(time.time())
        while self.memory.n_bytes > n_bytes:
            key = self._lowest()
            if key is None:
                return False
            node = self.index.get(key)
            assert node is not None
            self._counters.memory.evictions += 1
            self.remove(node, Where.MEMORY)
        return True

    def _lowest(self) -> Key | None:
        keys = (queue.pop_lowest() for queue in self._queues.values())
        return next((key for key in keys if key is not None), None)

    def _unpin(self, now: float) -> None:
        for key in self._pins.expired(now):
            self._pins.release(key)
            if (node := self.index.get(key)) is not None:
                self._requeue(node)

    def _requeue(self, node: Node) -> None:
        """Queue the node if memory may evict it: not leased, and a leaf or stored elsewhere."""
        current = self.index.get(node.key)
        if current is not None and current is not node:
            return  # the entry was dropped and stored again as another node
        is_free = Where.MEMORY in node.where and not node.leases
        is_elsewhere = bool(node.where & ELSEWHERE)
        is_pinned = node.retention.pinned_until > time.time() and Where.DISK not in node.where
        queue = self._queues[node.retention.rank]
        if is_free and not is_pinned and (is_elsewhere or node.is_leaf):
            queue.push(node.key, self._worth(queue.clock, node))
        else:
            queue.discard(node.key)

    def _worth(self, clock: float, node: Node) -> float:
        priced: Node | Header = node
        if self._last_checkpoint is not None and node.is_leaf and not node.payload_bytes:
            # A block without rows is only useful for the checkpoints after it. There are none.
            # Its few bytes would keep it longest, so it is priced like a checkpoint.
            priced = self._last_checkpoint
        seconds = priced.compute_seconds
        if node.where & ELSEWHERE:
            seconds = min(seconds, self._reload_seconds(node) or seconds)
        return priority(clock, seconds, size_in_memory(priced.payload_bytes), 1 + node.hits)
