"""A heap of keys by priority: the key to evict next, or the one whose pin ends next.

Outdated items are dropped when they are popped. The heap holds the clock of `policy.priority`.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from rekindle.cache.entry import Key

_SMALL = 64  # below this a heap is not worth compacting; picked


class _Item(NamedTuple):
    priority: float
    ticket: int  # grows with every push: among equal priorities, the first pushed is popped first
    key: Key


class KeyHeap:
    def __init__(self) -> None:
        self.clock = 0.0  # the highest priority popped so far
        self._heap: list[_Item] = []
        self._tickets: dict[Key, int] = {}  # the ticket of each key's valid item
        self._n_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, key: Key, priority: float) -> None:
        """Add a key, or change its priority."""
        self._n_pushed += 1
        self._tickets[key] = self._n_pushed
        heappush(self._heap, _Item(priority, self._n_pushed, key))
        self._compact()

    def discard(self, key: Key) -> None:
        if self._tickets.pop(key, None) is not None:
            self._compact()

    def pop_lowest(self, at_most: float = inf) -> Key | None:
        """Remove and return the key with the lowest priority; None if all are above `at_most`."""
        while self._heap and self._heap[0].priority <= at_most:
            item = heappop(self._heap)
            if self._counts(item):
                del self._tickets[item.key]
                self.clock = max(self.clock, item.priority)
                return item.key
        return None

    def _counts(self, item: _Item) -> bool:
        return self._tickets.get(item.key) == item.ticket

    def _compact(self) -> None:
        if len(self._heap) > _SMALL + 2 * len(self._tickets):
            self._heap = [item for item in self._heap if self._counts(item)]
            heapify(self._heap)
