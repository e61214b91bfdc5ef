"""The prefix index: tokens -> the longest prefix that can be restored, over all tiers.

One tree per namespace: whole blocks are inner nodes, short blocks and checkpoints are leaves.
No I/O, no clock, one thread. The index knows where payloads are and never touches them.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from enum import IntFlag
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from rekindle.cache.entry import BLOCK_TOKENS, ORDINARY, TOKEN_BYTES, Header, Key, Kind
from rekindle.common_prefix import n_common
from rekindle.generation.events import CacheSource

_BLOCK = Kind.BLOCK  # looking up a member of an Enum is slow


class Where(IntFlag):
    """The tiers that hold an entry, as a set."""

    MEMORY = 1
    DISK = 2
    SHARED = 4

    @property
    def sources(self) -> tuple[CacheSource, ...]:
        """The tiers by name, cheapest first."""
        return tuple(source for source, place in _CHEAPEST_FIRST if place in self)

    @property
    def cheapest(self) -> CacheSource:
        """The tier to restore from. For an entry that was just evicted, this is memory."""
        return next(iter(self.sources), CacheSource.MEMORY)

    @property
    def to_read_from(self) -> "Where":
        """The store from which the entry has to be read first; empty if none."""
        if self & Where.MEMORY:
            return NOWHERE
        return self & Where.DISK or self & Where.SHARED


NOWHERE = Where(0)
HERE = Where.MEMORY | Where.DISK
# Disk before shared even when both hold it: a local read cannot stall on the network.
_CHEAPEST_FIRST = (
    (CacheSource.MEMORY, Where.MEMORY),
    (CacheSource.DISK, Where.DISK),
    (CacheSource.SHARED, Where.SHARED),
)


class Node:
    """One block or checkpoint. The holdings set `leases`, `hits`, `used_at` and `retention`."""

    __slots__ = (
        "_parent",
        "checkpoints",
        "children",
        "compute_seconds",
        "hits",
        "key",
        "kind",
        "leases",
        "payload_bytes",
        "retention",
        "start",
        "tokens",
        "used_at",
        "where",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.kind = _BLOCK
        self.start = 0
        self.tokens = b""
        self.payload_bytes = 0
        self.compute_seconds = 0.0
        self.where = NOWHERE
        self.leases = 0
        self.hits = 0
        self.used_at = 0.0  # seconds since the epoch
        self.retention = ORDINARY
        # Both are sorted by tokens. None rather than an empty list: most of a million nodes have at
        # most one child. An insertion moves 8 bytes per sibling, 36 us for 100,000 of them.
        self.children: list[Node] | None = None
        self.checkpoints: list[Node] | None = None
        self._parent: Node | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        """The position after the last token; a checkpoint's position."""
        return self.start + self.n_tokens

    @property
    def parent(self) -> "Node | None":
        """The stored parent; None at the root, or if the parent is not stored."""
        return self._parent if self._parent is not None and self._parent.where else None

    @property
    def path(self) -> "list[Node]":
        """The stored nodes from the first block to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def is_leaf(self) -> bool:
        return self.children is None and self.checkpoints is None


class Match(NamedTuple):
    n_tokens: int
    blocks: tuple[Node, ...]  # in order; the match may end inside the last one
    checkpoint: Node | None

    @property
    def nodes(self) -> list[Node]:
        """All entries of the match, the checkpoint last."""
        return [*self.blocks, *([self.checkpoint] if self.checkpoint else [])]

    def blocks_after(self, n_live: int) -> list[Node]:
        """The blocks with rows beyond `n_live`. A recurrent model's blocks have no rows."""
        return [node for node in self.blocks if node.stop > n_live and node.payload_bytes]


class PrefixIndex:
    """A node whose parent is not stored is an orphan: kept, but not matched without its parent."""

    def __init__(
        self,
        *,
        has_rows: bool,
        has_checkpoints: bool,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        assert has_rows or has_checkpoints
        self.has_rows = has_rows
        self._has_checkpoints = has_checkpoints
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._nodes: dict[Key, Node] = {}
        # Nodes that are stored nowhere but have children: the roots, and the parents of orphans.
        self._placeholders: dict[Key, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: Key) -> Node | None:
        return self._nodes.get(key)

    def add(self, header: Header, where: Where) -> Node:
        """Note that a tier holds the entry. Add the node if it is new."""
        node = self._nodes.get(header.key)
        if node is not None:
            node.where |= where
            return node
        node = self._placeholders.pop(header.key, None) or Node(header.key)
        node.kind = header.kind
        node.start = header.start
        node.tokens = header.tokens
        node.payload_bytes = header.payload_bytes
        node.compute_seconds = header.compute_seconds
        node.where = where
        self._nodes[node.key] = node
        parent = self._find(header.parent)
        if parent is None:
            parent = self._placeholders[header.parent] = Node(header.parent)
        self._link(node, parent)
        return node

    def remove(self, node: Node, where: Where) -> None:
        """Note that tiers no longer hold the node. The last one removes it; again does nothing."""
        if not node.where:
            return
        node.where &= ~where
        if not node.where:
            del self._nodes[node.key]
            self._unlink(node)
            if not node.is_leaf:
                self._placeholders[node.key] = node

    def match(self, root: Key, tokens: bytes) -> Match:
        """Return the longest prefix of `tokens` (big-endian ids) that can be restored."""
        top = self._placeholders.get(root)
        if top is None:
            return Match(0, (), None)
        path = self._walk(top, tokens)
        if self._has_checkpoints:
            return self._match_checkpoint(top, path, tokens)
        n_tokens = len(path) * self._block_bytes // TOKEN_BYTES
        holder = path[-1] if path else top
        last = _nearest(holder, self._piece(tokens, len(path)))
        if last is None:
            return Match(n_tokens, tuple(path), None)
        return Match(n_tokens + last.n_shared, (*path, last.node), None)

    def checkpoints_before(self, node: Node) -> list[Node]:
        """Return the checkpoints on the path to `node`, first position first."""
        found: list[Node] = []
        behind, holder = node.tokens[:-TOKEN_BYTES], node._parent
        while holder is not None:
            found += _prefixes(holder.checkpoints, behind)
            behind, holder = holder.tokens[:-TOKEN_BYTES], holder._parent
        return [checkpoint for checkpoint in reversed(found) if checkpoint is not node]

    def is_covered(self, parent: Key, tokens: bytes) -> bool:
        """Return whether memory or disk has a block after `parent` that starts with `tokens`."""
        return any(child.where & HERE for child in self.starting_with(parent, tokens))

    def starting_with(self, parent: Key, tokens: bytes) -> Iterator[Node]:
        """Yield the blocks after `parent` that start with `tokens`."""
        holder = self._find(parent)
        if holder is None or holder.children is None:
            return
        place = bisect_left(holder.children, tokens, key=_tokens_of)
        for child in islice(holder.children, place, None):
            if not child.tokens.startswith(tokens):
                return
            yield child

    def covered_by(self, node: Node) -> list[Node]:
        """Return the short blocks that `node` makes redundant: it starts with their tokens."""
        if node.kind is not _BLOCK or node._parent is None:
            return []
        return list(_prefixes(node._parent.children, node.tokens[:-TOKEN_BYTES]))

    def roots(self) -> list[Key]:
        """Return the roots, and the missing parents of orphans."""
        return list(self._placeholders)

    def root_of(self, node: Node) -> Key:
        """Return the root of the node's namespace, or an empty key for an orphan."""
        top = node
        while (parent := top._parent) is not None:
            if not parent.where and top.start == 0:
                return parent.key
            top = parent
        return b""

    def followers(self, key: Key) -> list[Node]:
        """Return the direct children and checkpoints of a root or a node."""
        top = self._find(key)
        return [*(top.children or ()), *(top.checkpoints or ())] if top is not None else []

    def below(self, key: Key) -> list[Node]:
        """Return all nodes below a root or a node, parents before their children."""
        found = self.followers(key)
        for node in found:
            found += node.children or ()
            found += node.checkpoints or ()
        return found

    def divergence(self, root: Key, tokens: bytes) -> int:
        """Return the length shared with the longest path that then diverges; 0 if none does.

        This may be more than can be restored.
        """
        top = self._placeholders.get(root)
        if top is None:
            return 0
        path = self._walk(top, tokens)
        holder, rest = path[-1] if path else top, self._piece(tokens, len(path))
        n_whole = len(path) * self._block_bytes // TOKEN_BYTES
        last = _nearest(holder, rest)
        if last is None:
            return n_whole if rest and holder.children else 0
        diverges = min(len(last.node.tokens), len(rest)) > last.n_shared * TOKEN_BYTES
        return n_whole + last.n_shared if diverges else 0

    def match_blocks(self, root: Key, tokens: bytes) -> list[Node]:
        """Return the whole blocks that the tokens start with."""
        top = self._placeholders.get(root)
        return self._walk(top, tokens) if top is not None else []

    def _walk(self, top: Node, tokens: bytes) -> list[Node]:
        """Return the whole blocks that `tokens` starts with."""
        path: list[Node] = []
        children = top.children
        size = self._block_bytes
        for begin in range(0, len(tokens) - size + 1, size):
            if children is None:
                break
            piece = tokens[begin : begin + size]
            place = bisect_left(children, piece, key=_tokens_of)
            if place == len(children) or children[place].tokens != piece:
                break
            path.append(children[place])
            children = children[place].children
        return path

    def _match_checkpoint(self, top: Node, path: list[Node], tokens: bytes) -> Match:
        for depth in range(len(path), -1, -1):
            node = path[depth - 1] if depth else top
            if node.checkpoints is None:
                continue
            rest = self._piece(tokens, depth)
            blocks = path[:depth]
            rows = _nearest(node, rest) if self.has_rows else None
            if self.has_rows:
                rest = rest[: rows.n_shared * TOKEN_BYTES] if rows else b""
            checkpoint = next(_prefixes(node.checkpoints, rest), None)
            if checkpoint is None or not (depth or checkpoint.tokens):
                continue  # a state at position 0 saves nothing
            if rows and checkpoint.tokens:
                blocks.append(rows.node)
            n_bytes = depth * self._block_bytes + len(checkpoint.tokens)
            return Match(n_bytes // TOKEN_BYTES, tuple(blocks), checkpoint)
        return Match(0, (), None)

    def _piece(self, tokens: bytes, depth: int) -> bytes:
        """Return the tokens after `depth` blocks, at most one block of them."""
        return tokens[depth * self._block_bytes : (depth + 1) * self._block_bytes]

    def _find(self, key: Key) -> Node | None:
        return self._nodes.get(key) or self._placeholders.get(key)

    def _link(self, node: Node, parent: Node) -> None:
        node._parent = parent
        if node.kind is _BLOCK:
            parent.children = _with(parent.children, node)
        else:
            parent.checkpoints = _with(parent.checkpoints, node)

    def _unlink(self, node: Node) -> None:
        parent, node._parent = node._parent, None
        assert parent is not None
        if node.kind is _BLOCK:
            parent.children = _without(parent.children, node)
        else:
            parent.checkpoints = _without(parent.checkpoints, node)
        if parent.is_leaf and not parent.where:
            del self._placeholders[parent.key]


class _Near(NamedTuple):
    node: Node
    n_shared: int  # tokens, at least 1


_tokens_of = attrgetter("tokens")


def _nearest(node: Node, query: bytes) -> _Near | None:
    """Return the child that shares most of `query`; among equals, one in memory.

    Children are sorted by tokens, so the best one is next to the place of `query`.
    """
    if node.children is None:
        return None
    place = bisect_left(node.children, query, key=_tokens_of)
    around = node.children[max(place - 1, 0) : place + 1]
    near = [_Near(child, n_common(child.tokens, query) // TOKEN_BYTES) for child in around]
    best = max(near, key=lambda each: (each.n_shared, Where.MEMORY in each.node.where))
    return best if best.n_shared else None


def _prefixes(siblings: list[Node] | None, query: bytes) -> Iterator[Node]:
    """Yield the siblings whose tokens `query` starts with, longest first.

    Each step looks at the last sibling before `query`. If `query` does not start with its tokens,
    the query is cut to the part that both share: only that part can have more prefixes.
    """
    while siblings is not None:
        place = bisect_right(siblings, query, key=_tokens_of)
        if place == 0:
            return
        node = siblings[place - 1]
        if query.startswith(node.tokens):
            yield node
            if not node.tokens:
                return
            query = node.tokens[:-TOKEN_BYTES]
        else:
            query = query[: n_common(node.tokens, query) // TOKEN_BYTES * TOKEN_BYTES]


def _with(siblings: list[Node] | None, node: Node) -> list[Node]:
    if siblings is None:
        return [node]
    insort(siblings, node, key=_tokens_of)
    return siblings


def _without(siblings: list[Node] | None, node: Node) -> list[Node] | None:
    assert siblings is not None
    del siblings[bisect_left(siblings, node.tokens, key=_tokens_of)]
    return siblings or None
