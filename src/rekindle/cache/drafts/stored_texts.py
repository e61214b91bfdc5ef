"""Finds what followed a prompt, or the last tokens of a reply, in the stored blocks.

Only places are kept here. The tokens are those of the prefix index, so an entry that is evicted
or deleted is gone from here at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

import numpy as np

from rekindle.cache.drafts.ngrams import SLOT_BYTES, NgramTable
from rekindle.cache.entry import BLOCK_TOKENS, TOKEN_BYTES, Key, Kind
from rekindle.cache.index import Node, PrefixIndex, Where

N = 4  # tokens that must agree
BUDGET_BYTES = 32 * 2**20  # at most; enough for 4 million tokens. Picked.
MAX_FOUND = 64  # tokens of one answer; then the caller asks again. Picked.
MAX_REPLY = 8192  # tokens of an earlier reply; picked
NODE_BYTES = 128  # of a noted block, about
MAX_SIBLINGS = 16  # that are compared for the last used one; picked
NODES_PER_SLICE = 32  # that are read in one step: about a millisecond

_Gram = Struct(f">{N}I")


class _Noted(NamedTuple):
    """A block by its key: the node of an entry that is gone must not stay in memory."""

    key: Key
    root: Key


class StoredTexts:
    """`is_deleted` tells whether a deletion that is under way covers a node."""

    def __init__(
        self,
        index: PrefixIndex,
        is_deleted: Callable[[Key, Node], bool],
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._index = index
        self._is_deleted = is_deleted
        # A slot for each token of each block: half of them are overwritten before their block is.
        per_block = BLOCK_TOKENS * SLOT_BYTES + NODE_BYTES
        n_blocks = 1 << (max(budget_bytes // per_block, 2).bit_length() - 1)
        self._table = NgramTable(N, n_blocks * BLOCK_TOKENS)
        self._noted: list[_Noted | None] = [None] * n_blocks
        self._next = 0  # number of the next block; the oldest one is overwritten
        self.is_wanted = True  # False: nothing is ever drafted
        self.n_deletions = 0  # since then, tokens that were found before may not be used
        self._fresh: deque[Key] = deque()
        self._known: deque[Key] = deque()

    @property
    def n_bytes(self) -> int:
        return self._table.n_bytes + len(self._noted) * NODE_BYTES

    def note(self, node: Node) -> None:
        """Take a block that is new in the index. `advance` reads it later."""
        if node.kind is not Kind.BLOCK or not self.is_wanted:
            return
        if Where.MEMORY in node.where:
            self._fresh.append(node.key)
        elif len(self._known) + self._next < len(self._noted):
            self._known.append(node.key)  # the last used ones come first, and the rest has no room

    def forget(self) -> None:
        """Note that texts are deleted: those that were found so far may be among them."""
        self.n_deletions += 1

    def advance(self) -> bool:
        """Read some of the noted blocks. Return True if there are more."""
        for _ in range(NODES_PER_SLICE):
            if self._fresh:
                self._read(self._fresh.popleft(), spare=False)
            elif self._known:
                self._read(self._known.popleft(), spare=True)
            else:
                return False
        return True

    def _read(self, key: Key, *, spare: bool) -> None:
        node = self._index.get(key)
        root = self._index.root_of(node) if node is not None else b""
        if node is None or not root:
            return
        number = self._next % len(self._noted)
        self._next += 1
        self._noted[number] = _Noted(key, root)
        before = _tail(node)
        tokens = np.frombuffer(before + node.tokens, dtype=">u4").astype(np.uint64)
        # The place of an n-gram is the place of the token behind it, in its block.
        first = number * BLOCK_TOKENS - len(before) // TOKEN_BYTES
        first -= 1  # the last place of a block would be the first one of the next
        self._table.put_all(tokens, first, _seed(root), spare=spare)

    def find(self, root: Key, last: Sequence[int]) -> list[int]:
        """Return tokens that followed the last N ones, in the most recent block that has them."""
        gram = last[-N:]
        place = self._table.find(gram, _seed(root)) if len(gram) == N else None
        if place is None:
            return []
        number, offset = divmod(place, BLOCK_TOKENS)
        offset += 1
        noted = self._noted[number]
        if noted is None or noted.root != root:
            return []
        node = self._index.get(noted.key)
        if node is None or not self._is_alive(root, node):
            return []
        text = _tail(node) + node.tokens
        at = len(text) - len(node.tokens) + offset * TOKEN_BYTES
        if text[at - N * TOKEN_BYTES : at] != _Gram.pack(*gram):
            return []
        return self._continued(root, text[at:], node, MAX_FOUND)

    def after(self, root: Key, tokens: bytes) -> list[int]:
        """Return what followed a whole prompt (big-endian ids) when it was last used."""
        path = self._index.match_blocks(root, tokens)
        rest = tokens[len(path) * BLOCK_TOKENS * TOKEN_BYTES :]
        blocks = self._index.starting_with(path[-1].key if path else root, rest)
        node = self._last_used(root, (each for each in blocks if len(each.tokens) > len(rest)))
        if node is None:
            return []
        return self._continued(root, node.tokens[len(rest) :], node, MAX_REPLY)

    def _continued(self, root: Key, found: bytes, node: Node, n_tokens: int) -> list[int]:
        """Return `found` and what follows its last node, up to `n_tokens`."""
        parts = [found]
        n_missing = n_tokens * TOKEN_BYTES - len(found)
        while n_missing > 0 and (child := self._last_used(root, node.children or ())) is not None:
            parts.append(child.tokens)
            n_missing -= len(child.tokens)
            node = child
        tokens = b"".join(parts)[: n_tokens * TOKEN_BYTES]
        continued: list[int] = np.frombuffer(tokens, dtype=">u4").tolist()
        return continued

    def _last_used(self, root: Key, siblings: Iterable[Node]) -> Node | None:
        alive = (each for each in islice(siblings, MAX_SIBLINGS) if self._is_alive(root, each))
        return max(alive, key=_used_at, default=None)

    def _is_alive(self, root: Key, node: Node) -> bool:
        return bool(node.where) and not self._is_deleted(root, node)


_used_at = attrgetter("used_at")


def _tail(node: Node) -> bytes:
    """Return the last tokens before the block, so that n-grams across its start are found."""
    parent = node.parent
    return parent.tokens[-(N - 1) * TOKEN_BYTES :] if parent is not None else b""


def _seed(root: Key) -> int:
    return int.from_bytes(root[:8], "little")
