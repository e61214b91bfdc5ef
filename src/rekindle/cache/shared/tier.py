"""The shared tier: entries in a store that several servers use, found by their names.

    e/<folder>/<key>      head (owner and preamble, of fixed length), then payload; each sealed
    c/<folder>/<parent>   group: the lengths of short blocks and checkpoints after the parent

The folder stands for the namespace, so that a deletion finds all objects of a namespace.

A prompt's tokens give the names of its whole blocks. For short blocks and checkpoints, a group
lists the lengths to ask for. A hint, one digit of the entry's name, excludes most entries of other
tokens. So a group has at most MAX_MEMBERS members, however many entries there are.

A lookup lists nothing, and this class has no state: any thread may call.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    Entry,
    Key,
    Kind,
    checksum,
    entry_key,
)
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.deletion import ENTRY, GROUP
from rekindle.cache.shared.heads import EntryHeads, Head
from rekindle.errors import EntryCorrupt, EntryForgotten, EntryMissing, TierFailed
from rekindle.generation.forgetting import NEVER, Owner

_log = logging.getLogger(__name__)

MAX_MEMBERS = len(Kind) * BLOCK_TOKENS * 16  # all kinds, lengths and hints
MAX_CHECKPOINTS = 8  # deepest checkpoints that a lookup returns; picked
MAX_CANDIDATES = 256  # heads that a lookup asks for after whole blocks; picked
# Where each name is a round trip: as many as a store answers in parallel; picked.
DEAR_NAMES = 16
MAX_DEAR_CANDIDATES = 2 * DEAR_NAMES

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class KnownEntry(NamedTuple):
    """An entry that this server has looked up or written."""

    namespace: str
    payload_bytes: int
    touched_at: float  # monotonic


class LookupResult(NamedTuple):
    heads: list[Head]  # parents first
    n_corrupt: int  # objects that failed a check and were removed


class SharedTier:
    """`known` returns what the server knows of an entry; None: nothing."""

    def __init__(
        self,
        store: SharedStore,
        *,
        fingerprint: Key,
        known: Callable[[Key], KnownEntry | None],
        row_bytes: int = 0,
    ) -> None:
        self._objects = store
        self._deletions = store.deletions
        self._seal = store.seal
        self._heads = EntryHeads(store.seal, fingerprint=fingerprint, row_bytes=row_bytes)
        self._known = known

    def get(self, key: Key) -> Entry:
        known = self._known(key)
        if known is None:
            raise EntryMissing(f"{key.hex()} is no longer known")
        self._deletions.ensure_fresh()
        name = self._seal.name(ENTRY, self._seal.folder(known.namespace), key)
        n_bytes = self._heads.n_bytes + known.payload_bytes + self._seal.OVERHEAD_BYTES
        (data,) = self._objects.read([name], max_bytes=n_bytes + 1)  # one more: it is too long
        if data is None:
            raise EntryMissing(f"{key.hex()} is no longer in the shared store")
        try:
            entry = self._decoded(name, key, data, known.namespace)
        except EntryCorrupt:
            self._remove([name])
            raise
        return entry

    def put(self, entry: Entry) -> list[Key]:
        """Store the entry. Evict nothing: the store makes its own room.

        Raises EntryForgotten if a deletion covers the entry or would not find it, else TierFailed.
        """
        header, retention = entry.header, entry.retention
        known = self._known(header.key)
        if known is None:
            raise EntryForgotten("the entry was dropped while it waited")
        folder = self._seal.folder(known.namespace)
        name = self._seal.name(ENTRY, folder, header.key)
        owner = Owner(
            namespace=known.namespace,
            session=retention.session,
            asked_at=retention.asked_at or header.created_at,
        )
        if self._deletions.covers(owner):
            raise EntryForgotten("a deletion covers the entry")
        if not self._is_there(name, header.key, known.namespace):
            parts = [
                self._heads.sealed(entry, owner, name),
                self._seal.seal(entry.payload, _payload_of(name)),
            ]
            self._objects.write(name, parts)
            if not self._deletions.note_write(name, owner):
                raise EntryForgotten("a deletion covers the entry")
        if header.kind is Kind.CHECKPOINT or header.n_tokens < BLOCK_TOKENS:
            # After the entry, so that a listed member exists. Added on every put: either object
            # may have expired.
            member = _member(header.kind, header.n_tokens, name)
            self._objects.add(self._seal.name(GROUP, folder, header.parent), member)
        return []

    def drop(self, keys: Sequence[Key]) -> None:
        self._objects.remove(self._names(keys))

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """Extend the entries' expiry. Return the missing keys. Raises TierFailed."""
        known = [key for key in keys if self._known(key) is not None]
        are_there = self._objects.touch(self._names(known))
        return [key for key, is_there in zip(known, are_there, strict=True) if not is_there]

    def quarantine(self, key: Key, why: str) -> None:
        _log.warning("shared: removed entry=%s: %s", key.hex(), why)
        self._remove(self._names([key]))

    def look_up(
        self,
        namespace: str,
        parent: Key,
        start: int,
        tokens: bytes,
        *,
        has_rows: bool,
        has_checkpoints: bool,
    ) -> LookupResult:
        """Return the stored entries of a prompt that continues with `tokens` after `parent`.

        `parent` is a root or a whole block that ends at `start`. The result has whole blocks up
        to the first missing one, the longest short block, and the deepest checkpoints.
        Raises TierFailed.
        """
        assert start % BLOCK_TOKENS == 0
        self._deletions.ensure_fresh()
        path = _PromptPath(parent, start, tokens)
        lookup = _Lookup(self._objects, self._heads, namespace)
        blocks = lookup.find_blocks(path)
        short, checkpoints = lookup.find_behind(
            path, len(blocks), has_rows=has_rows, has_checkpoints=has_checkpoints
        )
        return LookupResult([*blocks, *short, *reversed(checkpoints)], lookup.n_corrupt)

    def _decoded(self, name: str, key: Key, data: bytes, namespace: str) -> Entry:
        """Return the verified entry. Raises EntryCorrupt, or EntryMissing for a deleted one."""
        head = self._heads.opened(data[: self._heads.n_bytes], name, key, namespace)
        if self._deletions.forgotten.cover(head.owner):
            raise EntryMissing(f"{key.hex()} was deleted")
        sealed = memoryview(data)[self._heads.n_bytes :]
        sealed_bytes = head.header.payload_bytes + self._seal.OVERHEAD_BYTES
        if len(sealed) != sealed_bytes:
            raise EntryCorrupt(f"its payload has {len(sealed)} bytes instead of {sealed_bytes}")
        payload = self._seal.open(sealed, _payload_of(name))
        if checksum(payload) != head.payload_check:
            raise EntryCorrupt("its payload does not match its checksum")
        return Entry(head.header, payload, head.retention)

    def _is_there(self, name: str, key: Key, namespace: str) -> bool:
        """Return whether the store has the entry, and no deletion covers it."""
        (is_there,) = self._objects.touch([name])
        if not is_there or self._deletions.forgotten.last_at(namespace) <= NEVER:
            return is_there
        (data,) = self._objects.read([name], max_bytes=self._heads.n_bytes)
        try:
            head = self._heads.opened(data or b"", name, key, namespace)
        except EntryCorrupt:
            return False
        return not self._deletions.forgotten.cover(head.owner)

    def _remove(self, names: Sequence[str]) -> None:
        with suppress(TierFailed):
            self._objects.remove(names)

    def _names(self, keys: Sequence[Key]) -> list[str]:
        """Return the names of the known entries."""
        known = [(key, each) for key in keys if (each := self._known(key)) is not None]
        folders = {each.namespace: self._seal.folder(each.namespace) for _, each in known}
        return [self._seal.name(ENTRY, folders[each.namespace], key) for key, each in known]


class _Lookup:
    """One lookup in the folder of one namespace. Raises TierFailed."""

    def __init__(self, store: SharedStore, heads: EntryHeads, namespace: str) -> None:
        self.n_corrupt = 0
        self._objects = store
        self._forgotten = store.deletions.forgotten
        self._seal = store.seal
        self._heads = heads
        self._namespace = namespace
        self._folder = store.seal.folder(namespace)
        # Most namespaces have no deletions.
        self._has_deletions = self._forgotten.last_at(namespace) > NEVER

    def find_blocks(self, path: "_PromptPath") -> list[Head]:
        wanted = path.blocks()
        found: dict[int, Head | None] = {}
        if self._objects.reads_are_dear and len(wanted) > DEAR_NAMES:
            # Most prompts diverge early: a few heads show how many others to read.
            spread = [-(-len(wanted) * n // DEAR_NAMES) - 1 for n in range(1, DEAR_NAMES + 1)]
            heads = self._read([wanted[place] for place in spread])
            found = dict(zip(spread, heads, strict=True))
            absent = [place for place, header in found.items() if header is None]
            wanted = wanted[: min(absent, default=len(wanted))]
        unread = [place for place in range(len(wanted)) if place not in found]
        heads = self._read([wanted[place] for place in unread])
        found |= dict(zip(unread, heads, strict=True))
        blocks: list[Head] = []
        while (header := found.get(len(blocks))) is not None:
            blocks.append(header)
        return blocks

    def find_behind(
        self, path: "_PromptPath", n_blocks: int, *, has_rows: bool, has_checkpoints: bool
    ) -> tuple[list[Head], list[Head]]:
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
        short: list[Head] = []
        checkpoints: list[Head] = []
        for first in range(0, len(places), n_at_once):
            candidates = self._candidates(path, places[first : first + n_at_once])
            heads = [head for head in self._read(candidates[:n_candidates]) if head]
            short += [head for head in heads if head.header.kind is Kind.BLOCK][:1]
            n_rows = short[0].header.stop if short else path.start_of(n_blocks)
            checkpoints += [
                head
                for head in heads
                if head.header.kind is Kind.CHECKPOINT
                and (head.header.stop <= n_rows or not has_rows)
            ]
            if checkpoints:
                break
        return short, checkpoints[:MAX_CHECKPOINTS]

    def _candidates(self, path: "_PromptPath", places: Sequence["_GroupQuery"]) -> list["_Wanted"]:
        """Return the entries that fit the prompt and that the groups list, deepest first."""
        groups = [
            self._seal.name(GROUP, self._folder, path.parents[place.depth]) for place in places
        ]
        answers = self._objects.members(groups, limit=MAX_MEMBERS)
        found = []
        for place, members in zip(places, answers, strict=True):
            told = set(members)
            for kind, n_tokens in {length for each in told if (length := _length_in(each))}:
                wanted = path.behind(place.depth, kind, n_tokens) if kind in place.kinds else None
                if wanted and _member(kind, n_tokens, self._name(wanted)) in told:
                    found.append(wanted)
        return sorted(found, key=lambda each: each.stop, reverse=True)

    def _read(self, wanted: Sequence["_Wanted"]) -> list[Head | None]:
        """Return the verified heads; None for missing and deleted ones. Damaged ones are removed.

        Deleted ones are not: the deletion may give them to another session.
        """
        if not wanted:
            return []
        names = [self._name(each) for each in wanted]
        heads: list[Head | None] = []
        damaged = []
        answers = self._objects.read(names, max_bytes=self._heads.n_bytes)
        for each, name, data in zip(wanted, names, answers, strict=True):
            head = None
            try:
                if data is not None:
                    head = self._opened(each, name, data)
            except EntryCorrupt as error:
                _log.warning("shared: removed object=%s: %s", name, error.message)
                damaged.append(name)
            if head is not None and self._has_deletions and self._forgotten.cover(head.owner):
                head = None
            heads.append(head)
        if damaged:
            self.n_corrupt += len(damaged)
            with suppress(TierFailed):
                self._objects.remove(damaged)
        return heads

    def _opened(self, wanted: "_Wanted", name: str, data: bytes) -> Head:
        """Raises EntryCorrupt."""
        head = self._heads.opened(data, name, wanted.key, self._namespace)
        if (head.header.start, head.header.tokens) != (wanted.start, wanted.tokens):
            raise EntryCorrupt("it belongs to another position")
        return head

    def _name(self, wanted: "_Wanted") -> str:
        return self._seal.name(ENTRY, self._folder, wanted.key)


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
