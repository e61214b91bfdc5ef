"""A bounded dictionary: the least recently used items are evicted first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds at most `max_items` items and `max_bytes` bytes. Not thread-safe: callers lock.

    Iteration yields keys, least recently used first.
    """

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None) -> None:
        self._max_items = inf if max_items is None else max_items
        self._max_bytes = inf if max_bytes is None else max_bytes
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is held, without marking it as used."""
        return key in self._items

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield keys and values, least recently used first."""
        return ((key, value) for key, (value, _) in self._items.items())

    def values(self) -> list[V]:
        """Return all values, least recently used first."""
        return [value for value, _ in self._items.values()]

    def peek(self, key: K) -> V | None:
        """Return the value without marking it as used."""
        item = self._items.get(key)
        return item[0] if item is not None else None

    def get(self, key: K) -> V | None:
        """Return the value and mark it as used."""
        item = self._items.get(key)
        if item is None:
            return None
        self._items.move_to_end(key)
        return item[0]

    def put(
        self,
        key: K,
        value: V,
        *,
        n_bytes: int = 0,
        is_spared: Callable[[K], bool] | None = None,
    ) -> list[tuple[K, V]]:
        """Store the value as the most recently used one. Return the items evicted for it.

        Evict only the value itself if it is larger than `max_bytes`. Also evict the value itself
        if the oldest item is spared.
        """
        replaced = self._items.pop(key, None)
        if replaced is not None:
            self.n_bytes -= replaced[1]
        if n_bytes > self._max_bytes:
            return [(key, value)]
        self._items[key] = (value, n_bytes)
        self.n_bytes += n_bytes
        evicted = []
        while len(self._items) > self._max_items or self.n_bytes > self._max_bytes:
            if is_spared is not None and is_spared(next(iter(self._items))):
                self.pop(key)
                evicted.append((key, value))
            else:
                evicted.append(self.pop_oldest())
        return evicted

    def replace(self, key: K, value: V) -> None:
        """Replace a held value by one of the same size and mark it as used."""
        self._items[key] = (value, self._items[key][1])
        self._items.move_to_end(key)

    def pop(self, key: K) -> V | None:
        """Remove and return the value; None if it is not held."""
        item = self._items.pop(key, None)
        if item is None:
            return None
        self.n_bytes -= item[1]
        return item[0]

    def pop_oldest(self) -> tuple[K, V]:
        """Remove and return the least recently used item. Raises KeyError if there is none."""
        key, (value, n_bytes) = self._items.popitem(last=False)
        self.n_bytes -= n_bytes
        return key, value

    def clear(self) -> None:
        self._items.clear()
        self.n_bytes = 0
