"""New entries: rows become blocks and states become checkpoints, if memory has room.

Part of the PrefixCache, owned by the engine thread. The holdings make the room, and each back
store decides what it writes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    Entry,
    Header,
    Key,
    Kind,
    Reason,
    Retention,
    entry_key,
)
from rekindle.cache.index import HERE, Node
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.policy import surplus_checkpoints
from rekindle.cache.residency import Residency
from rekindle.cache.stores.back_store import BackStore
from rekindle.generation.model_state import Payload
from rekindle.generation.request import CacheTerms
from rekindle.generation.status import CacheCounters

MIN_PATH_CHECKPOINTS = 16  # kept for one conversation, however small its rows; picked


class Saved(Enum):
    STORED = auto()
    KNOWN = auto()  # it was stored before
    LATER = auto()  # no room now, but a write or a restore that ends will make some
    REFUSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The export of a slot's rows or state, and why they are saved."""

    run: Callable[[], Payload]
    reason: Reason
    compute_seconds: float
    was_reused: bool
    terms: CacheTerms


class EntryWriter:
    def __init__(
        self,
        root: Key,
        holdings: Residency,
        back_stores: Sequence[BackStore],
        counters: CacheCounters,
        *,
        is_on: bool,
    ) -> None:
        self._root = root
        self._holdings = holdings
        self._index = holdings.index
        self._back_stores = back_stores
        self._counters = counters
        self._is_on = is_on
        self._payload_sizes: dict[tuple[Kind, int], int] = {}  # sizes so far, by kind and length

    def save_rows(self, keys: PrefixKeys, start: int, stop: int, export: Export) -> Saved:
        """Store positions [start, stop): the first part of a block, or all of it."""
        assert start % BLOCK_TOKENS == 0
        assert start < stop <= start + BLOCK_TOKENS
        header = self._header(Kind.BLOCK, keys, start, stop, export)
        if self._index.is_covered(header.parent, header.tokens):
            return Saved.KNOWN
        if header.parent != keys.root and self._index.get(header.parent) is None:
            return Saved.REFUSED  # without its parent the block would never be found
        return self._save(header, export)

    def save_checkpoint(self, keys: PrefixKeys, position: int, export: Export) -> Saved:
        """Store the state at one position, and thin out the path's older checkpoints."""
        start = position // BLOCK_TOKENS * BLOCK_TOKENS
        header = self._header(Kind.CHECKPOINT, keys, start, position, export)
        known = self._index.get(header.key)
        if known is not None and known.where & HERE:
            return Saved.KNOWN
        saved = self._save(header, export)
        if saved is Saved.STORED:
            self._thin_checkpoints(header.key)
        return saved

    def _header(
        self, kind: Kind, keys: PrefixKeys, start: int, stop: int, export: Export
    ) -> Header:
        parent = keys.after_blocks(start // BLOCK_TOKENS)
        tokens = keys.between(start, stop)
        return Header(
            key=entry_key(parent, kind, tokens),
            parent=parent,
            fingerprint=self._root,
            kind=kind,
            start=start,
            tokens=tokens,
            payload_bytes=0,
            compute_seconds=export.compute_seconds,
            reason=export.reason,
            created_at=time.time(),
        )

    def _save(self, header: Header, export: Export) -> Saved:
        if not self._is_on:
            return Saved.REFUSED
        shape = (header.kind, header.n_tokens if header.kind is Kind.BLOCK else 0)
        parent = self._index.get(header.parent)
        if parent is not None:
            self._holdings.lease(parent)  # making room must not evict the entry's own parent
        try:
            if not self._holdings.make_room(self._payload_sizes.get(shape, 0)):
                return self._no_room(parent)
            began = time.perf_counter()
            payload = export.run()
            self._counters.memory.note_write(len(payload), time.perf_counter() - began)
            header = replace(header, payload_bytes=len(payload))
            self._payload_sizes[shape] = len(payload)
            if not self._holdings.make_room(len(payload)):
                return self._no_room(parent)
        finally:
            if parent is not None:
                self._holdings.release(parent)
        terms = export.terms
        retention = Retention(terms.rank, terms.session, asked_at=terms.asked_at)
        node = self._holdings.hold(Entry(header, payload, retention))
        for each in (node, *(node.checkpoints or ())):
            for store in self._back_stores:
                store.offer(each, was_reused=export.was_reused)
        self._holdings.shrink()
        return Saved.STORED

    def _no_room(self, parent: Node | None) -> Saved:
        """Return LATER if entries are being written or restored, which makes room."""
        n_restoring = self._holdings.n_leases - (parent is not None)
        for store in self._back_stores:
            if store.is_writing:
                return Saved.LATER
            n_restoring -= len(store.writing)
        return Saved.LATER if n_restoring else Saved.REFUSED

    def _thin_checkpoints(self, key: Key) -> None:
        """Keep a conversation's checkpoints close together near its end, far apart before."""
        tip = self._index.get(key)
        if tip is None:
            return  # memory had no room for it, and no back store admitted it
        row_bytes = sum(node.payload_bytes for node in tip.path[:-1])
        n_keep = max(MIN_PATH_CHECKPOINTS, row_bytes // max(tip.payload_bytes, 1))
        by_position = {node.stop: node for node in [*self._index.checkpoints_before(tip), tip]}
        now = time.time()
        for position in surplus_checkpoints(sorted(by_position), n_keep):
            node = by_position[position]
            if node.leases == 0 and node.retention.pinned_until <= now:
                self._counters.thinned += 1
                self._holdings.discard(node)
