"""Prefixes that an upstream has probably cached: chained hashes of what was sent to it, bounded.

The table is used to choose an upstream. Evictions by an upstream are unknown here.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from rekindle.bounded_cache import BoundedCache

CHUNK_TOKENS = 64  # picked: shorter than most turns, longer than vLLM's blocks of 16
MAX_CHUNKS = 65_536  # per upstream: 4 million tokens; picked
_KEY_BYTES = 16


def chunk_keys(namespace: str, tokens: Sequence[int]) -> list[bytes]:
    """Return one key for each whole chunk, over all tokens up to the chunk's end."""
    key = blake2b(namespace.encode("utf-8", "surrogateescape"), digest_size=_KEY_BYTES).digest()
    rows = memoryview(array("q", tokens)).cast("B")
    keys = []
    for stop in range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS):
        chunk = rows[(stop - CHUNK_TOKENS) * 8 : stop * 8]
        key = blake2b(chunk, key=key, digest_size=_KEY_BYTES).digest()
        keys.append(key)
    return keys


class PrefixTable:
    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._known: BoundedCache[bytes, None] = BoundedCache(max_items=max_chunks)

    def __len__(self) -> int:
        return len(self._known)

    def n_tokens_known(self, keys: Sequence[bytes]) -> int:
        known = takewhile(self._known.__contains__, keys)
        return CHUNK_TOKENS * sum(1 for _ in known)

    def learn(self, keys: Sequence[bytes]) -> None:
        # From the end, so that the beginning of a prompt is evicted last.
        for key in reversed(keys[: self._max_chunks]):
            self._known.put(key, None)

    def clear(self) -> None:
        self._known.clear()
