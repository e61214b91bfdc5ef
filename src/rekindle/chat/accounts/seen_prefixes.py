"""Which prefixes were computed since the start. It is for counting, never for matching."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

GRAIN = 16  # tokens; what is shorter counts as nothing; picked
MAX_PREFIXES = 1 << 21  # 16 MiB, of 32 million tokens; picked


class SeenPrefixes:
    """A table of hashes: where two meet, the newer one stays.

    A longer prefix that is known vouches for the shorter ones, so a few that went do not matter.
    """

    def __init__(self) -> None:
        self._table = np.zeros(MAX_PREFIXES, np.uint64)

    def n_known(self, space: str, tokens: Tokens) -> int:
        """The longest prefix that was computed; a multiple of the grain."""
        hashes = prefix_hashes(space, tokens)
        [known] = np.nonzero(self._table[hashes % MAX_PREFIXES] == hashes)
        return (int(known[-1]) + 1) * GRAIN if known.size else 0

    def add(self, space: str, tokens: Tokens) -> None:
        hashes = prefix_hashes(space, tokens)
        self._table[hashes % MAX_PREFIXES] = hashes


def prefix_hashes(space: str, tokens: Tokens) -> NDArray[np.uint64]:
    """Of every prefix that is a multiple of the grain: a sum over its tokens and their places."""
    n_grains = len(tokens) // GRAIN
    places = np.arange(n_grains * GRAIN, dtype=np.uint64) << np.uint64(32)
    mixed = _mixed(places | tokens[: n_grains * GRAIN].astype(np.uint32))
    seed = blake2b(space.encode("utf-8", "replace"), digest_size=8).digest()
    # Sums of unsigned numbers wrap around, which is all right for a hash.
    sums: NDArray[np.uint64] = mixed.reshape(n_grains, GRAIN).sum(axis=1).cumsum()
    return sums + np.frombuffer(seed, np.uint64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's last steps."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
