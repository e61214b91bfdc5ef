"""New entries: rows become blocks and states become checkpoints, if memory has room.

Part of the PrefixCache, owned by the engine thread. The holdings make the room, and each back
store decides what it writes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from rekindle.cache.residency import Holdings
from rekindle.cache.stores.back_store import BackStore
from rekindle.generation.model_state import Payload
from rekindle.generation.request import CacheTerms
from rekindle.generation.status import CacheCounters

MIN_PATH_CHECKPOINTS = 16  # of one conversation, however small its rows are; picked


class Saved(Enum):
    STORED = auto()
    KNOWN = auto()  # it was stored before
    LATER = auto()  # no room now, but a write or a restore that ends will make some
    REFUSED = auto()


class EntryWriter:
    def __init__(
        self,
        root: Key,
        holdings: Holdings,
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
        self._payload_sizes: dict[tuple[Kind, int], int] = {}  # seen, by kind and token count

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
        terms: CacheTerms,
    ) -> Saved:
        """Store positions [start, stop): the first part of a block, or all of it."""
        assert start % BLOCK_TOKENS == 0
        assert start < stop <= start + BLOCK_TOKENS
        parent = keys.after_blocks(start // BLOCK_TOKENS)
        tokens = keys.between(start, stop)
        if self._index.is_covered(parent, tokens):
            return Saved.KNOWN
        if parent != keys.root and self._index.get(parent) is None:
            return Saved.REFUSED  # without its parent the block would never be found
        header = self._header(Kind.BLOCK, parent, start, tokens, reason, compute_seconds)
        return self._save(header, export, terms, was_reused=was_reused)

    def save_checkpoint(
        self,
        keys: PrefixKeys,
        position: int,
        *,
        reason: Reason,
        was_reused: bool,
        compute_seconds: float,
        export: Callable[[], Payload],
        terms: CacheTerms,
    ) -> Saved:
        """Store the state at one position, and thin out the path's older checkpoints."""
        start = position // BLOCK_TOKENS * BLOCK_TOKENS
        parent = keys.after_blocks(position // BLOCK_TOKENS)
        tokens = keys.between(start, position)
        header = self._header(Kind.CHECKPOINT, parent, start, tokens, reason, compute_seconds)
        known = self._index.get(header.key)
        if known is not None and known.where & HERE:
            return Saved.KNOWN
        saved = self._save(header, export, terms, was_reused=was_reused)
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
            fingerprint=self._root,
            kind=kind,
            start=start,
            tokens=tokens,
            payload_bytes=0,
            compute_seconds=compute_seconds,
            reason=reason,
            created_at=time.time(),
        )

    def _save(
        self,
        header: Header,
        export: Callable[[], Payload],
        terms: CacheTerms,
        *,
        was_reused: bool,
    ) -> Saved:
        if not self._is_on:
            return Saved.REFUSED
        shape = (header.kind, header.n_tokens if header.kind is Kind.BLOCK else 0)
        parent = self._index.get(header.parent)
        if parent is not None:
            self._holdings.lease(parent)  # making room must not evict the entry's own parent
        try:
            if not self._holdings.make_room(self._payload_sizes.get(shape, 0)):
                return self._no_room(parent)
            payload = self._exported(export)
            header = replace(header, payload_bytes=len(payload))
            self._payload_sizes[shape] = len(payload)
            if not self._holdings.make_room(len(payload)):
                return self._no_room(parent)
        finally:
            if parent is not None:
                self._holdings.release(parent)
        node = self._holdings.hold(Entry(header, payload, Retention(terms.rank, terms.session)))
        for each in (node, *(node.checkpoints or ())):
            for store in self._back_stores:
                store.offer(each, was_reused=was_reused)
        self._holdings.shrink()
        return Saved.STORED

    def _exported(self, export: Callable[[], Payload]) -> Payload:
        began = time.perf_counter()
        payload = export()
        self._counters.memory.note_write(len(payload), time.perf_counter() - began)
        return payload

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
