"""The reads that wait for a thread of one store, the restore whose turn it is first.

The engine thread puts, hastens and withdraws reads. The reader threads take them.
"""

import heapq
import sys
import threading
import time
from itertools import count
from typing import NamedTuple

from rekindle.cache.entry import Key


class Turn(NamedTuple):
    """The place of a restore among the others. See `Backlog`."""

    due: int
    arrival: int  # tells restores apart that are due at once


class ReadOrder(NamedTuple):
    """The place of a read in the queue. The lowest is read first.

    The first piece of every restore is read before the later pieces of any.
    """

    is_later: bool  # not the first piece of its restore
    turn: Turn  # of its restore
    number: int  # of the piece in its restore


NOBODY_WAITS = ReadOrder(is_later=True, turn=Turn(sys.maxsize, 0), number=0)


class _Waiting(NamedTuple):
    order: ReadOrder
    ticket: int  # tells this apart from an earlier place of the same key
    key: Key
    put_at: float


class ReadQueue:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = count()
        self._heap: list[_Waiting] = []  # with places that were withdrawn or hastened since
        self._waiting: dict[Key, _Waiting] = {}
        self._began_at: dict[Key, float] = {}  # of the reads under way
        self._moved_at = 0.0  # when a read last began or ended

    def put(self, key: Key, order: ReadOrder) -> None:
        with self._lock:
            self._push(_Waiting(order, next(self._tickets), key, time.monotonic()))

    def hasten(self, key: Key, order: ReadOrder) -> None:
        """Move a read that waits forward to `order`, if that is an earlier place."""
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is not None and order < waiting.order:
                self._push(waiting._replace(order=order, ticket=next(self._tickets)))

    def withdraw(self, key: Key) -> bool:
        """Remove a read that waits. Return False if it has begun."""
        with self._lock:
            return self._waiting.pop(key, None) is not None

    def take(self) -> Key | None:
        """Begin the next read; None if none waits."""
        with self._lock:
            while self._heap:
                first = heapq.heappop(self._heap)
                if self._waiting.get(first.key) is first:
                    del self._waiting[first.key]
                    self._moved_at = self._began_at[first.key] = time.monotonic()
                    return first.key
            return None

    def end(self, key: Key) -> None:
        with self._lock:
            del self._began_at[key]
            self._moved_at = time.monotonic()

    def stalled_seconds(self, key: Key) -> float:
        """Return how long a read has been under way, or has waited in a queue that stands still.

        The wait in a queue that moves does not count. 0 if the read has ended.
        """
        with self._lock:
            since = self._began_at.get(key)
            waiting = self._waiting.get(key)
            if waiting is not None:
                since = max(waiting.put_at, self._moved_at)
            return 0.0 if since is None else time.monotonic() - since

    def _push(self, waiting: _Waiting) -> None:
        self._waiting[waiting.key] = waiting
        heapq.heappush(self._heap, waiting)
