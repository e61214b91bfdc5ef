"""Which entries are in the shared store, on their way there, or on their way back.

Other servers' entries are never listed. A prompt is looked up by the keys of its blocks when it
arrives, and the entries found join the index. A store that does not answer costs one request a
few milliseconds; then no request asks it until it answers again. Owned by the engine thread.
"""

import time
from collections.abc import Callable, Sequence

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.entry import BLOCK_TOKENS, Key, Kind
from rekindle.cache.index import Match, Node, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.policy import Speed, WriteRules, admits_to_shared
from rekindle.cache.residency import Residency
from rekindle.cache.shared.heads import Head
from rekindle.cache.shared.tier import KnownEntry
from rekindle.cache.shared.transfers import (
    N_LOOKUP_THREADS,
    LookedUp,
    SharedLookup,
    SharedTransfers,
)
from rekindle.cache.stores.back_store import BackStore
from rekindle.cache.stores.transfers import Dropped, ReadFailed, Vanished, WriteFailed, Written
from rekindle.config.declare import MIB
from rekindle.generation.events import CacheSource
from rekindle.generation.forgetting import Tombstone
from rekindle.generation.status import TierCounters, TierStatus

# All of these are picked.
MIN_LOOKUP_TOKENS = 64  # fewest missing tokens for which the store is asked
LOOKUP_SHARE = 0.1  # longest lookup, as a share of the time to compute those tokens
LOOKUP_SECONDS = (0.01, 0.25)  # lower and upper limit of that time
DEAR_LOOKUP_SECONDS = (0.25, 1.0)  # the same for a store like S3, with a round trip for each name
MAX_PENDING_BYTES = 256 * MIB  # of writes under way
MAX_DEFERRED = 4096
MAX_KNOWN = 100_000  # entries that only the shared store has
MAX_NAMESPACES = 10_000
TOUCH_SECONDS = 600.0  # between two touches of an entry


class SharedResidency(BackStore):
    place = Where.SHARED
    transfers: SharedTransfers

    def __init__(
        self,
        transfers: SharedTransfers,
        holdings: Residency,
        rules: WriteRules,
        counters: TierCounters,
        read_speed: Speed,
    ) -> None:
        super().__init__(transfers, holdings, rules, counters, read_speed)
        self._store = transfers.store
        self._n_lookups = 0  # under way
        self._known = transfers.known  # every entry that is in the store or on its way there
        # By their roots. An entry of a namespace that was not seen lately is not written.
        self._namespaces: BoundedCache[Key, str] = BoundedCache(max_items=MAX_NAMESPACES)
        self._pending_bytes = 0
        self._stop_listening: Callable[[], None] = lambda: None
        # Written once there is room for them.
        self._deferred: BoundedCache[Key, Node] = BoundedCache(max_items=MAX_DEFERRED)

    @property
    def is_well(self) -> bool:
        return self._store.health.is_well

    def start(self) -> None:
        super().start()
        self._stop_listening = self._store.health.on_change(self.transfers.pool.notify)

    def close(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        self.poll()
        while self._deferred and self.is_well and (left := deadline - time.monotonic()) > 0:
            if not self.wait(left):
                break
            self.poll()
        self._stop_listening()
        super().close(max(deadline - time.monotonic(), 0.0))

    def poll(self) -> bool:
        has_more = super().poll()
        while self._deferred and self._pending_bytes < MAX_PENDING_BYTES // 2 and self.is_well:
            _, node = self._deferred.pop_oldest()
            self._offer_again([node])
        return has_more

    def note_namespace(self, root: Key, namespace: str) -> None:
        """Note whose entries follow the root: names in the store depend on the namespace."""
        self._namespaces.put(root, namespace)

    def look_up(
        self, keys: PrefixKeys, match: Match, n_limit: int, compute_seconds: float | None
    ) -> SharedLookup | None:
        """Start to look up the part of a prompt after `match`; None if that is not possible.

        `compute_seconds` is the time to compute that part; None: not measured yet.
        """
        namespace = self._namespaces.get(keys.root)
        if not self.is_well or namespace is None:
            return None
        n_whole = match.n_tokens // BLOCK_TOKENS
        self._counters.lookups += 1
        self._n_lookups += 1
        lookup = SharedLookup(
            namespace=namespace,
            parent=keys.after_blocks(n_whole),
            start=n_whole * BLOCK_TOKENS,
            tokens=keys.between(n_whole * BLOCK_TOKENS, n_limit),
            deadline=time.monotonic() + self._patience(compute_seconds),
        )
        self.transfers.look_up(lookup)
        return lookup

    def forget(self, tombstone: Tombstone) -> None:
        """Write nothing any more that the deletion covers. The server removes the objects."""
        self._store.deletions.forgotten.add(tombstone)

    def give_up(self, lookup: SharedLookup) -> None:
        """End a lookup that took too long. Entries it finds later still join the index."""
        self.poll()  # the answer may have come since the last step
        if lookup.is_over:
            return
        lookup.is_over = True
        self._counters.lookups_failed += 1
        if self._n_lookups <= N_LOOKUP_THREADS:  # else the lookup was queued
            self.note_slow()

    def note_slow(self) -> None:
        self._store.health.note_failure("an answer took too long")

    def offer(self, node: Node, *, was_reused: bool) -> None:
        """Write the entry and its ancestors, if the policy admits it."""
        if not self._may_write(node):
            return
        if node.kind is Kind.CHECKPOINT and not self.transfers.stores_checkpoints:
            return
        is_admitted = admits_to_shared(
            self._rules,
            n_prefix_tokens=node.stop,
            was_reused=was_reused,
            is_pinned=node.retention.pinned_until > time.time(),
            rank=node.retention.rank,
        )
        if is_admitted and not self._may_send:
            self._deferred.put(node.key, node)
            return
        namespace = self._namespace_of(node) if is_admitted else None
        path = self._unwritten_path(node) if namespace is not None else []
        if namespace is None or not path:  # not admitted, or a part of the path is only on disk
            self._counters.writes_refused += 1
            return
        for each in path:
            if not self._may_send:
                self._deferred.put(node.key, node)
                return
            self._pending_bytes += each.payload_bytes
            self._known.put(each.key, KnownEntry(namespace, each.payload_bytes, 0.0))
            self._begin_write(each)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Touch the entries now and then: the store would expire entries served from memory."""
        if not self.is_well:
            return
        now = time.monotonic()
        due = []
        for node in nodes:
            known = self._known.peek(node.key) if Where.SHARED in node.where else None
            if known is not None and now >= known.touched_at + TOUCH_SECONDS:
                due.append(node)
                self._known.put(node.key, known._replace(touched_at=now))
        super().touch(due)

    def mark(self, node: Node) -> None:
        """Do nothing: retention is each server's own."""

    def discard(self, keys: Sequence[Key]) -> None:
        """Do nothing: other servers may use the entries, and the store makes its own room."""

    def let_go(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key not in self.writing:
                self._known.pop(key)

    def quarantine(self, node: Node, why: str) -> None:
        if Where.SHARED in node.where:
            self._counters.quarantined += 1
        super().quarantine(node, why)

    def status(self) -> TierStatus:
        """Count only the entries that this server wrote or looked up."""
        return TierStatus(
            name=CacheSource.SHARED,
            n_entries=len(self._known) - len(self.writing),
            n_bytes=0,
            budget_bytes=0,
            trouble=self._store.health.trouble,
            directory=self._store.place,
        )

    @property
    def _may_send(self) -> bool:
        return self._pending_bytes < MAX_PENDING_BYTES and self.is_well

    def _patience(self, compute_seconds: float | None) -> float:
        is_dear = self._store.reads_are_dear
        least, most = DEAR_LOOKUP_SECONDS if is_dear else LOOKUP_SECONDS
        if compute_seconds is None:
            return most
        return min(max(compute_seconds * LOOKUP_SHARE, least), most)

    def _namespace_of(self, node: Node) -> str | None:
        root = self._holdings.index.root_of(node)
        return self._namespaces.peek(root) if root is not None else None

    def _on(self, event: object) -> None:
        match event:
            case LookedUp(lookup, heads, n_corrupt, trouble):
                self._counters.quarantined += n_corrupt
                self._on_looked_up(lookup, heads, trouble)
            case Written(key, _):
                self._pending_bytes -= self.writing[key].payload_bytes
                if (known := self._known.peek(key)) is not None:
                    self._known.put(key, known._replace(touched_at=time.monotonic()))
            case WriteFailed(key, trouble):
                node = self.writing[key]
                self._pending_bytes -= node.payload_bytes
                if Where.SHARED not in node.where:
                    self._known.pop(key)
                if trouble is not None and not self.is_well:  # else the entry is at fault
                    self._deferred.put(key, node)
            case Vanished(keys):
                for key in keys:
                    self._known.pop(key)
            case Dropped(keys):
                for key in keys:
                    self._forget(key)
            case ReadFailed(key, _):
                self._known.pop(key)
        super()._on(event)
        self._forget_oldest()

    def _on_looked_up(
        self, lookup: SharedLookup, heads: Sequence[Head], trouble: str | None
    ) -> None:
        self._n_lookups -= 1
        if trouble is not None and not lookup.is_over:
            self._counters.lookups_failed += 1
        lookup.is_over = True
        now = time.monotonic()
        forgotten = self._store.deletions.forgotten  # a deletion may have come since
        for head in heads:
            if forgotten.cover(head.owner):
                continue
            header = head.header
            self._holdings.add(header, Where.SHARED, head.retention)
            self._known.put(header.key, KnownEntry(lookup.namespace, header.payload_bytes, now))

    def _forget(self, key: Key) -> None:
        """Forget a dropped entry, unless it was found or written again since."""
        node = self._holdings.index.get(key)
        if key not in self.writing and (node is None or Where.SHARED not in node.where):
            self._known.pop(key)

    def _forget_oldest(self) -> None:
        """Forget the least recently used entries beyond the bound. The store keeps them."""
        while len(self._known) > MAX_KNOWN:
            key, known = self._known.pop_oldest()
            node = self._holdings.index.get(key)
            if node is not None and node.leases:
                self._known.put(key, known._replace(touched_at=time.monotonic()))
                return  # the next call evicts another entry
            if node is not None:
                self._holdings.remove(node, Where.SHARED)
