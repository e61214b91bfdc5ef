"""What is held and where: the index, the memory tier, and who has to leave it.

Every payload in this process is in the memory tier, also while it is written or read, so one
budget covers all of them. An entry that is leased stays, and so does one that is pinned and
nowhere else. Entries of sub-agents and side requests leave before those of conversations.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from rekindle.cache.entry import ORDINARY, Entry, Header, Key, Kind, Retention
from rekindle.cache.eviction_queue import EvictionQueue
from rekindle.cache.index import NOWHERE, Node, PrefixIndex, Where
from rekindle.cache.memory.tier import MemoryTier, size_in_memory
from rekindle.cache.pins import Pins
from rekindle.cache.policy import priority
from rekindle.generation.model_state import Payload
from rekindle.generation.request import CacheTerms, Rank

STAGED_ENTRIES = 4  # on their way to or from the disk, whatever the memory budget is; picked
ELSEWHERE = Where.DISK | Where.SHARED  # than in memory
EVERYWHERE = Where.MEMORY | ELSEWHERE


class Holdings:
    """The disk is told by `drop_from_disk` what must go there, by `mark_on_disk` whose standing
    has changed; the shared store by `drop_from_shared` what somebody deleted, for the rest it
    looks after itself. `reload_seconds` says what a reload costs.
    """

    def __init__(
        self,
        index: PrefixIndex,
        memory: MemoryTier,
        pins: Pins,
        *,
        drop_from_disk: Callable[[Sequence[Key]], None],
        drop_from_shared: Callable[[Sequence[Key]], None],
        mark_on_disk: Callable[[Node], None],
        reload_seconds: Callable[[Node], float | None],
    ) -> None:
        self.index = index
        self.memory = memory
        self.n_on_disk = 0
        self.n_evicted = 0
        self.n_covered = 0
        self.n_leases = 0
        self._drop_from_disk = drop_from_disk
        self._drop_from_shared = drop_from_shared
        self._mark_on_disk = mark_on_disk
        self._reload_seconds = reload_seconds
        self._pins = pins
        self._last_checkpoint: Header | None = None
        self._queues = {rank: EvictionQueue() for rank in sorted(Rank, reverse=True)}

    def add(self, header: Header, where: Where, retention: Retention = ORDINARY) -> Node:
        known = self.index.get(header.key)
        before = known.where if known is not None else NOWHERE
        node = self.index.add(header, where)
        if header.kind is Kind.CHECKPOINT:
            self._last_checkpoint = header
        self.n_on_disk += (Where.DISK in node.where) - (Where.DISK in before)
        if known is None:
            node.retention = retention
            node.used_at = header.created_at
            self._pins.adopt(node, time.time())
            if node.parent is not None:
                self._requeue(node.parent)
            self._drop_covered(node)
        self._requeue(node)
        return node

    def hold(self, entry: Entry) -> Node:
        """Takes the payload in; whoever calls has made room for it."""
        self.memory.put(entry)
        return self.add(entry.header, Where.MEMORY, entry.retention)

    def note_stored(self, node: Node, where: Where) -> None:
        self.n_on_disk += Where.DISK in where & ~node.where
        node.where |= where
        self._drop_covered(node)
        self._requeue(node)

    def remove(self, node: Node, where: Where) -> None:
        """Takes residence away; the last one takes the node with it."""
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

    def drop(self, node: Node, where: Where = EVERYWHERE) -> None:
        if Where.DISK in where & node.where:
            self._drop_from_disk([node.key])
        self.remove(node, where)

    def drop_all(self, nodes: Sequence[Node]) -> None:
        """Children before their parents; from each store all at once."""
        if on_disk := [node.key for node in nodes if Where.DISK in node.where]:
            self._drop_from_disk(on_disk)
        if shared := [node.key for node in nodes if Where.SHARED in node.where]:
            self._drop_from_shared(shared)
        for node in nodes:
            self.remove(node, EVERYWHERE)

    def _drop_covered(self, node: Node) -> None:
        # Only where the longer one is: until it is written, a crash would leave neither.
        for short in self.index.covered_by(node):
            if not short.leases:
                until = max(node.retention.pinned_until, short.retention.pinned_until)
                rank = min(node.retention.rank, short.retention.rank)
                self._set_standing(node, node.retention._replace(rank=rank, pinned_until=until))
                self.n_covered += 1
                self.drop(short, node.where)
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
        """An entry is as dear as the dearest of those that use it."""
        node.hits += 1
        node.used_at = time.time()
        retention = node.retention
        if terms.rank < retention.rank:
            retention = retention._replace(rank=terms.rank, session=terms.session)
        self._set_standing(node, retention)

    def pin(self, session: str, nodes: Iterable[Node], until: float) -> list[Node]:
        """Those whose pins are new or longer now."""
        self._unpin(time.time())
        pinned = list(self._pins.grant(session, nodes, until))
        for node in pinned:
            self._requeue(node)
            self._mark_on_disk(node)
        return pinned

    def set_pin(self, nodes: Iterable[Node], until: float) -> None:
        """Until then, whatever was promised before."""
        for node in nodes:
            self._pins.release(node.key)
            self._set_standing(node, node.retention._replace(pinned_until=until))
            self._pins.adopt(node, time.time())

    def _set_standing(self, node: Node, retention: Retention) -> None:
        if retention != node.retention:
            self._queues[node.retention.rank].discard(node.key)
            node.retention = retention
            self._mark_on_disk(node)
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
        if self.memory.n_bytes > n_bytes:
            self._unpin(time.time())
        while self.memory.n_bytes > n_bytes:
            key = self._lowest()
            if key is None:
                return False
            node = self.index.get(key)
            assert node is not None
            self.n_evicted += 1
            self.remove(node, Where.MEMORY)
        return True

    def _lowest(self) -> Key | None:
        keys = (queue.pop_lowest(lambda _: True) for queue in self._queues.values())
        return next((key for key in keys if key is not None), None)

    def _unpin(self, now: float) -> None:
        for key in self._pins.expired(now):
            node = self.index.get(key)
            if node is None:
                self._pins.release(key)
            elif node.retention.pinned_until > now:
                self._pins.wait_for(node)  # it was made longer meanwhile
            else:
                self._pins.release(key)
                self._requeue(node)

    def _requeue(self, node: Node) -> None:
        """Keeps the queue to what may go: not leased, and elsewhere too or a leaf."""
        current = self.index.get(node.key)
        if current is not None and current is not node:
            return  # an entry that was dropped has come back as another node
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
            # A block without rows leads to checkpoints, and here to none. By its own few bytes it
            # would stay longest, and memory would fill with such: it stays as long as they do.
            priced = self._last_checkpoint
        seconds = priced.compute_seconds
        if node.where & ELSEWHERE:
            seconds = min(seconds, self._reload_seconds(node) or seconds)
        return priority(clock, seconds, size_in_memory(priced.payload_bytes), 1 + node.hits)
