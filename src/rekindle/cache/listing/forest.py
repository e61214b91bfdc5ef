"""Stored prefixes as a tree: consecutive blocks without a fork form one branch."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from heapq import nlargest
from operator import and_

from rekindle.cache.entry import Key, Kind
from rekindle.cache.index import NOWHERE, Node
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
) -> list[StoredBranch]:
    """Group nodes into branches. `nodes` list parents before their children.

    `names` maps a node to the names of prompts that end there. Beyond `limit` blocks, only the
    most recently used ones and their ancestors are kept.
    """
    blocks = [node for node in nodes if node.kind is Kind.BLOCK]
    if len(blocks) > limit:
        last_used = nlargest(limit, blocks, key=lambda node: node.used_at)
        kept: set[Key] = set()
        for node in last_used:
            step: Node | None = node
            while step is not None and step.key not in kept:
                kept.add(step.key)
                step = step.parent
        blocks = [node for node in blocks if node.key in kept]
    n_behind = Counter(node.parent.key for node in blocks if node.parent is not None)
    rows: list[tuple[int | None, list[Node]]] = []  # the index of the parent row, and the nodes
    places: dict[Key, int] = {}  # the row of each node
    for node in blocks:
        before = node.parent
        place = places.get(before.key) if before is not None else None
        if (
            before is not None
            and place is not None
            and n_behind[before.key] == 1
            and before.key not in names
            and (before.where, before.retention) == (node.where, node.retention)
        ):
            rows[place][1].append(node)
            places[node.key] = place
        else:
            places[node.key] = len(rows)
            rows.append((place, [node]))
    return [_branch(row, parent, names.get(row[-1].key, ())) for parent, row in rows]


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
