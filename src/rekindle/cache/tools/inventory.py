"""What the rows of a catalogue amount to: chains, conversations, and what may go first. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.entry_file import size_on_disk
from rekindle.cache.entry import Key, Kind


@dataclass(frozen=True, slots=True)
class Listed:
    row: CatalogRow
    chain_bytes: int  # of it and of all it follows
    is_complete: bool  # everything it follows is stored, too

    @property
    def key(self) -> Key:
        return self.row.header.key

    @property
    def n_bytes(self) -> int:
        return size_on_disk(self.row.header)


class Inventory:
    def __init__(self, rows: Iterable[CatalogRow]) -> None:
        """In the order in which they are to be listed."""
        by_key = {row.header.key: row for row in rows}
        made: dict[Key, Listed] = {}
        for key in by_key:
            unmade = []
            while key in by_key and key not in made:
                unmade.append(by_key[key])
                key = by_key[key].header.parent
            for row in reversed(unmade):
                made[row.header.key] = _listed(row, made.get(row.header.parent))
        self._entries = {key: made[key] for key in by_key}

    @property
    def entries(self) -> list[Listed]:
        return list(self._entries.values())

    @property
    def n_tokens(self) -> int:
        """Of blocks: a checkpoint's tokens are those of a block, too."""
        headers = [entry.row.header for entry in self.entries]
        return sum(header.n_tokens for header in headers if header.kind is Kind.BLOCK)

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)

    def tips(self) -> list[Listed]:
        """Where conversations end: nothing is stored that goes on from there."""
        siblings = defaultdict(list)
        for entry in self.entries:
            siblings[entry.row.header.parent].append(entry)
        covered = {key for group in siblings.values() for key in _covered(group)}
        return [
            entry
            for entry in self.entries
            if entry.key not in siblings and entry.key not in covered
        ]

    def find(self, hex_prefix: str) -> list[Listed]:
        """Those whose key starts so."""
        return [entry for entry in self.entries if entry.key.hex().startswith(hex_prefix)]

    def chain(self, entry: Listed) -> list[Listed]:
        """What it follows, as far back as that is stored, and then itself."""
        found = [entry]
        while (parent := self._entries.get(found[-1].row.header.parent)) is not None:
            found.append(parent)
        return found[::-1]

    def to_prune(
        self, *, to_bytes: int | None, used_before: float | None, now: float
    ) -> list[Listed]:
        """Least recently used first, and nothing before what follows it, or while it is pinned."""
        n_followers = Counter(entry.row.header.parent for entry in self.entries)
        for entry in self.entries:
            n_followers[entry.key] += entry.row.retention.pinned_until > now
        leaves = [_place_of(entry) for entry in self.entries if not n_followers[entry.key]]
        heapify(leaves)
        n_bytes = self.n_bytes
        pruned = []
        while leaves:
            entry = self._entries[heappop(leaves).key]
            is_old = used_before is not None and entry.row.last_used_at < used_before
            is_over = to_bytes is not None and n_bytes > to_bytes
            if not is_old and not is_over:
                break
            pruned.append(entry)
            n_bytes -= entry.n_bytes
            parent = self._entries.get(entry.row.header.parent)
            if parent is not None:
                n_followers[parent.key] -= 1
                if not n_followers[parent.key]:
                    heappush(leaves, _place_of(parent))
        return pruned


def _listed(row: CatalogRow, parent: Listed | None) -> Listed:
    header = row.header
    if parent is None:
        return Listed(row, size_on_disk(header), is_complete=header.start == 0)
    return Listed(row, size_on_disk(header) + parent.chain_bytes, parent.is_complete)


class _ChainPlace(NamedTuple):
    """Orders leaves; of those that one request used, the last goes first."""

    last_used_at: float
    minus_start: int
    key: Key


def _place_of(entry: Listed) -> _ChainPlace:
    return _ChainPlace(entry.row.last_used_at, -entry.row.header.start, entry.key)


def _covered(siblings: list[Listed]) -> list[Key]:
    """Those whose tokens another one begins with. A block stands for its checkpoint as well."""
    # What begins with some bytes sorts right behind them.
    in_order = sorted(
        (entry.row.header for entry in siblings),
        key=lambda header: (header.tokens, header.kind is Kind.BLOCK),
    )
    return [one.key for one, two in pairwise(in_order) if two.tokens.startswith(one.tokens)]
