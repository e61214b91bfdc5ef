"""The shared tier: entries in a store that several servers use, found by their names.

    e/<key>      head (a preamble of fixed length), then payload; each sealed by itself
    c/<parent>   group: the lengths of short blocks and checkpoints after the parent

A prompt's tokens give the names of its whole blocks. For short blocks and checkpoints, a group
lists the lengths to ask for. A hint, one digit of the entry's name, excludes most entries of other
tokens. So a group has at most MAX_MEMBERS members, however many entries there are.

Entries are never listed, and this class has no state: any thread may call.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    MAX_PREAMBLE_BYTES,
    TOKEN_BYTES,
    Entry,
    Header,
    Key,
    Kind,
    checksum,
    decode_preamble,
    encode_preamble,
    entry_key,
)
from rekindle.cache.shared.connection import SharedStore
from rekindle.errors import EntryCorrupt, EntryMissing, TierFailed

_log = logging.getLogger(__name__)

MAX_MEMBERS = len(Kind) * BLOCK_TOKENS * 16  # all kinds, lengths and hints
MAX_CHECKPOINTS = 8  # deepest checkpoints that a lookup returns; picked
MAX_CANDIDATES = 256  # heads that a lookup asks for after whole blocks; picked
# Where each name is a round trip: as many as a store answers in parallel; picked.
DEAR_NAMES = 16
MAX_DEAR_CANDIDATES = 2 * DEAR_NAMES

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class SharedTier:
    def __init__(self, store: SharedStore, *, fingerprint: Key) -> None:
        self._objects = store
        self._seal = store.seal
        self._fingerprint = fingerprint
        self._head_bytes = MAX_PREAMBLE_BYTES + store.seal.OVERHEAD_BYTES

    def get(self, key: Key) -> Entry:
        name = self._name(key)
        (data,) = self._objects.read([name])
        if data is None:
            raise EntryMissing(f"{key.hex()} is no longer in the shared store")
        try:
            return self._decoded(name, key, data)
        except EntryCorrupt:
            self._remove([name])
            raise

    def put(self, entry: Entry) -> list[Key]:
        """Store the entry. Evict nothing: the store makes its own room. Raises TierFailed."""
        header = entry.header
        name = self._name(header.key)
        (is_there,) = self._objects.touch([name])
        if not is_there:
            head = encode_preamble(entry).ljust(MAX_PREAMBLE_BYTES, b"\0")
            parts = [
                self._seal.seal(head, name),
                self._seal.seal(entry.payload, _payload_of(name)),
            ]
            self._objects.write(name, parts)
        if header.kind is Kind.CHECKPOINT or header.n_tokens < BLOCK_TOKENS:
            # After the entry, so that a listed member exists. Added on every put: either object
            # may have expired.
            member = _member(header.kind, header.n_tokens, name)
            self._objects.add(self._group(header.parent), member)
        return []

    def drop(self, keys: Sequence[Key]) -> None:
        self._objects.remove([self._name(key) for key in keys])

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """Extend the entries' expiry. Return the missing keys. Raises TierFailed."""
        are_there = self._objects.touch([self._name(key) for key in keys])
        return [key for key, is_there in zip(keys, are_there, strict=True) if not is_there]

    def quarantine(self, key: Key, why: str) -> None:
        _log.warning("shared: removed entry=%s: %s", key.hex(), why)
        self._remove([self._name(key)])

    def look_up(
        self,
        parent: Key,
        start: int,
        tokens: bytes,
        *,
        has_rows: bool,
        has_checkpoints: bool,
    ) -> list[Header]:
        """Return the stored headers of a prompt that continues with `tokens` after `parent`.

        `parent` is a root or a whole block that ends at `start`. The result has whole blocks up
        to the first missing one, the longest short block, and the deepest checkpoints.
        Raises TierFailed.
        """
        assert start % BLOCK_TOKENS == 0
        path = _PromptPath(parent, start, tokens)
        blocks = self._find_blocks(path)
        short, checkpoints = self._find_behind(
            path, len(blocks), has_rows=has_rows, has_checkpoints=has_checkpoints
        )
        return [*blocks, *short, *reversed(checkpoints)]

    def _find_blocks(self, path: "_PromptPath") -> list[Header]:
        wanted = path.blocks()
        found: dict[int, Header | None] = {}
        if self._objects.reads_are_dear and len(wanted) > DEAR_NAMES:
            # Most prompts diverge early: a few heads show how many others to read.
            spread = [-(-len(wanted) * n // DEAR_NAMES) - 1 for n in range(1, DEAR_NAMES + 1)]
            heads = self._read_heads([wanted[place] for place in spread])
            found = dict(zip(spread, heads, strict=True))
            absent = [place for place, header in found.items() if header is None]
            wanted = wanted[: min(absent, default=len(wanted))]
        unread = [place for place in range(len(wanted)) if place not in found]
        heads = self._read_heads([wanted[place] for place in unread])
        found |= dict(zip(unread, heads, strict=True))
        blocks: list[Header] = []
        while (header := found.get(len(blocks))) is not None:
            blocks.append(header)
        return blocks

    def _find_behind(
        self, path: "_PromptPath", n_blocks: int, *, has_rows: bool, has_checkpoints: bool
    ) -> tuple[list[Header], list[Header]]:
        """Return the longest short block after the whole ones, and the checkpoints, deepest first.

        Rows must lead up to each checkpoint, in models that have rows.
        """
        places = [
            _GroupQuery(n_blocks, (Kind.BLOCK,) * has_rows + (Kind.CHECKPOINT,) * has_checkpoints)
        ]
        if has_checkpoints:
            places += [
                _GroupQuery(depth, (Kind.CHECKPOINT,)) for depth in reversed(range(n_blocks))
            ]
        is_dear = self._objects.reads_are_dear
        n_at_once = DEAR_NAMES if is_dear else len(places)
        n_candidates = MAX_DEAR_CANDIDATES if is_dear else MAX_CANDIDATES
        short: list[Header] = []
        checkpoints: list[Header] = []
        for first in range(0, len(places), n_at_once):
            candidates = self._candidates(path, places[first : first + n_at_once])
            heads = [head for head in self._read_heads(candidates[:n_candidates]) if head]
            short += [head for head in heads if head.kind is Kind.BLOCK][:1]
            n_rows = short[0].stop if short else path.start_of(n_blocks)
            checkpoints += [
                head
                for head in heads
                if head.kind is Kind.CHECKPOINT and (head.stop <= n_rows or not has_rows)
            ]
            if checkpoints:
                break
        return short, checkpoints[:MAX_CHECKPOINTS]

    def _candidates(self, path: "_PromptPath", places: Sequence["_GroupQuery"]) -> list["_Wanted"]:
        """Return the entries that fit the prompt and that the groups list, deepest first."""
        groups = [self._group(path.parents[place.depth]) for place in places]
        answers = self._objects.members(groups, limit=MAX_MEMBERS)
        found = []
        for place, members in zip(places, answers, strict=True):
            told = set(members)
            for kind, n_tokens in {length for each in told if (length := _length_in(each))}:
                wanted = path.behind(place.depth, kind, n_tokens) if kind in place.kinds else None
                if wanted and _member(kind, n_tokens, self._name(wanted.key)) in told:
                    found.append(wanted)
        return sorted(found, key=lambda each: each.stop, reverse=True)

    def _read_heads(self, wanted: Sequence["_Wanted"]) -> list[Header | None]:
        """Return the verified headers; None for missing ones. Corrupt objects are removed."""
        if not wanted:
            return []
        names = [self._name(each.key) for each in wanted]
        heads: list[Header | None] = []
        unsound = []
        answers = self._objects.read(names, first_bytes=self._head_bytes)
        for each, name, data in zip(wanted, names, answers, strict=True):
            header = None
            if data is not None:
                try:
                    header = self._head(name, each.key, data)[0]
                    if (header.start, header.tokens) != (each.start, each.tokens):
                        raise EntryCorrupt("it belongs to another position")
                except EntryCorrupt as error:
                    _log.warning("shared: removed object=%s: %s", name, error.message)
                    unsound.append(name)
                    header = None
            heads.append(header)
        if unsound:
            self._remove(unsound)
        return heads

    def _decoded(self, name: str, key: Key, data: bytes) -> Entry:
        header, payload_check = self._head(name, key, data[: self._head_bytes])
        sealed = memoryview(data)[self._head_bytes :]
        sealed_bytes = header.payload_bytes + self._seal.OVERHEAD_BYTES
        if len(sealed) != sealed_bytes:
            raise EntryCorrupt(f"its payload has {len(sealed)} bytes instead of {sealed_bytes}")
        payload = self._seal.open(sealed, _payload_of(name))
        if checksum(payload) != payload_check:
            raise EntryCorrupt("its payload does not match its checksum")
        return Entry(header, payload)

    def _head(self, name: str, key: Key, sealed: bytes) -> tuple[Header, int]:
        if len(sealed) != self._head_bytes:
            raise EntryCorrupt(f"its head has {len(sealed)} bytes instead of {self._head_bytes}")
        data = bytes(self._seal.open(sealed, name))
        header, payload_check = decode_preamble(data)
        if any(data[HEADER_BYTES + len(header.tokens) :]):
            raise EntryCorrupt("there are unexpected bytes between its header and its payload")
        if header.key != key:
            raise EntryCorrupt(f"it holds the entry {header.key.hex()}")
        if header.fingerprint != self._fingerprint:
            raise EntryCorrupt("it belongs to another model")
        return header, payload_check

    def _remove(self, names: Sequence[str]) -> None:
        with suppress(TierFailed):
            self._objects.remove(names)

    def _name(self, key: Key) -> str:
        return self._seal.name("e", key)

    def _group(self, parent: Key) -> str:
        return self._seal.name("c", parent)


class _GroupQuery(NamedTuple):
    """The kinds of entries to look for after a number of blocks."""

    depth: int
    kinds: tuple[Kind, ...]


class _Wanted(NamedTuple):
    """An entry that would fit the prompt and may be stored."""

    key: Key
    kind: Kind
    start: int
    tokens: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES


class _PromptPath:
    """The next whole blocks of a prompt: `parents[n]` is the key after n of them."""

    def __init__(self, parent: Key, start: int, tokens: bytes) -> None:
        self._start = start
        self._tokens = tokens
        self.parents = [parent]
        for depth in range(len(tokens) // _BLOCK_BYTES):
            self.parents.append(entry_key(self.parents[-1], Kind.BLOCK, self._piece(depth)))

    def start_of(self, depth: int) -> int:
        return self._start + depth * BLOCK_TOKENS

    def blocks(self) -> list[_Wanted]:
        return [
            _Wanted(key, Kind.BLOCK, self.start_of(depth), self._piece(depth))
            for depth, key in enumerate(self.parents[1:])
        ]

    def behind(self, depth: int, kind: Kind, n_tokens: int) -> _Wanted | None:
        """Return the entry of that length; None if the prompt is too short.

        A state at position 0 saves nothing, so it is None too.
        """
        start = self.start_of(depth)
        tokens = self._piece(depth)[: n_tokens * TOKEN_BYTES]
        if len(tokens) != n_tokens * TOKEN_BYTES or start + n_tokens == 0:
            return None
        return _Wanted(entry_key(self.parents[depth], kind, tokens), kind, start, tokens)

    def _piece(self, depth: int) -> bytes:
        return self._tokens[depth * _BLOCK_BYTES : (depth + 1) * _BLOCK_BYTES]


def _member(kind: Kind, n_tokens: int, name: str) -> str:
    """Return a group's member. Its hint is a digit of the keyed name, which reveals no tokens."""
    return f"{kind:d}.{n_tokens}.{name[-1]}"


def _length_in(member: str) -> tuple[Kind, int] | None:
    """Return a member's kind and length; None if its format is unknown."""
    try:
        kind, n_tokens, _ = member.split(".")
        return Kind(int(kind)), int(n_tokens)
    except ValueError:
        return None


def _payload_of(name: str) -> str:
    """Return the name that a payload is sealed for: it cannot replace a head or another payload."""
    return f"{name}/payload"
