"""The contents of the cache, as people see them: named prompts and ends of conversations."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from rekindle.cache.entry import BLOCK_TOKENS, ORDINARY, UNKNOWN_SESSION, Key, Kind
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.forgetting.verdict import Link, Verdict
from rekindle.cache.index import NOWHERE, Node, Where
from rekindle.cache.listing.forest import branches, pinned_until, sources_of
from rekindle.cache.listing.slices import SLICE_NODES, Sliced, last_used, slices, walk
from rekindle.cache.names import Named, Names
from rekindle.cache.residency import Residency
from rekindle.generation.forgetting import Place, Tombstone
from rekindle.generation.status import StoredBranch, StoredPrefix

_PLACES = ((Where.MEMORY, Place.MEMORY), (Where.DISK, Place.DISK), (Where.SHARED, Place.SHARED))


@dataclass(frozen=True, slots=True)
class Forgotten:
    n_entries: int
    places: Counter[Place]  # an entry counts in each place that held it
    names: tuple[Named, ...]


class Contents:
    def __init__(self, holdings: Residency, names: Names) -> None:
        self._holdings = holdings
        self._names = names
        self._index = holdings.index

    def listed(self, root: Key, limit: int) -> Sliced[list[StoredPrefix]]:
        """List names first, then conversations, the most recently used first."""
        listed = []
        for named in self._names.of(root)[:limit]:
            match = self._index.match(root, named.tokens)
            listed.append(_described(match.nodes, match.n_tokens, named))
            yield
        nodes = yield from walk(self._index.followers(root))
        tips: list[Node] = []
        for piece in slices(nodes):
            tips += filter(self._is_tip, piece)
            yield
        chosen = yield from last_used(tips, limit - len(listed))
        for tips in slices(chosen, _n_blocks):
            listed += [_described(node.path, node.stop, None) for node in tips if node.where]
            yield
        return listed

    def forest(self, root: Key, limit: int) -> Sliced[list[StoredBranch]]:
        names = defaultdict(list)
        for named in self._names.of(root):
            if nodes := self._index.match(root, named.tokens).nodes:
                names[nodes[-1].key].append(named.name)
            yield
        below = yield from walk(self._index.followers(root))
        return (yield from branches(below, names, limit))

    def tokens(self, root: Key, key: str) -> tuple[int, ...] | None:
        """Return the tokens of a named prompt, or up to an entry's end; None if unknown."""
        stored = self.tokens_of(root, key)
        return None if stored is None else tuple(np.frombuffer(stored, dtype=">u4").tolist())

    def tokens_of(self, root: Key, key: str) -> bytes | None:
        """Return the same tokens as big-endian ids."""
        if (named := self._names.get(root, key)) is not None:
            return named.tokens
        try:
            node = self._index.get(bytes.fromhex(key))
        except ValueError:
            return None
        path = node.path if node is not None else []
        is_ours = bool(path) and self._index.root_of(path[0]) == root
        return b"".join(each.tokens for each in path) if is_ours else None

    def forget_covered(
        self, tombstone: Tombstone, fingerprint: Key, *, but: Where
    ) -> Sliced[Forgotten]:
        """Drop what a tombstone covers and what follows it. The stores `but` delete their own."""
        deletion = Deletions(fingerprint, [tombstone])
        names = tuple(
            named
            for named in self._names.all()
            if deletion.covers(named.root, named.session, named.named_at)
        )
        for named in names:
            self._names.drop(named)
        gone: list[Where] = []
        for root in self._index.roots():
            gone += yield from self._forget_below(root, Verdict([tombstone], fingerprint), but)
        return _forgotten(gone, names)

    def _forget_below(self, top: Key, verdict: Verdict, but: Where) -> Sliced[list[Where]]:
        tops = self._index.followers(top)
        root = top if any(node.start == 0 for node in tops) else b""  # else these are orphans
        if not verdict.may_cover(root):
            return []
        nodes = yield from walk(tops)
        for piece in slices(reversed(nodes)):
            for node in piece:
                verdict.look_back(self._link(node, root))
            yield
        doomed: list[Node] = []
        for piece in slices(nodes):
            doomed += [
                each for each in piece if each.where and verdict.judge(self._link(each, root))
            ]
            for node in piece:
                if node.where and (heir := verdict.heirs.get(node.key)) is not None:
                    self._holdings.hand_over(node, heir)
            yield
        return (yield from self._drop_all(doomed, but=but))

    def _link(self, node: Node, root: Key) -> Link:
        """Describe a node for a verdict. An orphan on disk is left to the catalogue."""
        kept, parent = node.retention, node.parent
        session, asked_at = kept.session, kept.asked_at
        if not root and Where.DISK in node.where:
            session, asked_at = UNKNOWN_SESSION, inf
        return Link(node.key, parent.key if parent else b"", root, session, asked_at)

    def forget(self, root: Key, tokens: bytes) -> Sliced[Forgotten]:
        """Drop every entry that starts with the tokens and is there when this begins.

        Ancestors and checkpoints that no other prompt needs are dropped too. An entry that is
        stored between two slices stays, unless it follows a dropped one: it would never be found.
        """
        names = tuple(each for each in self._names.of(root) if each.tokens.startswith(tokens))
        for named in names:
            self._names.drop(named)
        path = self._index.match_blocks(root, tokens)
        holder = path[-1].key if path else root
        tail = tokens[sum(len(node.tokens) for node in path) :]
        followers = self._index.followers(holder)
        doomed = yield from walk(top for top in followers if top.tokens.startswith(tail))
        gone = yield from self._drop_all(doomed)
        while True:
            gone += self._drop(self._lost_checkpoints(root, path, tail))
            if not path:
                return _forgotten(gone, names)
            last = path[-1]
            if last.where:
                if not last.is_leaf or self._is_kept(root, path):
                    return _forgotten(gone, names)
                gone += self._drop([last])
            tail = path.pop().tokens
            yield

    def _lost_checkpoints(self, root: Key, path: list[Node], tail: bytes) -> list[Node]:
        """Return the checkpoints behind the path, within `tail`, that no other prompt passes."""
        holder = path[-1].key if path else root
        checkpoints = [
            each for each in self._index.followers(holder) if each.kind is Kind.CHECKPOINT
        ]
        others = [each.tokens for each in checkpoints if not tail.startswith(each.tokens)]
        return [
            each
            for each in checkpoints
            if tail.startswith(each.tokens)
            and not any(self._index.starting_with(holder, each.tokens))
            and not any(tokens.startswith(each.tokens) for tokens in others)
            and not self._is_kept(root, [*path, each])
        ]

    def _drop_all(self, doomed: list[Node], *, but: Where = NOWHERE) -> Sliced[list[Where]]:
        """Drop nodes, listed parents first. The list is emptied: freed a slice at a time, too."""
        gone: list[Where] = []
        while doomed:  # children first
            piece = doomed[: -SLICE_NODES - 1 : -1]
            del doomed[-SLICE_NODES:]
            gone += self._drop(piece, but=but)
            yield
        return gone

    def _drop(self, nodes: Sequence[Node], *, but: Where = NOWHERE) -> list[Where]:
        """Drop nodes, listed children first, and any that were stored below them since."""
        listed = set(nodes)
        late = [
            node
            for parent in nodes
            for top in (*(parent.children or ()), *(parent.checkpoints or ()))
            if top not in listed
            for node in (top, *self._index.below(top.key))
        ]
        there = [node for node in (*reversed(late), *nodes) if node.where]
        held = [node.where & ~but for node in there]
        self._holdings.drop(there, but=but)
        return held

    def _is_tip(self, node: Node) -> bool:
        """Return whether a conversation ends here. Checkpoints count where there are no rows."""
        if self._index.has_rows:
            return node.kind is Kind.BLOCK and node.children is None
        return node.kind is Kind.CHECKPOINT

    def _is_kept(self, root: Key, path: Sequence[Node]) -> bool:
        """Return whether the path's end is pinned, or a named prompt starts with it."""
        if pinned_until(path[-1]) is not None:
            return True
        tokens = b"".join(node.tokens for node in path)
        return any(
            named.tokens.startswith(tokens) or tokens.startswith(named.tokens)
            for named in self._names.of(root)
        )


def _forgotten(gone: Sequence[Where], names: tuple[Named, ...]) -> Forgotten:
    held = (place for where in gone for flag, place in _PLACES if flag in where)
    return Forgotten(len(gone), Counter(held), names)


def _n_blocks(node: Node) -> int:
    return node.stop // BLOCK_TOKENS + 1


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
