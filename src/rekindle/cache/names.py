"""Named prompts: each name stands for token ids.

A name outlives the entries of its prompt, which may be replaced by longer ones or evicted.
"""

from dataclasses import dataclass

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.entry import TOKEN_BYTES, Key

MAX_NAMES = 1024  # picked
MAX_BYTES = 16 * 2**20  # of their token ids: 40 prompts of 100k tokens, or 1,000 of 4k; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    root: Key  # of its namespace
    name: str
    tokens: bytes  # big-endian ids
    session: str
    named_at: float

    def is_of(self, root: Key, prefix: bytes) -> bool:
        """Return whether its prompt starts with the prefix, in the same namespace."""
        return self.root == root and self.tokens.startswith(prefix)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Names:
    """The names of every namespace of one model, bounded: the oldest one is evicted first."""

    def __init__(self) -> None:
        self._named: BoundedCache[tuple[Key, str], Named] = BoundedCache(
            max_items=MAX_NAMES, max_bytes=MAX_BYTES
        )

    def give(self, named: Named) -> list[Named]:
        """Add or replace a name. Return the names evicted for it."""
        place = named.root, named.name
        evicted = self._named.put(place, named, n_bytes=len(named.tokens))
        return [each for _, each in evicted]

    def get(self, root: Key, name: str) -> Named | None:
        return self._named.peek((root, name))

    def drop(self, named: Named) -> None:
        self._named.pop((named.root, named.name))

    def all(self) -> list[Named]:
        return self._named.values()

    def of(self, root: Key) -> list[Named]:
        """Return the names of one namespace, the latest first."""
        known = [self._named.peek(place) for place in self._named if place[0] == root]
        return [named for named in reversed(known) if named is not None]
