"""Entries of prompts for a shared store, and what a server finds of them."""

import random
from collections.abc import Sequence

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    Entry,
    Header,
    Key,
    Kind,
    Reason,
    Retention,
    entry_key,
    token_bytes,
)
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.tier import KnownEntry, SharedTier
from tests.cache.entries import MODEL
from tests.support.memory_objects import MemoryObjects, memory_store

B = BLOCK_TOKENS


def make_tier(
    objects: MemoryObjects,
    *,
    seal: str = "plain",
    fingerprint: Key = MODEL,
    namespace: str = "",
    payload_bytes: int = 100,
) -> SharedTier:
    return tier_of(
        memory_store(objects, seal=seal),
        fingerprint=fingerprint,
        namespace=namespace,
        payload_bytes=payload_bytes,
    )


def tier_of(
    store: SharedStore,
    *,
    fingerprint: Key = MODEL,
    namespace: str = "",
    payload_bytes: int = 100,
) -> SharedTier:
    """A server to which all entries are of one namespace and one size."""
    known = KnownEntry(namespace, payload_bytes, 0.0)
    return SharedTier(store, fingerprint=fingerprint, known=lambda key: known)


def prompt(n_tokens: int, *, seed: int = 1) -> bytes:
    noise = random.Random(seed)
    return token_bytes([noise.randrange(50_000) for _ in range(n_tokens)])


class Prompt:
    """The entries of one prompt, by position."""

    def __init__(
        self,
        tokens: bytes,
        *,
        root: Key = MODEL,
        payload_bytes: int = 100,
        session: str = "somebody",
        asked_at: float = 1000.0,
    ) -> None:
        self.tokens = tokens
        self._retention = Retention(session=session, asked_at=asked_at)
        self._payload_bytes = payload_bytes
        self.parents = [root]
        for n in range(len(tokens) // (B * TOKEN_BYTES)):
            piece = self._between(n * B, (n + 1) * B)
            self.parents.append(entry_key(self.parents[-1], Kind.BLOCK, piece))

    def entry(self, kind: Kind, stop: int) -> Entry:
        """Checkpoints stand at `stop`; blocks end there."""
        depth = (stop - 1 if kind is Kind.BLOCK else stop) // B
        tokens = self._between(depth * B, stop)
        parent = self.parents[depth]
        payload = random.Random(stop).randbytes(self._payload_bytes)
        header = Header(
            key=entry_key(parent, kind, tokens),
            parent=parent,
            fingerprint=MODEL,
            kind=kind,
            start=depth * B,
            tokens=tokens,
            payload_bytes=len(payload),
            compute_seconds=1.5,
            reason=Reason.PREFILL,
            created_at=1_700_000_000.0,
        )
        return Entry(header, payload, self._retention)

    def blocks(self, n_blocks: int) -> list[Entry]:
        return [self.entry(Kind.BLOCK, (n + 1) * B) for n in range(n_blocks)]

    def _between(self, start: int, stop: int) -> bytes:
        return self.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def put_all(tier: SharedTier, entries: Sequence[Entry]) -> None:
    for entry in entries:
        assert tier.put(entry) == []


def looked_up(
    tier: SharedTier,
    tokens: bytes,
    *,
    parent: Key = MODEL,
    namespace: str = "",
    start: int = 0,
    has_rows: bool = True,
    has_checkpoints: bool = False,
) -> list[tuple[Kind, int]]:
    """What is found, as kind and position."""
    found = tier.look_up(
        namespace, parent, start, tokens, has_rows=has_rows, has_checkpoints=has_checkpoints
    )
    return [(head.header.kind, head.header.stop) for head in found.heads]


def name_in(objects: MemoryObjects, tier: SharedTier, entry: Entry) -> str:
    """By what `put` added."""
    before = set(objects.objects)
    tier.put(entry)
    (name,) = set(objects.objects) - before
    return name
