"""The one object the engine loop talks to: which prefixes are stored, bring them, keep them.

Owned by the engine thread. `holdings` knows what is held, `disk_store` and `shared_stock` what
is written; here is what is found, used, promised and forgotten. `keeper` stores what is new.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rekindle.cache.disk.residency import DiskStore
from rekindle.cache.disk.transfers import Transfers
from rekindle.cache.entry import BLOCK_TOKENS, KEY_BYTES, Key, Kind, namespace_root
from rekindle.cache.entry_writer import EntryWriter
from rekindle.cache.index import Match, Node, PrefixIndex, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.listing.contents import Contents
from rekindle.cache.listing.names import Named, Names
from rekindle.cache.memory.tier import MemoryTier
from rekindle.cache.pins import Pins
from rekindle.cache.policy import TAIL_GRAIN
from rekindle.cache.residency import EVERYWHERE, Holdings
from rekindle.cache.restore import Restore
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.residency import MIN_PROBE_TOKENS, Probe, SharedStock
from rekindle.cache.shared.transfers import SharedTransfers
from rekindle.cache.stores.back_store import WriteRules
from rekindle.cache.stores.load_gate import LoadGate, blocks_behind, nodes_of
from rekindle.config import WritePolicy
from rekindle.errors import TierFailed
from rekindle.generation.events import CacheSource
from rekindle.generation.model_state import ModelClass, Payload, StateTraits
from rekindle.generation.request import USUAL_TERMS, CacheTerms
from rekindle.generation.status import CacheCounters, CacheStatus, TierStatus

_log = logging.getLogger("rekindle.cache")

MIN_REUSE_TOKENS = 64  # that make a use of an entry the use of a conversation; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    memory_bytes: int
    disk_bytes: int
    writes: WriteRules
    may_recompute: bool


@dataclass(frozen=True, slots=True)
class SharedAccess:
    """A store that other servers use, and the threads that move bytes there."""

    store: SharedStore
    transfers: SharedTransfers


class PrefixCache:
    def __init__(
        self,
        root: Key,
        traits: StateTraits,
        policy: CachePolicy,
        transfers: Transfers | None,
        shared: "SharedAccess | None" = None,
    ) -> None:
        self.root = root
        self._traits = traits
        self._policy = policy
        self._reading_since: float | None = None
        self._index = PrefixIndex(
            has_rows=traits.has_rows,
            has_checkpoints=traits.resumes_at_checkpoints,
        )
        self._memory = MemoryTier(policy.memory_bytes)
        self.gate = LoadGate(may_recompute=policy.may_recompute)
        # What is pinned is written, so the disk's budget counts where there is one.
        pins = Pins(policy.memory_bytes if transfers is None else policy.disk_bytes)
        self._holdings = Holdings(
            self._index,
            self._memory,
            pins,
            drop_from_disk=self._drop_from_disk,
            drop_from_shared=self._drop_from_shared,
            mark_on_disk=self._mark_on_disk,
            reload_seconds=self.gate.reload_seconds,
        )
        # All there from the start: another thread reads them.
        self._counters = {each.name: 0 for each in fields(CacheCounters)}
        self._names = Names()
        self.contents = Contents(self._holdings, self._names)
        self._disk: DiskStore | None = None
        if transfers is not None:
            self._disk = DiskStore(
                transfers,
                self._holdings,
                self._names,
                policy.writes,
                self.count,
                self.gate.read_speed,
            )
        self._shared: SharedStock | None = None
        if shared is not None:
            self._shared = SharedStock(
                shared.store,
                shared.transfers,
                self._holdings,
                policy.writes,
                self.count,
                self.gate.shared_speed,
            )
        self.keeper = EntryWriter(
            root, self._holdings, self._disk, self._shared, self._counters, is_on=self.is_on
        )

    @classmethod
    def switched_off(cls, why: str) -> "PrefixCache":
        traits = StateTraits(
            ModelClass.OPAQUE, has_rows=False, has_checkpoints=True, off_because=why
        )
        policy = CachePolicy(
            memory_bytes=0,
            disk_bytes=0,
            writes=WriteRules(bytes_per_hour=0, policy=WritePolicy.ALL, min_tokens=0),
            may_recompute=False,
        )
        return cls(bytes(KEY_BYTES), traits, policy, transfers=None)

    @property
    def is_on(self) -> bool:
        return self._traits.off_because is None and (
            self._policy.memory_bytes > 0 or self._disk is not None or self._shared is not None
        )

    def start(self) -> None:
        if self._traits.off_because is not None:
            _log.warning("cache: off for this model. %s", self._traits.off_because)
        if self._shared is not None:
            self._shared.start()
        if self._disk is None:
            return
        began = time.monotonic()
        if self._disk.start():
            self._log_found(time.monotonic() - began)
        else:
            self._reading_since = began
            _log.info("cache: still reading the index, %d entries so far", len(self._index))

    def close(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        if self._disk is not None:
            self._disk.close(grace_seconds)
        if self._shared is not None:  # it has gone on meanwhile
            self._shared.close(max(deadline - time.monotonic(), 0.0))

    def poll(self) -> bool:
        """Takes in what the transfer threads have finished; True: there is more."""
        if self._memory.n_bytes > self._memory.budget_bytes:
            self._holdings.shrink()  # the budget may have become smaller
        if self._shared is not None:
            self._shared.poll()
        if self._disk is None:
            return False
        has_more = self._disk.poll()
        if self._reading_since is not None and self._disk.is_listed:
            self._log_found(time.monotonic() - self._reading_since)
            self._reading_since = None
        return has_more

    def wait(self, timeout_seconds: float) -> bool:
        """For something to finish; False: nothing did in time. For the end only."""
        if self._disk is not None and self._disk.is_writing:
            return self._disk.wait(timeout_seconds)
        return self._shared is not None and self._shared.wait(timeout_seconds)

    def set_memory_budget(self, n_bytes: int) -> None:
        """From any thread; what is too much leaves with the next thing that is stored."""
        self._memory.budget_bytes = n_bytes

    def root_of(self, namespace: str) -> Key:
        return namespace_root(self.root, namespace)

    def keys(self, tokens: list[int], namespace: str) -> PrefixKeys:
        return PrefixKeys(self.root_of(namespace), tokens)

    def match(self, keys: PrefixKeys, n_limit: int) -> Match:
        return self._index.match(keys.root, keys.between(0, n_limit))

    def parting(self, keys: PrefixKeys, n_limit: int) -> int:
        """How many tokens something stored begins with that goes on otherwise."""
        return self._index.parting(keys.root, keys.between(0, n_limit))

    def wait_for_index(self) -> None:
        """Before a question about all that is stored: soon after a start not all of it is known."""
        if self._disk is not None:
            self._disk.wait_for_index()

    def look_up(self, keys: PrefixKeys, n_limit: int) -> None:
        """Before a match: soon after a start the index may not know all that is on disk."""
        if self._disk is not None:
            n_blocks = max(n_limit, 0) // BLOCK_TOKENS
            self._disk.look_up(lambda: [keys.after_blocks(n) for n in range(n_blocks + 1)])

    @property
    def has_others(self) -> bool:
        """Other servers, whose work is in the shared store."""
        return self._shared is not None

    def ask_others(
        self,
        keys: PrefixKeys,
        n_limit: int,
        *,
        n_have: int,
        prefill_seconds_per_token: float | None,
    ) -> Probe | None:
        """Starts to ask the shared store for what of a prompt is not here; None: no need to."""
        n_missing = n_limit - n_have
        if self._shared is None or n_missing < MIN_PROBE_TOKENS:
            return None
        per_token = prefill_seconds_per_token
        compute_seconds = None if per_token is None else per_token * n_missing
        return self._shared.ask(keys, self.match(keys, n_limit), n_limit, compute_seconds)

    def is_asking(self, probe: Probe, now: float) -> bool:
        """Whether it is still worth waiting for an answer."""
        if not probe.is_over and now >= probe.deadline and self._shared is not None:
            self._shared.give_up(probe)
        return not probe.is_over

    def note_slow_store(self) -> None:
        """A restore from the shared store was given up."""
        if self._shared is not None:
            self._shared.note_slow()

    def use(self, match: Match, terms: CacheTerms = USUAL_TERMS) -> None:
        """Notes that a request shares this prefix, wherever it takes the rows from."""
        nodes = nodes_of(match)
        for node in nodes:
            self._holdings.note_use(node, terms)
            # Every chat shares a few tokens of its template with every other.
            if node.where and match.n_tokens >= MIN_REUSE_TOKENS:
                self._offer(node)
        if self._disk is not None:
            self._disk.touch(nodes)
        if self._shared is not None:
            self._shared.touch(nodes)

    def pin(self, keys: PrefixKeys, terms: CacheTerms) -> None:
        """What of a request's pins is stored by now; a session is not promised everything."""
        for pin in terms.pins:
            nodes = nodes_of(self.match(keys, pin.n_tokens))
            for node in self._holdings.pin(terms.session, nodes, time.time() + pin.seconds):
                self._offer(node)

    def give_name(self, keys: PrefixKeys, n_tokens: int, terms: CacheTerms) -> None:
        if terms.name is None:
            return
        named = Named(
            root=keys.root,
            name=terms.name,
            tokens=keys.between(0, n_tokens),
            session=terms.session,
            named_at=time.time(),
        )
        gone = self._names.give(named)
        if self._disk is not None:
            self._disk.give_name(named)
            self._disk.drop_names(gone)

    def persist(self, keys: PrefixKeys, n_tokens: int, *, since: float) -> bool:
        """Whether a prompt is on disk; what of it is in memory is on its way there after this.

        Raises TierFailed where it will not get there: the disk refused it `since` then.
        """
        if self._disk is None:
            raise TierFailed("there is no disk tier for this model")
        match = self.match(keys, n_tokens)
        n_grain = TAIL_GRAIN if self._traits.has_checkpoints else 0
        if not match.n_tokens or match.n_tokens + n_grain < n_tokens:
            return False
        missing = [node for node in nodes_of(match) if Where.DISK not in node.where]
        for node in missing:
            if (why := self._disk.failure_since(node, since)) is not None:
                raise TierFailed(why)
            if Where.MEMORY not in node.where and not self._disk.is_writing_it(node):
                self.fetch(node, must=False)  # from the shared store; what follows comes after it
                break
            self._disk.offer(node, was_reused=True, must=True)
            if not self._disk.is_writing_it(node):
                raise TierFailed(self._disk.trouble or "the hour's write budget is used up")
        return not missing

    def pin_stored(self, namespace: str, key: str, seconds: float) -> bool:
        """Whether it is there. No quota counts here: whoever asks has the key of the house."""
        tokens = self.contents.tokens(self.root_of(namespace), key)
        if tokens is None:
            return False
        nodes = nodes_of(self.match(self.keys(list(tokens), namespace), len(tokens)))
        self._holdings.set_pin(nodes, time.time() + seconds if seconds else 0.0)
        if seconds:
            for node in nodes:
                self._offer(node)
        return True

    def forget(self, namespace: str, key: str | None) -> tuple[int, bytes | None]:
        """How many entries and names went, and what all of them began with; None: nothing did."""
        gone = self.contents.forget(self.root_of(namespace), key)
        if self._disk is not None and gone.names:
            self._disk.drop_names(gone.names)
        self._counters["deleted"] += gone.n_entries
        n_gone = gone.n_entries + len(gone.names)
        return n_gone, gone.prefix if n_gone or key is None else None

    def restore(self, match: Match, *, n_live: int, n_tokens: int) -> Restore:
        """Starts to bring back [n_live, n_tokens) of the match."""
        blocks = [node for node in blocks_behind(match, n_live) if node.start < n_tokens]
        return Restore(self, blocks, match.checkpoint, n_live=n_live, n_tokens=n_tokens)

    def lease(self, node: Node) -> None:
        self._holdings.lease(node)

    def release(self, node: Node) -> None:
        self._holdings.release(node)
        self._holdings.shrink()

    def is_leased(self, key: Key) -> bool:
        """Any thread may ask: the disk tier does, before it evicts."""
        node = self._index.get(key)
        return node is not None and node.leases > 0

    def payload(self, node: Node) -> Payload | None:
        return self._holdings.payload(node)

    def fetch(self, node: Node, *, must: bool) -> None:
        if Where.DISK in node.where:
            assert self._disk is not None
            self._disk.fetch(node, must=must)
        elif Where.SHARED in node.where:
            assert self._shared is not None
            self._shared.fetch(node, must=must)

    def distrust(self, node: Node) -> None:
        """The backend refused these bytes: they are set aside and never tried again."""
        self._counters["quarantined"] += 1
        if self._disk is not None:
            self._disk.quarantine(node, "the backend refused it")
        if self._shared is not None:
            self._shared.quarantine(node, "the backend refused it")
        self._holdings.remove(node, EVERYWHERE)

    def _offer(self, node: Node) -> None:
        if self._disk is not None:
            self._disk.offer(node, was_reused=True)
        if self._shared is not None:
            self._shared.offer(node, was_reused=True)

    def _mark_on_disk(self, node: Node) -> None:
        if self._disk is not None:
            self._disk.mark(node)

    def _drop_from_disk(self, keys: Sequence[Key]) -> None:
        if self._disk is not None:
            self._disk.drop(keys)

    def _drop_from_shared(self, keys: Sequence[Key]) -> None:
        if self._shared is not None:
            self._shared.drop(keys)

    def _log_found(self, seconds: float) -> None:
        n_tokens = n_bytes = 0
        for node in self._index.nodes():
            n_bytes += node.payload_bytes
            n_tokens += node.n_tokens if node.kind is Kind.BLOCK else 0
        _log.info(
            "cache: found %d entries, %d tokens, %.1f MB in %.2f s; memory holds %s, disk %s",
            self._holdings.n_on_disk,
            n_tokens,
            n_bytes / 1e6,
            seconds,
            self._capacity(self._policy.memory_bytes),
            self._capacity(self._policy.disk_bytes),
        )

    def _capacity(self, n_bytes: int) -> str:
        """In tokens too, where each has a size: a recurrent model's state is always the same."""
        gigabytes = f"{n_bytes / 1e9:.1f} GB"
        if not self._traits.row_bytes:
            return gigabytes
        return f"{gigabytes} (about {n_bytes // self._traits.row_bytes} tokens)"

    def note_put(self, n_bytes: int, seconds: float) -> None:
        """A stored piece was brought into a slot."""
        self.gate.put_speed.observe(n_bytes, seconds)
        self._counters["put_bytes"] += n_bytes
        self._counters["put_microseconds"] += int(seconds * 1e6)

    def count(self, name: str, amount: int) -> None:
        """`name` is a field of CacheCounters."""
        self._counters[name] += amount

    def status(self) -> CacheStatus:
        tiers = [
            TierStatus(
                name=CacheSource.MEMORY,
                n_entries=len(self._memory),
                n_bytes=self._memory.n_bytes,
                budget_bytes=self._memory.budget_bytes,
            )
        ]
        if self._disk is not None:
            tiers.append(self._disk.status(self._policy.disk_bytes))
        if self._shared is not None:
            tiers.append(self._shared.status())
        return CacheStatus(
            model_class=self._traits.model_class,
            off_because=self._traits.off_because,
            tiers=tuple(tiers),
            counters=CacheCounters(
                **{
                    **self._counters,
                    "memory_evictions": self._holdings.n_evicted,
                    "covered": self._holdings.n_covered,
                }
            ),
        )
