"""The engine loop's interface to stored prefixes: match, restore, save, pin and forget them.

Owned by the engine thread. `residency` knows which entries are stored where, the back stores
(disk and shared) decide what they write, and `entry_writer` stores new entries.
"""

import logging
import time
from dataclasses import dataclass

from rekindle.cache.disk.residency import DiskLookup, DiskResidency
from rekindle.cache.disk.transfers import DiskDeletion, DiskTransfers
from rekindle.cache.drafts.stored_texts import StoredTexts
from rekindle.cache.entry import BLOCK_TOKENS, KEY_BYTES, Key, namespace_root
from rekindle.cache.entry_writer import EntryWriter
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.index import Match, Node, PrefixIndex, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.listing.contents import Contents
from rekindle.cache.listing.slices import Sliced, slices
from rekindle.cache.memory.tier import MemoryTier
from rekindle.cache.names import Named, Names
from rekindle.cache.pins import Pins
from rekindle.cache.policy import TAIL_GRAIN, WriteRules
from rekindle.cache.residency import EVERYWHERE, Residency
from rekindle.cache.restore import Restore
from rekindle.cache.shared.residency import MIN_LOOKUP_TOKENS, SharedResidency
from rekindle.cache.shared.transfers import SharedLookup, SharedTransfers
from rekindle.cache.stores.back_store import BackStore, fetch
from rekindle.cache.stores.backlog import Backlog
from rekindle.cache.stores.load_gate import LoadGate
from rekindle.cache.stores.read_queue import NOBODY_WAITS
from rekindle.config.choices import WritePolicy
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Deleted, Place, Tombstone
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.request import CacheTerms
from rekindle.generation.status import CacheCounters, CacheStatus

_log = logging.getLogger("rekindle.cache")

# A match this long is the use of a conversation, not of a template's first tokens; picked.
MIN_REUSE_TOKENS = 64
MAX_WRITES = 64  # of one prompt that are begun at once; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    memory_bytes: int
    disk_bytes: int
    writes: WriteRules
    may_recompute: bool


class PrefixCache:
    def __init__(
        self,
        root: Key,
        traits: StateTraits,
        policy: CachePolicy,
        disk: DiskTransfers | None,
        shared: SharedTransfers | None,
    ) -> None:
        self.root = root
        self.deletions = disk.tier.deletions if disk is not None else Deletions(root)
        self._n_deleting = 0  # deletions under way
        self.counters = CacheCounters()
        self._backlog = Backlog()
        self.gate = LoadGate(self._backlog, may_recompute=policy.may_recompute)
        self._traits = traits
        self._policy = policy
        self._index = PrefixIndex(
            has_rows=traits.has_rows, has_checkpoints=traits.resumes_at_checkpoints
        )
        self._memory = MemoryTier(policy.memory_bytes)
        self._holdings = Residency(
            self._index,
            self._memory,
            # Pinned entries are written, so the disk's budget counts where there is one.
            Pins(policy.memory_bytes if disk is None else policy.disk_bytes, self._index.root_of),
            self.counters,
            reload_seconds=self.gate.reload_seconds,
        )
        self._names = Names()
        self.contents = Contents(self._holdings, self._names)
        self.texts = StoredTexts(self._index, self._is_deleted)
        self._holdings.on_new, self._holdings.on_dropped = self.texts.note, self.texts.forget
        self._disk: DiskResidency | None = None
        if disk is not None:
            self._disk = DiskResidency(
                disk,
                self._holdings,
                policy.writes,
                self.counters.disk,
                self.gate.read_speed,
                names=self._names,
                budget_bytes=policy.disk_bytes,
                row_bytes=traits.row_bytes,
            )
        self._shared: SharedResidency | None = None
        if shared is not None:
            writes, speed = policy.writes, self.gate.shared_speed
            self._shared = SharedResidency(
                shared, self._holdings, writes, self.counters.shared, speed
            )
        # The cheapest to read from first.
        self._back_stores: tuple[BackStore, ...] = tuple(
            store for store in (self._disk, self._shared) if store is not None
        )
        self._holdings.listeners = self._back_stores
        self.writer = EntryWriter(
            root, self._holdings, self._back_stores, self.counters, is_on=self.is_on
        )

    @classmethod
    def switched_off(cls, why: str) -> "PrefixCache":
        traits = StateTraits(
            ModelClass.OPAQUE, has_rows=False, has_checkpoints=True, off_because=why
        )
        rules = WriteRules(bytes_per_hour=0, policy=WritePolicy.ALL, min_tokens=0)
        policy = CachePolicy(memory_bytes=0, disk_bytes=0, writes=rules, may_recompute=False)
        return cls(bytes(KEY_BYTES), traits, policy, disk=None, shared=None)

    @property
    def is_on(self) -> bool:
        has_room = self._policy.memory_bytes > 0 or bool(self._back_stores)
        return self._traits.off_because is None and has_room

    def start(self) -> None:
        if self._traits.off_because is not None:
            _log.warning("cache: disabled for this model: %s", self._traits.off_because)
        for store in self._back_stores:
            store.start()

    def close(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        for store in self._back_stores:  # later stores keep writing during this
            store.close(max(deadline - time.monotonic(), 0.0))

    def poll(self) -> bool:
        """Handle the transfers that have finished. Return True if more are waiting."""
        if self._memory.n_bytes > self._memory.budget_bytes:
            self._holdings.shrink()  # the budget may have become smaller
        has_more = [store.poll() for store in self._back_stores]
        return self.texts.advance() or any(has_more)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for one write to finish, at shutdown. Return False if none did in time."""
        writing = (store for store in self._back_stores if store.is_writing)
        store = next(writing, None)
        return store is not None and store.wait(timeout_seconds)

    def set_memory_budget(self, n_bytes: int) -> None:
        """Change the budget, from any thread. The next poll evicts down to it."""
        self._memory.budget_bytes = n_bytes

    def root_of(self, namespace: str) -> Key:
        root = namespace_root(self.root, namespace)
        if self._shared is not None:
            self._shared.note_namespace(root, namespace)
        return root

    def keys(self, tokens: list[int], namespace: str) -> PrefixKeys:
        return PrefixKeys(self.root_of(namespace), tokens)

    def match(self, keys: PrefixKeys, n_limit: int) -> Match:
        match = self._index.match(keys.root, keys.between(0, n_limit))
        if self._n_deleting and any(self._is_deleted(keys.root, node) for node in match.nodes):
            return Match(0, (), None)
        return match

    def find_end(self, keys: PrefixKeys, n_tokens: int) -> Node | None:
        """Return the stored logits after a prompt of a dense model, its checkpoint."""
        end = self._index.get(keys.checkpoint(n_tokens))
        return end if end is not None and not self._is_deleted(keys.root, end) else None

    def checkpoints_before(self, node: Node) -> list[Node]:
        return self._index.checkpoints_before(node)

    def _is_deleted(self, root: Key, node: Node) -> bool:
        """Return whether the node is being dropped, a slice at a time."""
        kept = node.retention
        return self._n_deleting > 0 and self.deletions.covers(root, kept.session, kept.asked_at)

    def divergence(self, keys: PrefixKeys, n_limit: int) -> int:
        """Return the length shared with a stored prefix that then diverges; 0 if none does."""
        return self._index.divergence(keys.root, keys.between(0, n_limit))

    @property
    def is_listed(self) -> bool:
        """Whether the index has every entry on disk. After a start, that may take a while."""
        return self._disk is None or self._disk.is_listed

    @property
    def n_events(self) -> int:
        """How many transfers have ended. Each may have made room in memory."""
        return sum(store.n_events for store in self._back_stores)

    def look_up(self, keys: PrefixKeys, n_limit: int) -> DiskLookup | None:
        """Start to add a prompt's entries on disk to the index, which may lack them after a start.

        Return None if no lookup is needed.
        """
        if self._disk is None:
            return None
        n_blocks = max(n_limit, 0) // BLOCK_TOKENS
        return self._disk.look_up(lambda: [keys.after_blocks(n) for n in range(n_blocks + 1)])

    @property
    def has_others(self) -> bool:
        """Whether there is a shared store, with the entries of other servers."""
        return self._shared is not None

    def ask_others(
        self,
        keys: PrefixKeys,
        n_limit: int,
        *,
        n_have: int,
        prefill_seconds_per_token: float | None,
    ) -> SharedLookup | None:
        """Start to look up the missing part of a prompt in the shared store.

        Return None if no lookup is needed.
        """
        n_missing = n_limit - n_have
        if self._shared is None or n_missing < MIN_LOOKUP_TOKENS:
            return None
        per_token = prefill_seconds_per_token
        compute_seconds = None if per_token is None else per_token * n_missing
        return self._shared.look_up(keys, self.match(keys, n_limit), n_limit, compute_seconds)

    def is_asking(self, lookup: SharedLookup, now: float) -> bool:
        """Return whether the lookup is still worth waiting for."""
        if self._shared is not None and not lookup.is_over and now >= lookup.deadline:
            self._shared.give_up(lookup)
        return not lookup.is_over

    def note_slow_store(self) -> None:
        """Note that a restore from the shared store was abandoned."""
        if self._shared is not None:
            self._shared.note_slow()

    def use(self, match: Match, terms: CacheTerms) -> None:
        """Note that a request shares this prefix, wherever it takes the rows from."""
        nodes = match.nodes
        for node in nodes:
            self._holdings.note_use(node, terms)
            # Every chat shares a few tokens of its template with every other.
            if node.where and match.n_tokens >= MIN_REUSE_TOKENS:
                self._offer(node)
        for store in self._back_stores:
            store.touch(nodes)

    def pin(self, keys: PrefixKeys, terms: CacheTerms) -> None:
        """Pin the stored entries that a request asks for, within its session's quota."""
        for pin in terms.pins:
            nodes = self.match(keys, pin.n_tokens).nodes
            for node in self._holdings.pin(terms.session, nodes, time.time() + pin.seconds):
                self._offer(node)

    def give_name(self, keys: PrefixKeys, n_tokens: int, terms: CacheTerms) -> None:
        """Give the prompt the name in its terms, if there is one."""
        if terms.name is None:
            return
        named = Named(
            root=keys.root,
            name=terms.name,
            tokens=keys.between(0, n_tokens),
            session=terms.session,
            named_at=terms.asked_at or time.time(),
        )
        gone = self._names.give(named)
        if self._disk is not None:
            self._disk.transfers.give_name(named)
            self._disk.transfers.drop_names(gone)

    def persist(self, keys: PrefixKeys, n_tokens: int, *, since: float) -> bool:
        """Return whether a prompt is on disk. Start to write the entries that are missing there.

        Raises TierFailed if a write of one of them failed after `since`.
        """
        if self._disk is None:
            raise TierFailed("there is no disk tier for this model")
        match = self.match(keys, n_tokens)
        n_grain = TAIL_GRAIN if self._traits.has_checkpoints else 0
        if not match.n_tokens or match.n_tokens + n_grain < n_tokens:
            return False
        missing = [node for node in match.nodes if Where.DISK not in node.where]
        for node in missing[:MAX_WRITES]:
            if (why := self._disk.failure_since(node, since)) is not None:
                raise TierFailed(why)
            if Where.MEMORY not in node.where and node.key not in self._disk.writing:
                # From the shared store; the next call writes it.
                fetch(self._back_stores, node, NOBODY_WAITS, must=False)
                break
            self._disk.offer(node, was_reused=True, must=True)
            if node.key not in self._disk.writing:
                raise TierFailed(self._disk.trouble or "the hour's write budget is used up")
        return not missing

    def pin_stored(self, namespace: str, key: str, seconds: float) -> Sliced[bool]:
        """Pin a stored prefix, or unpin it with 0. Return False if it is not stored.

        No quota applies: the caller has the administrator's key.
        """
        root = self.root_of(namespace)
        tokens = self.contents.tokens_of(root, key)
        if tokens is None:
            return False
        until = time.time() + seconds if seconds else 0.0
        for piece in slices(self._index.match(root, tokens).nodes):
            nodes = [node for node in piece if node.where]
            self._holdings.set_pin(nodes, until)
            for node in nodes if seconds else ():
                self._offer(node)
            yield
        return True

    def begin_to_forget(self, tombstone: Tombstone) -> DiskDeletion | None:
        """Refuse what a tombstone covers from now on, and delete it from the disk.

        `forget` must follow. Return None if there is no disk tier.
        """
        self.deletions.add([tombstone])
        self._n_deleting += 1
        if self._shared is not None:
            self._shared.forget(tombstone)
        return self._disk.forget(tombstone) if self._disk is not None else None

    def forget(self, tombstone: Tombstone) -> Sliced[Deleted]:
        """Drop what a tombstone covers from the index and memory.

        The server deletes from the shared store: only the store has the entries of all sessions.
        """
        others = Where.SHARED if self._disk is None else Where.SHARED | Where.DISK
        try:
            gone = yield from self.contents.forget_covered(tombstone, self.root, but=others)
        finally:
            self._n_deleting -= 1
        self.counters.deleted += gone.n_entries
        if self._disk is not None:  # it counts its names
            return Deleted(counts=dict(gone.places))
        return Deleted(counts={**gone.places, Place.NAMES: len(gone.names)})

    def forget_key(self, root: Key, prefix: bytes) -> Sliced[tuple[Deleted, DiskDeletion | None]]:
        """Drop the entries and names that start with the prefix.

        The disk also deletes what the index has not read.
        """
        gone = yield from self.contents.forget(root, prefix)
        on_disk: DiskDeletion | None = None
        if self._disk is not None:
            self._disk.transfers.drop_names(gone.names)
            on_disk = self._disk.forget_prefix(root, prefix)
        self.counters.deleted += gone.n_entries
        return Deleted(counts={**gone.places, Place.NAMES: len(gone.names)}), on_disk

    def restore(self, match: Match, *, n_live: int, n_tokens: int) -> Restore:
        """Start to restore positions [n_live, n_tokens) of the match."""
        blocks = [node for node in match.blocks_after(n_live) if max(n_live, node.start) < n_tokens]
        return Restore(
            self._holdings,
            self._back_stores,
            self._backlog,
            blocks,
            match.checkpoint,
            n_live=n_live,
            n_tokens=n_tokens,
        )

    def is_leased(self, key: Key) -> bool:
        """Return whether an entry is leased. The disk tier's thread asks before it evicts."""
        node = self._index.get(key)
        return node is not None and node.leases > 0

    def distrust(self, node: Node, why: str) -> None:
        """Quarantine bytes that the backend refused, or crashed on, in every store."""
        self.counters.disk.quarantined += 1  # for any store: the metric has no tier label
        for store in self._back_stores:
            store.quarantine(node, why)
        self._holdings.remove(node, EVERYWHERE)

    def note_put(self, n_bytes: int, seconds: float) -> None:
        """Note that a stored piece was imported into a slot."""
        self.gate.put_speed.observe(n_bytes, seconds)
        self.counters.memory.note_read(n_bytes, seconds)

    def status(self) -> CacheStatus:
        """Describe tiers and counters, for any thread."""
        return CacheStatus(
            model_class=self._traits.model_class,
            off_because=self._traits.off_because,
            tiers=(self._memory.status(), *(store.status() for store in self._back_stores)),
            counters=self.counters.copy(),
        )

    def _offer(self, node: Node) -> None:
        for store in self._back_stores:
            store.offer(node, was_reused=True)
