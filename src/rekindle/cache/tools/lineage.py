"""The stored entries of each prompt in a cache directory, as a server would find them. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.cache.entry import BLOCK_TOKENS, TOKEN_BYTES, Key, Kind
from rekindle.cache.names import Named
from rekindle.cache.tools.inventory import Inventory, Listed
from rekindle.common_prefix import n_common


@dataclass(frozen=True, slots=True)
class Lineage:
    """One prompt with its stored blocks and the checkpoints between them, parents first."""

    root: Key
    tokens: bytes  # big-endian ids
    entries: tuple[Listed, ...]
    n_found: int  # tokens whose blocks are stored

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Stored:
    """The entries and names of a directory."""

    def __init__(self, inventory: Inventory, names: Sequence[Named]) -> None:
        self.inventory = inventory
        self.names = names
        self._behind: dict[Key, list[Listed]] = defaultdict(list)
        for entry in inventory.entries:
            self._behind[entry.row.header.parent].append(entry)

    def of_entry(self, entry: Listed) -> Lineage:
        chain = self.inventory.chain(entry)
        tokens = b"".join(each.row.header.tokens for each in chain)
        return self._lineage(chain[0].row.header.parent, tokens)

    def of_name(self, named: Named) -> Lineage:
        return self._lineage(named.root, named.tokens)

    def named(self, name: str) -> list[Named]:
        """Return the name in each namespace that has it."""
        return [each for each in self.names if each.name == name]

    def names_along(self, lineage: Lineage) -> list[Named]:
        """Return the names of prompts that this one starts with."""
        return [
            named
            for named in self.names
            if named.root == lineage.root and lineage.tokens.startswith(named.tokens)
        ]

    def names_by_entry(self) -> dict[Key, list[str]]:
        """Return the names of prompts that end in each entry, by its key."""
        found: dict[Key, list[str]] = defaultdict(list)
        for named in self.names:
            lineage = self.of_name(named)
            if lineage.entries:
                found[lineage.entries[-1].key].append(named.name)
        return found

    def _lineage(self, root: Key, tokens: bytes) -> Lineage:
        entries: list[Listed] = []
        n_bytes, holder = 0, root
        while True:
            rest = tokens[n_bytes:]
            followers = self._behind.get(holder, [])
            entries += _checkpoints_on_the_way(followers, rest)
            block = _nearest_block(followers, rest)
            if block is None:
                break
            entries.append(block)
            header = block.row.header
            n_bytes += n_common(header.tokens, rest) // TOKEN_BYTES * TOKEN_BYTES
            if header.n_tokens < BLOCK_TOKENS or not rest.startswith(header.tokens):
                break
            holder = header.key
        return Lineage(root, tokens, tuple(entries), n_bytes // TOKEN_BYTES)


def _checkpoints_on_the_way(followers: Sequence[Listed], rest: bytes) -> list[Listed]:
    return [
        entry
        for entry in followers
        if entry.row.header.kind is Kind.CHECKPOINT and rest.startswith(entry.row.header.tokens)
    ]


def _nearest_block(followers: Sequence[Listed], rest: bytes) -> Listed | None:
    """Return the block that shares most with the rest of the prompt; the shortest, if several."""
    blocks = [
        (n_common(header.tokens, rest) // TOKEN_BYTES, -header.n_tokens, header.key, entry)
        for entry in followers
        if (header := entry.row.header).kind is Kind.BLOCK
    ]
    n_shared, _, _, block = max(blocks, default=(0, 0, b"", None))
    return block if n_shared else None
