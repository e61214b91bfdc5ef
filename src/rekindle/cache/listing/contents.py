"""The contents of the cache, as people see them: named prompts and ends of conversations."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from rekindle.cache.entry import ORDINARY, Key, Kind
from rekindle.cache.index import Node
from rekindle.cache.listing.forest import branches, pinned_until, sources_of
from rekindle.cache.names import Named, Names
from rekindle.cache.residency import Residency
from rekindle.generation.status import StoredBranch, StoredPrefix


@dataclass(frozen=True, slots=True)
class Forgotten:
    n_entries: int
    names: tuple[Named, ...]
    prefix: bytes  # every entry that starts with these tokens was dropped


class Contents:
    def __init__(self, holdings: Residency, names: Names) -> None:
        self._holdings = holdings
        self._names = names
        self._index = holdings.index

    def listed(self, root: Key, limit: int) -> list[StoredPrefix]:
        """List names first, then conversations, the most recently used first."""
        listed = []
        for named in self._names.of(root)[:limit]:
            match = self._index.match(root, named.tokens)
            listed.append(_described(match.nodes, match.n_tokens, named))
        tips = [node for node in self._index.below(root) if _is_tip(node)]
        last_used = nlargest(limit - len(listed), tips, key=lambda node: node.used_at)
        return listed + [_described(node.path, node.stop, None) for node in last_used]

    def forest(self, root: Key, limit: int) -> list[StoredBranch]:
        names = defaultdict(list)
        for named in self._names.of(root):
            if nodes := self._index.match(root, named.tokens).nodes:
                names[nodes[-1].key].append(named.name)
        return branches(self._index.below(root), names, limit)

    def tokens(self, root: Key, key: str) -> tuple[int, ...] | None:
        """Return the tokens of a named prompt, or up to an entry's end; None if unknown."""
        stored = self._tokens_of(root, key)
        return None if stored is None else tuple(np.frombuffer(stored, dtype=">u4").tolist())

    def forget(self, root: Key, key: str | None) -> Forgotten:
        """Drop everything that starts with a key's or name's tokens; None: the whole namespace.

        Ancestors that no other prompt needs are dropped too.
        """
        tokens = self._tokens_of(root, key) if key is not None else b""
        if tokens is None:
            return Forgotten(0, (), b"")
        names = tuple(each for each in self._names.of(root) if each.tokens.startswith(tokens))
        for named in names:
            self._names.drop(named)
        path = self._index.match_blocks(root, tokens)
        holder = path[-1].key if path else root
        tail = tokens[sum(len(node.tokens) for node in path) :]
        doomed = [
            node
            for top in self._index.followers(holder)
            if top.tokens.startswith(tail)
            for node in (top, *self._index.below(top.key))
        ]
        n_gone = self._drop(doomed)
        while path and path[-1].is_leaf and not self._is_kept(root, path):
            n_gone += self._drop([path.pop()])
        return Forgotten(n_gone, names, tokens)

    def _tokens_of(self, root: Key, key: str) -> bytes | None:
        if (named := self._names.get(root, key)) is not None:
            return named.tokens
        try:
            node = self._index.get(bytes.fromhex(key))
        except ValueError:
            return None
        path = node.path if node is not None else []
        is_ours = bool(path) and self._index.is_below(path[0], root)
        return b"".join(each.tokens for each in path) if is_ours else None

    def _drop(self, nodes: Iterable[Node]) -> int:
        there = [node for node in reversed(list(nodes)) if node.where]
        self._holdings.drop(there)
        return len(there)

    def _is_kept(self, root: Key, path: Sequence[Node]) -> bool:
        """Return whether the path's end is pinned, or a named prompt starts with it."""
        if pinned_until(path[-1]) is not None:
            return True
        tokens = b"".join(node.tokens for node in path)
        return any(
            named.tokens.startswith(tokens) or tokens.startswith(named.tokens)
            for named in self._names.of(root)
        )


def _is_tip(node: Node) -> bool:
    """Return whether a conversation ends here. Checkpoints count only in models without rows."""
    if node.kind is Kind.CHECKPOINT:
        return node.payload_bytes > 0 and (node.parent is None or not node.parent.payload_bytes)
    return node.children is None and node.payload_bytes > 0


def _described(path: Sequence[Node], n_tokens: int, named: Named | None) -> StoredPrefix:
    """Describe a path; an empty one for a name whose prompt is no longer stored."""
    tip = path[-1] if path else None
    retention = tip.retention if tip else ORDINARY
    return StoredPrefix(
        key=tip.key.hex() if tip else "",
        name=named.name if named else None,
        session=named.session if named else retention.session,
        rank=retention.rank,
        n_tokens=n_tokens,
        n_bytes=sum(node.payload_bytes for node in path),
        sources=sources_of(path),
        hits=tip.hits if tip else 0,
        used_at=tip.used_at if tip else named.named_at if named else 0.0,
        pinned_until=pinned_until(tip) if tip else None,
    )
