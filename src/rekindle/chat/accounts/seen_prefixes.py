"""The prefixes computed since the start. Used for counting, never for cache lookups."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

GRAIN = 16  # tokens; prefixes are counted in multiples of it; picked
MAX_PREFIXES = 1 << 21  # 16 MiB, of 32 million tokens; picked


class SeenPrefixes:
    """A table of prefix hashes. On a collision the newer hash replaces the older one.

    A known prefix implies all shorter ones, so a few replaced hashes do not matter.
    """

    def __init__(self) -> None:
        self._table = np.zeros(MAX_PREFIXES, np.uint64)

    def n_known(self, space: str, tokens: Tokens) -> int:
        """Return the length of the longest computed prefix, a multiple of GRAIN."""
        hashes = prefix_hashes(space, tokens)
        [known] = np.nonzero(self._table[hashes % MAX_PREFIXES] == hashes)
        return (int(known[-1]) + 1) * GRAIN if known.size else 0

    def add(self, space: str, tokens: Tokens) -> None:
        hashes = prefix_hashes(space, tokens)
        self._table[hashes % MAX_PREFIXES] = hashes


def prefix_hashes(space: str, tokens: Tokens) -> NDArray[np.uint64]:
    """Hash every prefix whose length is a multiple of GRAIN: a sum over tokens and positions."""
    n_grains = len(tokens) // GRAIN
    places = np.arange(n_grains * GRAIN, dtype=np.uint64) << np.uint64(32)
    mixed = _mixed(places | tokens[: n_grains * GRAIN].astype(np.uint32))
    seed = blake2b(space.encode("utf-8", "replace"), digest_size=8).digest()
    # Unsigned sums wrap around, which is fine for a hash.
    sums: NDArray[np.uint64] = mixed.reshape(n_grains, GRAIN).sum(axis=1).cumsum()
    return sums + np.frombuffer(seed, np.uint64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the last steps of splitmix64."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
