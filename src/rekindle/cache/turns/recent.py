"""Turns in memory; the least recently used are evicted first.

`RecentTurns` is the front of the turn database: unwritten turns, and turns read lately.
`MemoryTurns` is the whole turn store of a server without a disk tier.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rekindle.bounded_cache import BoundedCache
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
    """Turns by id and by key. Any thread may call it."""

    def __init__(self, *, max_turns: int, max_bytes: int) -> None:
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
            return [held for id in ids if (held := self._held.peek(id)) is not None]

    def get(self, id: bytes) -> Held | None:
        with self._lock:
            return self._held.peek(id)

    def keep(self, turn: StoredTurn) -> int:
        """Store the turn and return its time of use."""
        with self._lock:
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
            known = self._held.peek(held.turn.id)
            if known is None or known.used_at <= held.used_at:
                self._put(held, is_spared)

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

    def __init__(self, *, max_turns: int = MAX_TURNS, max_bytes: int = MAX_BYTES) -> None:
        self._turns = RecentTurns(max_turns=max_turns, max_bytes=max_bytes)

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        return in_order(self._turns.find(keys))

    def keep(self, turn: StoredTurn) -> None:
        self._turns.keep(turn)

    def touch(self, ids: Sequence[bytes]) -> None:
        self._turns.touch(ids)

    def close(self) -> None:
        pass


def in_order(found: Sequence[Held]) -> list[StoredTurn]:
    """Return the turns, most recently used first."""
    return [held.turn for held in sorted(found, key=lambda held: held.used_at, reverse=True)]


def _size(turn: StoredTurn) -> int:
    return len(turn.data) + _TURN_BYTES + _KEY_BYTES * len(turn.keys)
