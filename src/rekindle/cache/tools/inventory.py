"""The entries of a catalogue as chains and conversations, and the order of pruning. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.entry_file import size_on_disk
from rekindle.cache.entry import Key, Kind


@dataclass(frozen=True, slots=True)
class Listed:
    row: CatalogRow
    chain_bytes: int  # of the entry and all its ancestors
    is_complete: bool  # all its ancestors are stored

    @property
    def key(self) -> Key:
        return self.row.header.key

    @property
    def n_bytes(self) -> int:
        return size_on_disk(self.row.header)


class Inventory:
    """Entries in the order of the given rows."""

    def __init__(self, rows: Iterable[CatalogRow]) -> None:
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
        """Count the tokens of blocks; the tokens of a checkpoint are those of a block, too."""
        headers = [entry.row.header for entry in self.entries]
        return sum(header.n_tokens for header in headers if header.kind is Kind.BLOCK)

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries)

    def tips(self) -> list[Listed]:
        """Return the entries where conversations end: nothing stored continues them."""
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
        """Return the entries whose key starts with the prefix."""
        return [entry for entry in self.entries if entry.key.hex().startswith(hex_prefix)]

    def chain(self, entry: Listed) -> list[Listed]:
        """Return the stored ancestors of the entry, oldest first, and the entry."""
        found = [entry]
        while (parent := self._entries.get(found[-1].row.header.parent)) is not None:
            found.append(parent)
        return found[::-1]

    def to_prune(
        self, *, to_bytes: int | None, used_before: float | None, now: float
    ) -> list[Listed]:
        """Return the entries to delete, in order: least recently used first, children first.

        Stops at `to_bytes`, or at the first entry used since `used_before`. Pinned entries stay.
        """
        n_followers = Counter(entry.row.header.parent for entry in self.entries)
        for entry in self.entries:
            n_followers[entry.key] += entry.row.retention.pinned_until > now
        leaves = [_place_of(entry) for entry in self.entries if not n_followers[entry.key]]
        heapify(leaves)
        n_bytes = self.n_bytes
        pruned = []
        while leaves:
            entry = self._entries[heappop(leaves)[-1]]
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


def _place_of(entry: Listed) -> tuple[float, int, Key]:
    """Return the order of leaves: among those that one request used, the last comes first."""
    return entry.row.last_used_at, -entry.row.header.start, entry.key


def _covered(siblings: list[Listed]) -> list[Key]:
    """Return the entries whose tokens another sibling starts with.

    A block covers a checkpoint with the same tokens.
    """
    # Sorting puts the tokens that start with others right after them.
    in_order = sorted(
        (entry.row.header for entry in siblings),
        key=lambda header: (header.tokens, header.kind is Kind.BLOCK),
    )
    return [one.key for one, two in pairwise(in_order) if two.tokens.startswith(one.tokens)]
