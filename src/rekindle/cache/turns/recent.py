"""Turns in memory; the least recently used are evicted first.

`RecentTurns` is the front of the turn database: unwritten turns, and turns read lately.
`MemoryTurns` is the whole turn store of a server without a disk tier.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rekindle.bounded_cache import BoundedCache
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.stored_turns import StoredTurn

MAX_TURNS = 20_000
MAX_BYTES = 64 * 2**20  # picked: with 1,000 tokens each, some 12,000 turns

# Memory of a turn and of each of its keys in CPython, index included; estimates.
_TURN_BYTES = 600
_KEY_BYTES = 350


class Held(NamedTuple):
    turn: StoredTurn
    used_at: int  # Unix time in nanoseconds; strictly increasing


class RecentTurns:
    """Turns by id and by key, none that a deletion covers. Any thread may call it."""

    def __init__(self, forgotten: Tombstones, *, max_turns: int, max_bytes: int) -> None:
        self._forgotten = forgotten
        self._lock = threading.Lock()
        self._held: BoundedCache[bytes, Held] = BoundedCache(
            max_items=max_turns, max_bytes=max_bytes
        )
        self._ids_by_key: dict[bytes, set[bytes]] = {}
        self._last_use = 0

    def find(self, keys: Sequence[bytes]) -> list[Held]:
        """Return the turns that have one of the keys, in no order."""
        with self._lock:
            ids = {id for key in keys for id in self._ids_by_key.get(key, ())}
            found = [held for id in ids if (held := self._held.peek(id)) is not None]
        return [held for held in found if not self._forgotten.cover(held.turn.owner)]

    def get(self, id: bytes) -> Held | None:
        with self._lock:
            held = self._held.peek(id)
        return None if held is None or self._forgotten.cover(held.turn.owner) else held

    def keep(self, turn: StoredTurn) -> int | None:
        """Store the turn and return its time of use; None: a deletion covers the turn."""
        with self._lock:
            if self._forgotten.cover(turn.owner):
                return None
            held = Held(turn, self._next_use())
            self._put(held)
            return held.used_at

    def touch(self, ids: Sequence[bytes]) -> int:
        """Mark the turns as used and return the time of use."""
        with self._lock:
            used_at = self._next_use()
            for id in ids:
                if (held := self._held.peek(id)) is not None:
                    self._held.replace(id, Held(held.turn, used_at))
            return used_at

    def remember(self, held: Held, *, is_spared: Callable[[bytes], bool]) -> None:
        """Store a turn that was read elsewhere, unless a newer one is here.

        No turn whose id `is_spared` is evicted for it.
        """
        with self._lock:
            if self._forgotten.cover(held.turn.owner):
                return
            known = self._held.peek(held.turn.id)
            if known is None or known.used_at <= held.used_at:
                self._put(held, is_spared)

    def forget(self, tombstone: Tombstone) -> list[bytes]:
        """Drop the turns that the deletion covers. Return their ids."""
        with self._lock:
            covered = [held for held in self._held.values() if tombstone.covers(held.turn.owner)]
            for held in covered:
                self._held.pop(held.turn.id)
                self._drop_keys(held)
            return [held.turn.id for held in covered]

    def _next_use(self) -> int:
        # The clock may stand still or be set back; the order of uses may not.
        self._last_use = max(time.time_ns(), self._last_use + 1)
        return self._last_use

    def _put(self, held: Held, is_spared: Callable[[bytes], bool] | None = None) -> None:
        id, n_bytes = held.turn.id, _size(held.turn)
        if (before := self._held.pop(id)) is not None:
            self._drop_keys(before)
        for key in held.turn.keys:
            self._ids_by_key.setdefault(key, set()).add(id)
        for _, evicted in self._held.put(id, held, n_bytes=n_bytes, is_spared=is_spared):
            self._drop_keys(evicted)

    def _drop_keys(self, held: Held) -> None:
        for key in set(held.turn.keys):
            self._ids_by_key[key].discard(held.turn.id)
            if not self._ids_by_key[key]:
                del self._ids_by_key[key]


class MemoryTurns:
    """A TurnStore that ends with the process."""

    def __init__(
        self, forgotten: Tombstones, *, max_turns: int = MAX_TURNS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._turns = RecentTurns(forgotten, max_turns=max_turns, max_bytes=max_bytes)

    def find(self, keys: Sequence[bytes], *, namespace: str = "") -> list[StoredTurn]:
        return in_order(self._turns.find(keys))

    def keep(self, turn: StoredTurn) -> None:
        self._turns.keep(turn)

    def touch(self, ids: Sequence[bytes]) -> None:
        self._turns.touch(ids)

    def forget(self, tombstone: Tombstone) -> int:
        return len(self._turns.forget(tombstone))

    def close(self) -> None:
        pass


def in_order(found: Sequence[Held]) -> list[StoredTurn]:
    """Return the turns, most recently used first."""
    return [held.turn for held in sorted(found, key=lambda held: held.used_at, reverse=True)]


def _size(turn: StoredTurn) -> int:
    return len(turn.data) + _TURN_BYTES + _KEY_BYTES * len(turn.keys)
