"""A dictionary that forgets: the least recently used items go first."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds at most `max_items` items and `max_bytes` bytes. Not thread-safe: callers lock.

    Iteration yields keys, least recently used first.
    """

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is held, without marking it as used."""
        return key in self._items

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

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

    def put(self, key: K, value: V, *, n_bytes: int = 0) -> list[tuple[K, V]]:
        """Store the value as the most recently used one. Return the items evicted for it.

        A value larger than `max_bytes` is evicted itself.
        """
        self.pop(key)
        self._items[key] = (value, n_bytes)
        self.n_bytes += n_bytes
        evicted = []
        while self._is_over_bounds():
            evicted.append(self.pop_oldest())
        return evicted

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

    def _is_over_bounds(self) -> bool:
        return (self._max_items is not None and len(self._items) > self._max_items) or (
            self._max_bytes is not None and self.n_bytes > self._max_bytes
        )
