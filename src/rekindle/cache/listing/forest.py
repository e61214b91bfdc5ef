"""Stored prefixes as a tree: consecutive blocks without a fork form one branch."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_

from rekindle.cache.entry import Key, Kind
from rekindle.cache.index import NOWHERE, Node
from rekindle.cache.listing.slices import Sliced, last_used, slices
from rekindle.generation.events import CacheSource
from rekindle.generation.status import StoredBranch


def sources_of(nodes: Sequence[Node]) -> tuple[CacheSource, ...]:
    """Return the tiers that hold all of the nodes."""
    everywhere = reduce(and_, (node.where for node in nodes)) if nodes else NOWHERE
    return everywhere.sources


def pinned_until(node: Node) -> float | None:
    until = node.retention.pinned_until
    return until if until > time.time() else None


def branches(
    nodes: Sequence[Node], names: Mapping[Key, Sequence[str]], limit: int
) -> Sliced[list[StoredBranch]]:
    """Group nodes into branches. `nodes` list parents before their children.

    `names` maps a node to the names of prompts that end there. Beyond `limit` blocks, only the
    most recently used ones and their ancestors are kept.
    """
    blocks = yield from _blocks_of(nodes, limit)
    n_behind: Counter[Key] = Counter()
    for piece in slices(blocks):
        n_behind.update(node.parent.key for node in piece if node.parent is not None)
        yield
    rows: list[tuple[int | None, list[Node]]] = []  # the index of the parent row, and the nodes
    places: dict[Key, int] = {}  # the row of each node
    for piece in slices(blocks):
        for node in piece:
            before = node.parent
            place = places.get(before.key) if before is not None else None
            if (
                before is not None
                and place is not None
                and n_behind[before.key] == 1
                and before.key not in names
                and before.where == node.where
                and before.retention._replace(asked_at=0.0) == node.retention._replace(asked_at=0.0)
            ):
                rows[place][1].append(node)
                places[node.key] = place
            else:
                places[node.key] = len(rows)
                rows.append((place, [node]))
        yield
    made: list[StoredBranch] = []
    for some_rows in slices(rows, lambda row: len(row[1])):
        made += [_branch(row, parent, names.get(row[-1].key, ())) for parent, row in some_rows]
        yield
    return made


def _blocks_of(nodes: Sequence[Node], limit: int) -> Sliced[list[Node]]:
    """Return the blocks among the nodes; beyond `limit`, the last used ones and their ancestors."""
    blocks: list[Node] = []
    for piece in slices(nodes):
        blocks += [node for node in piece if node.kind is Kind.BLOCK and node.where]
        yield
    if len(blocks) <= limit:
        return blocks
    chosen = yield from last_used(blocks, limit)
    kept = {node.key for node in chosen}
    for piece in slices(reversed(blocks)):  # children before their parents
        for node in piece:
            if node.key in kept and node.parent is not None:
                kept.add(node.parent.key)
        yield
    kept_blocks: list[Node] = []
    for piece in slices(blocks):
        kept_blocks += [node for node in piece if node.key in kept]
        yield
    return kept_blocks


def _branch(row: Sequence[Node], parent: int | None, names: Sequence[str]) -> StoredBranch:
    tip = row[-1]
    return StoredBranch(
        key=tip.key.hex(),
        parent=parent,
        start=row[0].start,
        stop=tip.stop,
        n_bytes=sum(node.payload_bytes for node in row),
        names=tuple(names),
        sources=sources_of(row),
        session=tip.retention.session,
        rank=tip.retention.rank,
        hits=tip.hits,
        used_at=max(node.used_at for node in row),
        pinned_until=pinned_until(tip),
    )
