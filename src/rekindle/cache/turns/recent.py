"""Turns in memory, the least recently used out first.

`RecentTurns` stands in front of the database of turns: what is not written yet is found here,
and what was read stays for a while. `MemoryTurns` is all there is without a disk tier.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

from rekindle.generation.stored_turns import StoredTurn

MAX_TURNS = 20_000
MAX_BYTES = 64 * 2**20  # picked: with 1,000 tokens each, some 12,000 turns

# What CPython needs for a turn and for each of its keys, index included; about right.
_TURN_BYTES = 600
_KEY_BYTES = 350


class Held(NamedTuple):
    turn: StoredTurn
    used_at: int  # unix time in nanoseconds; later uses always have later ones


class RecentTurns:
    """Any thread may call it."""

    def __init__(self, *, max_turns: int, max_bytes: int) -> None:
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        self._ids_by_key: dict[bytes, set[bytes]] = {}
        self._n_bytes = 0
        self._last_use = 0

    def find(self, keys: Sequence[bytes]) -> list[Held]:
        """In no order."""
        with self._lock:
            ids = {id for key in keys for id in self._ids_by_key.get(key, ())}
            return [self._held[id] for id in ids]

    def get(self, id: bytes) -> Held | None:
        with self._lock:
            return self._held.get(id)

    def keep(self, turn: StoredTurn) -> int:
        """When that was."""
        with self._lock:
            held = Held(turn, self._next_use())
            self._put(held)
            return held.used_at

    def touch(self, ids: Sequence[bytes]) -> int:
        """When that was."""
        with self._lock:
            used_at = self._next_use()
            for id in ids:
                if (held := self._held.get(id)) is not None:
                    self._held[id] = held._replace(used_at=used_at)
                    self._held.move_to_end(id)
            return used_at

    def remember(self, held: Held, *, spared: Container[bytes]) -> None:
        """What was found elsewhere, unless something newer, or none that may go, is here."""
        with self._lock:
            known = self._held.get(held.turn.id)
            if known is None or known.used_at <= held.used_at:
                self._put(held, spared=spared)

    def _next_use(self) -> int:
        # The clock may stand still or be set back; the order of uses may not.
        self._last_use = max(time.time_ns(), self._last_use + 1)
        return self._last_use

    def _put(self, held: Held, *, spared: Container[bytes] = ()) -> None:
        self._drop(held.turn.id)
        if _size(held.turn) > self._max_bytes:
            return  # everything else would go, and then it would
        self._held[held.turn.id] = held
        self._n_bytes += _size(held.turn)
        for key in held.turn.keys:
            self._ids_by_key.setdefault(key, set()).add(held.turn.id)
        while len(self._held) > self._max_turns or self._n_bytes > self._max_bytes:
            oldest = next(iter(self._held))
            self._drop(held.turn.id if oldest in spared else oldest)

    def _drop(self, id: bytes) -> None:
        held = self._held.pop(id, None)
        if held is None:
            return
        self._n_bytes -= _size(held.turn)
        for key in set(held.turn.keys):
            self._ids_by_key[key].discard(id)
            if not self._ids_by_key[key]:
                del self._ids_by_key[key]


class MemoryTurns:
    """A TurnStore that forgets when the process ends."""

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
    """Most recently used first."""
    return [held.turn for held in sorted(found, key=lambda held: held.used_at, reverse=True)]


def _size(turn: StoredTurn) -> int:
    return len(turn.data) + _TURN_BYTES + _KEY_BYTES * len(turn.keys)
