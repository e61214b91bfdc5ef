"""The one object the engine loop talks to: which prefixes are stored, bring them, keep them.

Owned by the engine thread. What is held is `holdings`' to know, bytes on disk move in
`transfers`; here is decided what is worth loading, storing and writing.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto

from rekindle.cache.block import (
    BLOCK_TOKENS,
    KEY_BYTES,
    Entry,
    Header,
    Key,
    Kind,
    Reason,
    entry_key,
)
from rekindle.cache.holdings import EVERYWHERE, Holdings
from rekindle.cache.policy import (
    Span,
    Speed,
    WriteBudget,
    admits_to_disk,
    best_cut,
    surplus_checkpoints,
)
from rekindle.cache.prefix_index import Match, Node, PrefixIndex, Where
from rekindle.cache.prefix_keys import PrefixKeys
from rekindle.cache.restore import Restore
from rekindle.cache.tiers.memory import MemoryTier
from rekindle.cache.transfers import (
    Arrived,
    Event,
    Found,
    Opened,
    ReadFailed,
    Transfers,
    WriteFailed,
    Written,
)
from rekindle.config import WritePolicy
from rekindle.errors import EntryCorrupt, EntryMissing
from rekindle.generation import CacheCounters, CacheSource, CacheStatus, TierStatus
from rekindle.model_state import ModelClass, Payload, StateTraits

_log = logging.getLogger("rekindle.cache")

START_SECONDS = 1.5  # how long the first request waits for the index of a huge store; picked
MIN_PATH_CHECKPOINTS = 16  # of one conversation, however small its rows are; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    memory_bytes: int
    disk_bytes: int
    write_bytes_per_hour: int  # 0: no limit
    write_policy: WritePolicy
    min_tokens: int
    may_recompute: bool


class Saved(Enum):
    STORED = auto()
    KNOWN = auto()  # it was there already
    LATER = auto()  # no room at the moment, but some is on its way to the disk
    REFUSED = auto()


class PrefixCache:
    def __init__(
        self,
        root: Key,
        traits: StateTraits,
        policy: CachePolicy,
        transfers: Transfers | None,
    ) -> None:
        self.root = root
        self._traits = traits
        self._policy = policy
        self._index = PrefixIndex(
            root,
            has_rows=traits.has_rows,
            has_checkpoints=traits.has_checkpoints or not traits.has_rows,
        )
        self._memory = MemoryTier(policy.memory_bytes)
        self._put_speed = Speed()
        self._read_speed = Speed()
        self._holdings = Holdings(
            self._index,
            self._memory,
            drop_from_disk=self._drop_from_disk,
            reload_seconds=self._read_speed.seconds,
        )
        self._transfers = transfers
        self._budget = WriteBudget(policy.write_bytes_per_hour)
        # All there from the start: another thread reads them.
        self._counters = {each.name: 0 for each in fields(CacheCounters)}
        self._disk_bytes = 0
        self._disk_trouble: str | None = None
        self._writing: dict[Key, Node] = {}  # each leased until it is written
        self._reading: dict[Key, int] = {}  # bytes reserved for each
        self._payload_sizes: dict[tuple[Kind, int], int] = {}

    @classmethod
    def switched_off(cls, why: str) -> "PrefixCache":
        traits = StateTraits(
            ModelClass.OPAQUE, has_rows=False, has_checkpoints=True, off_because=why
        )
        policy = CachePolicy(
            memory_bytes=0,
            disk_bytes=0,
            write_bytes_per_hour=0,
            write_policy=WritePolicy.ALL,
            min_tokens=0,
            may_recompute=False,
        )
        return cls(bytes(KEY_BYTES), traits, policy, transfers=None)

    @property
    def is_on(self) -> bool:
        return self._traits.off_because is None and (
            self._policy.memory_bytes > 0 or self._transfers is not None
        )

    def start(self) -> None:
        """Reads the index of what is on disk; a huge one goes on being read while we serve."""
        if self._traits.off_because is not None:
            _log.warning("cache: off for this model. %s", self._traits.off_because)
        if self._transfers is None:
            return
        began = time.monotonic()
        self._transfers.start()
        while (left := began + START_SECONDS - time.monotonic()) > 0:
            if (event := self._transfers.wait(left)) is None:
                break
            self._on(event)
            if isinstance(event, Opened):
                self._log_found(time.monotonic() - began)
                return
        _log.info("cache: still reading the index, %d entries so far", len(self._index))

    def close(self, grace_seconds: float) -> None:
        if self._transfers is not None:
            self._transfers.close(grace_seconds)
            for event in self._transfers.poll():
                self._on(event)

    def poll(self) -> None:
        if self._transfers is not None:
            for event in self._transfers.poll():
                self._on(event)

    def _on(self, event: Event) -> None:
        match event:
            case Found(headers):
                for header in headers:
                    self._holdings.add(header, Where.DISK)
            case Opened(trouble, n_bytes):
                self._disk_bytes = n_bytes
                self._note_trouble(trouble)
                # A full collection over a million nodes would stop the engine for half a second.
                gc.freeze()
            case Written(key, evicted, n_bytes):
                self._on_written(key, evicted, n_bytes)
            case WriteFailed(key, trouble):
                self._counters["writes_failed"] += 1
                self._note_trouble(trouble)
                self._end_write(key)
            case Arrived(entry, seconds):
                self._on_arrived(entry, seconds)
            case ReadFailed(key, error):
                self._memory.give_back(self._reading.pop(key))
                self._counters["quarantined"] += isinstance(error, EntryCorrupt)
                self._counters["vanished"] += isinstance(error, EntryMissing)
                if (node := self._index.get(key)) is not None:
                    self._holdings.remove(node, Where.DISK)

    def match(self, keys: PrefixKeys, n_limit: int) -> Match:
        return self._index.match(keys.between(0, n_limit))

    def use(self, match: Match) -> None:
        """Notes that a request shares this prefix, wherever it takes the rows from."""
        nodes = _nodes_of(match)
        for node in nodes:
            self._holdings.note_use(node)
            if Where.DISK not in node.where and node.key in self._memory:
                self._offer_to_disk(node, was_reused=True)
        on_disk = [node.key for node in nodes if Where.DISK in node.where]
        if on_disk and self._transfers is not None:
            self._transfers.touch(on_disk)

    def n_worth_loading(
        self,
        match: Match,
        *,
        n_live: int,
        n_gained: int,
        prefill_seconds_per_token: float | None,
    ) -> int:
        """How far to load the match behind `n_live` rows so that it is faster than computing.

        `n_gained` tokens are not in the context in any case.
        """
        speed = prefill_seconds_per_token if self._policy.may_recompute else None
        blocks = _blocks_behind(match, n_live)
        if match.checkpoint is not None:
            # Rows without the state at their end are worth nothing: all of it or none.
            load_seconds = self._total_load_seconds([*blocks, match.checkpoint])
            n_tokens = match.n_tokens if best_cut([Span(n_gained, load_seconds)], speed) else 0
        else:
            stops = [min(node.stop, match.n_tokens) for node in blocks]
            starts = [max(node.start, match.n_tokens - n_gained) for node in blocks]
            spans = [
                Span(max(stop - start, 0), self._load_seconds(node))
                for node, start, stop in zip(blocks, starts, stops, strict=True)
            ]
            n_spans = best_cut(spans, speed)
            n_tokens = stops[n_spans - 1] if n_spans else 0
        if n_tokens < match.n_tokens:
            self._read_speed.soften()
        return n_tokens

    def restore(self, match: Match, *, n_live: int, n_tokens: int) -> Restore:
        """Starts to bring back [n_live, n_tokens) of the match."""
        blocks = [node for node in _blocks_behind(match, n_live) if node.start < n_tokens]
        return Restore(self, blocks, match.checkpoint, n_live=n_live, n_tokens=n_tokens)

    def load_seconds(self, match: Match) -> float | None:
        """How long bringing all of it back would take; None: nobody knows yet."""
        return self._total_load_seconds(_nodes_of(match))

    def _total_load_seconds(self, nodes: Sequence[Node]) -> float | None:
        seconds = [self._load_seconds(node) for node in nodes]
        return None if None in seconds else sum(each for each in seconds if each)

    def _load_seconds(self, node: Node) -> float | None:
        put = self._put_speed.seconds(node.payload_bytes)
        if Where.MEMORY in node.where or put is None:
            return put
        read = self._read_speed.seconds(node.payload_bytes)
        return None if read is None else put + read

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
        """Starts reading a leased node. Unless it `must`, only where there is room."""
        if node.key in self._reading or Where.MEMORY in node.where:
            return
        assert self._transfers is not None
        if not self._holdings.make_room(node.payload_bytes) and not must:
            return
        self._memory.reserve(node.payload_bytes)
        self._reading[node.key] = node.payload_bytes
        self._transfers.read(node.key)

    def observe_put(self, n_bytes: int, seconds: float) -> None:
        self._put_speed.observe(n_bytes, seconds)

    def distrust(self, node: Node) -> None:
        """The backend refused these bytes: they are set aside and never tried again."""
        self._counters["quarantined"] += 1
        if self._transfers is not None and Where.DISK in node.where:
            self._transfers.quarantine(node.key, "the backend refused it")
        self._holdings.remove(node, EVERYWHERE)

    def _on_arrived(self, entry: Entry, seconds: float) -> None:
        header = entry.header
        self._memory.give_back(self._reading.pop(header.key))
        self._read_speed.observe(header.payload_bytes, seconds)
        self._counters["read_bytes"] += header.payload_bytes
        if self._index.get(header.key) is not None and header.key not in self._memory:
            self._holdings.hold(entry)

    def save_rows(
        self,
        keys: PrefixKeys,
        start: int,
        stop: int,
        *,
        reason: Reason,
        was_reused: bool,
        compute_seconds: float,
        export: Callable[[], Payload],
    ) -> Saved:
        """Stores positions [start, stop), which lie in one block and begin it."""
        assert start % BLOCK_TOKENS == 0
        assert start < stop <= start + BLOCK_TOKENS
        parent = keys.after_blocks(start // BLOCK_TOKENS)
        tokens = keys.between(start, stop)
        if self._index.is_covered(parent, tokens):
            return Saved.KNOWN
        if parent != self.root and self._index.get(parent) is None:
            return Saved.REFUSED  # nothing could ever lead to it
        header = self._header(Kind.BLOCK, parent, start, tokens, reason, compute_seconds)
        return self._save(header, export, was_reused=was_reused)

    def save_checkpoint(
        self,
        keys: PrefixKeys,
        position: int,
        *,
        reason: Reason,
        was_reused: bool,
        compute_seconds: float,
        export: Callable[[], Payload],
    ) -> Saved:
        start = position // BLOCK_TOKENS * BLOCK_TOKENS
        parent = keys.after_blocks(position // BLOCK_TOKENS)
        tokens = keys.between(start, position)
        header = self._header(Kind.CHECKPOINT, parent, start, tokens, reason, compute_seconds)
        if self._index.get(header.key) is not None:
            return Saved.KNOWN
        saved = self._save(header, export, was_reused=was_reused)
        if saved is Saved.STORED:
            self._thin_checkpoints(header.key)
        return saved

    def _header(
        self,
        kind: Kind,
        parent: Key,
        start: int,
        tokens: bytes,
        reason: Reason,
        compute_seconds: float,
    ) -> Header:
        return Header(
            key=entry_key(parent, kind, tokens),
            parent=parent,
            fingerprint=self.root,
            kind=kind,
            start=start,
            tokens=tokens,
            payload_bytes=0,
            compute_seconds=compute_seconds,
            reason=reason,
            created_at=time.time(),
        )

    def _save(self, header: Header, export: Callable[[], Payload], *, was_reused: bool) -> Saved:
        if not self.is_on:
            return Saved.REFUSED
        shape = (header.kind, header.n_tokens if header.kind is Kind.BLOCK else 0)
        parent = self._index.get(header.parent)
        if parent is not None:
            self._holdings.lease(parent)  # room must not be made at the cost of what leads here
        try:
            if not self._holdings.make_room(self._payload_sizes.get(shape, 0)):
                return Saved.LATER if self._writing else Saved.REFUSED
            payload = export()
            header = replace(header, payload_bytes=len(payload))
            self._payload_sizes[shape] = len(payload)
            if not self._holdings.make_room(len(payload)):
                return Saved.LATER if self._writing else Saved.REFUSED
        finally:
            if parent is not None:
                self._holdings.release(parent)
        node = self._holdings.hold(Entry(header, payload))
        self._offer_to_disk(node, was_reused=was_reused)
        self._holdings.shrink()
        return Saved.STORED

    def _thin_checkpoints(self, key: Key) -> None:
        """A conversation keeps checkpoints close together near its end, far apart before."""
        tip = self._index.get(key)
        assert tip is not None
        path = self._index.checkpoints_before(tip)
        row_bytes = 0
        parent = tip.parent
        while parent is not None:
            row_bytes += parent.payload_bytes
            parent = parent.parent
        n_keep = max(MIN_PATH_CHECKPOINTS, row_bytes // max(tip.payload_bytes, 1))
        by_position = {node.stop: node for node in [*path, tip]}
        for position in surplus_checkpoints(sorted(by_position), n_keep):
            if by_position[position].leases == 0:
                self._holdings.drop(by_position[position])

    def _offer_to_disk(self, node: Node, *, was_reused: bool) -> None:
        if self._transfers is None or Where.DISK in node.where or node.key in self._writing:
            return
        now = time.monotonic()
        is_admitted = admits_to_disk(
            self._policy.write_policy,
            n_prefix_tokens=node.stop,
            min_tokens=self._policy.min_tokens,
            was_reused=was_reused,
            budget_left_share=self._budget.left_share(now),
        )
        # Parents first: an entry that nothing on disk leads to would never be found.
        for each in self._only_in_memory(node) if is_admitted else [node]:
            if not is_admitted or not self._budget.take(each.payload_bytes, now):
                self._counters["writes_refused"] += 1
                return
            self._writing[each.key] = each
            self._holdings.lease(each)
            self._transfers.write(self._memory.get(each.key))

    def _only_in_memory(self, node: Node) -> list[Node]:
        """The end of the path to `node` that is neither on disk nor on its way there."""
        path: list[Node] = []
        step: Node | None = node
        while step and Where.DISK not in step.where and step.key not in self._writing:
            path.append(step)
            step = step.parent
        return path[::-1]

    def _on_written(self, key: Key, evicted: list[Key], n_bytes: int) -> None:
        self._note_trouble(None)
        self._disk_bytes = n_bytes
        node = self._writing[key]
        self._counters["writes"] += 1
        self._counters["written_bytes"] += node.payload_bytes
        if self._index.get(key) is node:
            self._holdings.note_on_disk(node)
        elif self._transfers is not None:
            self._transfers.drop([key])  # it was dropped while it was being written
        self._end_write(key)
        self._counters["disk_evictions"] += len(evicted)
        for evicted_key in evicted:
            if (gone := self._index.get(evicted_key)) is not None:
                self._holdings.remove(gone, Where.DISK)

    def _drop_from_disk(self, key: Key) -> None:
        if self._transfers is not None:
            self._transfers.drop([key])

    def _end_write(self, key: Key) -> None:
        self.release(self._writing.pop(key))

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

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self._disk_trouble:
            return
        if trouble is not None:
            _log.warning("cache: the disk takes nothing in, memory goes on: %s", trouble)
        elif self._disk_trouble is not None:
            _log.info("cache: the disk takes entries again")
        self._disk_trouble = trouble

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
        if self._transfers is not None:
            tiers.append(
                TierStatus(
                    name=CacheSource.DISK,
                    n_entries=self._holdings.n_on_disk,
                    n_bytes=self._disk_bytes,
                    budget_bytes=self._policy.disk_bytes,
                    trouble=self._disk_trouble,
                )
            )
        return CacheStatus(
            model_class=self._traits.model_class,
            off_because=self._traits.off_because,
            tiers=tuple(tiers),
            counters=CacheCounters(
                **{**self._counters, "memory_evictions": self._holdings.n_evicted}
            ),
        )


def _nodes_of(match: Match) -> list[Node]:
    return [*match.blocks, *([match.checkpoint] if match.checkpoint else [])]


def _blocks_behind(match: Match, n_live: int) -> list[Node]:
    """Those with rows that are not in place yet; a recurrent model's have none at all."""
    return [node for node in match.blocks if node.stop > n_live and node.payload_bytes]
