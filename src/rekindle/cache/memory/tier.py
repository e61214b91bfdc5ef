"""The memory tier: payloads in a dictionary, and the count of used and reserved bytes.

The holdings decide what to evict, and make room before they put an entry.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from rekindle.cache.entry import BLOCK_TOKENS, TOKEN_BYTES, Entry, Header, Key
from rekindle.generation.events import CacheSource
from rekindle.generation.status import TierStatus

# CPython's own bytes for an entry, besides payload and token ids: header, node, table slots.
# Measured 1,220 to 1,300, see tests/cache/memory/test_accounts.py.
ENTRY_OVERHEAD_BYTES = 1300


_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's limit in bytes, or "max"


def machine_memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text("ascii")))
    except (OSError, ValueError):
        return total


class MemoryTier:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.n_bytes = 0  # held and reserved
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Entry:
        return self._entries[key]

    def put(self, entry: Entry) -> None:
        assert entry.header.key not in self._entries
        self._entries[entry.header.key] = entry
        self.n_bytes += _size_of(entry.header)

    def drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if entry := self._entries.pop(key, None):
                self.n_bytes -= _size_of(entry.header)

    def reserve(self, payload_bytes: int) -> None:
        """Count the bytes of a read under way. The caller returns them with `give_back`."""
        self.n_bytes += size_in_memory(payload_bytes)

    def give_back(self, payload_bytes: int) -> None:
        self.n_bytes -= size_in_memory(payload_bytes)

    def status(self) -> TierStatus:
        return TierStatus(
            name=CacheSource.MEMORY,
            n_entries=len(self._entries),
            n_bytes=self.n_bytes,
            budget_bytes=self.budget_bytes,
        )


def size_in_memory(payload_bytes: int, token_bytes: int = BLOCK_TOKENS * TOKEN_BYTES) -> int:
    """Return the memory used by an entry. Its token ids count as a whole block if not known yet."""
    return payload_bytes + token_bytes + ENTRY_OVERHEAD_BYTES


def _size_of(header: Header) -> int:
    return size_in_memory(header.payload_bytes, len(header.tokens))
