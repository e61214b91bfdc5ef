"""Prompts that somebody gave a name: the token ids that it stands for.

A name outlives the entries of its prompt: these are cut anew when longer ones come, evicted and
computed again.
"""

from collections import OrderedDict
from dataclasses import dataclass

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

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Names:
    """Those of every namespace of one model; the one that was given longest ago goes first."""

    def __init__(self) -> None:
        self._named: OrderedDict[tuple[Key, str], Named] = OrderedDict()
        self._n_bytes = 0

    def give(self, named: Named) -> list[Named]:
        """Those that had to go for it."""
        self.drop(named)
        self._named[named.root, named.name] = named
        self._n_bytes += len(named.tokens)
        gone = []
        while len(self._named) > MAX_NAMES or self._n_bytes > MAX_BYTES:
            gone.append(next(iter(self._named.values())))
            self.drop(gone[-1])
        return gone

    def get(self, root: Key, name: str) -> Named | None:
        return self._named.get((root, name))

    def drop(self, named: Named) -> None:
        known = self._named.pop((named.root, named.name), None)
        self._n_bytes -= len(known.tokens) if known is not None else 0

    def of(self, root: Key) -> list[Named]:
        """The latest first."""
        return [named for named in reversed(self._named.values()) if named.root == root]
