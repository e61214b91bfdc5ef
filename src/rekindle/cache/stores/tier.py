"""A tier is a byte store with four verbs. The slow ones are called from transfer threads only."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from rekindle.cache.entry import Entry, Header, Key
from rekindle.generation.events import CacheSource


class Tier(Protocol):
    name: CacheSource

    def get(self, key: Key) -> Entry:
        """Verified bytes. Raises EntryMissing, EntryCorrupt or TierFailed."""
        ...

    def put(self, entry: Entry) -> list[Key]:
        """Stores it, within the budget; the keys that had to go. Raises TierFailed."""
        ...

    def drop(self, keys: Sequence[Key]) -> None: ...

    def headers(self) -> Iterator[list[Header]]:
        """What is stored, in batches, most recently used first. Reads no payload."""
        ...
