"""What is held and where: the index, the memory tier, and who has to leave it.

Every payload in this process is in the memory tier, also while it is written or read, so one
budget covers all of them. An entry that is leased stays.
"""

from collections.abc import Callable

from rekindle.cache.block import Entry, Header, Key
from rekindle.cache.eviction_queue import EvictionQueue
from rekindle.cache.policy import priority
from rekindle.cache.prefix_index import Node, PrefixIndex, Where
from rekindle.cache.tiers.memory import MemoryTier, size_in_memory
from rekindle.model_state import Payload

STAGED_ENTRIES = 4  # on their way to or from the disk, whatever the memory budget is; picked
EVERYWHERE = Where.MEMORY | Where.DISK


class Holdings:
    """`drop_from_disk` is told what must go there, `reload_seconds` says what a reload costs."""

    def __init__(
        self,
        index: PrefixIndex,
        memory: MemoryTier,
        *,
        drop_from_disk: Callable[[Key], None],
        reload_seconds: Callable[[int], float | None],
    ) -> None:
        self.index = index
        self.memory = memory
        self.n_on_disk = 0
        self.n_evicted = 0
        self.n_leases = 0
        self._drop_from_disk = drop_from_disk
        self._reload_seconds = reload_seconds
        self._queue = EvictionQueue()

    def add(self, header: Header, where: Where) -> Node:
        known = self.index.get(header.key)
        before = known.where if known is not None else Where(0)
        node = self.index.add(header, where)
        self.n_on_disk += (Where.DISK in node.where) - (Where.DISK in before)
        if known is None:
            if node.parent is not None:
                self._requeue(node.parent)
            self._drop_covered(node)
        self._requeue(node)
        return node

    def hold(self, entry: Entry) -> Node:
        """Takes the payload in; whoever calls has made room for it."""
        self.memory.put(entry)
        return self.add(entry.header, Where.MEMORY)

    def note_on_disk(self, node: Node) -> None:
        self.n_on_disk += Where.DISK not in node.where
        node.where |= Where.DISK
        self._drop_covered(node)
        self._requeue(node)

    def remove(self, node: Node, where: Where) -> None:
        """Takes residence away; the last one takes the node with it."""
        if Where.MEMORY in where & node.where:
            self.memory.drop([node.key])
        self.n_on_disk -= Where.DISK in where & node.where
        parent = node.parent
        self.index.remove(node, where)
        self._requeue(node)
        if parent is not None:
            self._requeue(parent)

    def drop(self, node: Node, where: Where = EVERYWHERE) -> None:
        if Where.DISK in where & node.where:
            self._drop_from_disk(node.key)
        self.remove(node, where)

    def _drop_covered(self, node: Node) -> None:
        # Only where the longer one is: until it is written, a crash would leave neither.
        for short in self.index.covered_by(node):
            if not short.leases:
                self.drop(short, node.where)

    def lease(self, node: Node) -> None:
        node.leases += 1
        self.n_leases += 1
        self._requeue(node)

    def release(self, node: Node) -> None:
        node.leases -= 1
        self.n_leases -= 1
        assert node.leases >= 0
        self._requeue(node)

    def note_use(self, node: Node) -> None:
        node.hits += 1
        self._requeue(node)

    def payload(self, node: Node) -> Payload | None:
        return self.memory.get(node.key).payload if Where.MEMORY in node.where else None

    def make_room(self, payload_bytes: int) -> bool:
        # A budget below a few entries (0 with a disk tier) still lets some pass through.
        size = size_in_memory(payload_bytes)
        return self._evict_to(max(self.memory.budget_bytes, STAGED_ENTRIES * size) - size)

    def shrink(self) -> None:
        self._evict_to(self.memory.budget_bytes)

    def _evict_to(self, n_bytes: int) -> bool:
        while self.memory.n_bytes > n_bytes:
            key = self._queue.pop_lowest(lambda _: True)
            if key is None:
                return False
            node = self.index.get(key)
            assert node is not None
            self.n_evicted += 1
            self.remove(node, Where.MEMORY)
        return True

    def _requeue(self, node: Node) -> None:
        """Keeps the queue to what may go: not leased, and on disk too or with nothing behind it."""
        current = self.index.get(node.key)
        if current is not None and current is not node:
            return  # an entry that was dropped has come back as another node
        is_free = Where.MEMORY in node.where and not node.leases
        if is_free and (Where.DISK in node.where or node.is_leaf):
            self._queue.push(node.key, self._worth(node))
        else:
            self._queue.discard(node.key)

    def _worth(self, node: Node) -> float:
        seconds = node.compute_seconds
        if Where.DISK in node.where:
            seconds = min(seconds, self._reload_seconds(node.payload_bytes) or seconds)
        size = size_in_memory(node.payload_bytes)
        return priority(self._queue.clock, seconds, size, 1 + node.hits)
