"""Removes the objects of deletions from the store. Only this module lists the store.

A namespace is a folder. If the times of its objects do not count, it is removed without being read.
Otherwise the owners in the heads decide. An entry of a deleted session that another session has
sent as well stays: its head gets the other session.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from rekindle.cache.entry import decode_preamble
from rekindle.cache.forgetting.verdict import Heir, Link, Verdict
from rekindle.cache.shared.heads import (
    HEAD_BYTES,
    MAX_TURN_BYTES,
    OWNER_BYTES,
    decode_owner,
    given_to,
)
from rekindle.cache.shared.objects import ObjectStore
from rekindle.cache.shared.sealing import Seal
from rekindle.errors import EntryCorrupt, TierFailed
from rekindle.generation.forgetting import Owner, Tombstone, sessions_over

ENTRY, GROUP, TURN = "e", "c", "t"
CONTENTS = ENTRY + TURN  # the kinds that hold what clients sent

# All of these are picked.
HEADS_AT_ONCE = 500
TURNS_AT_ONCE = 16
FRESH_SECONDS = 120.0  # a younger deletion removes all of its scope: clocks of servers differ
CLOCK_SECONDS = 10.0  # by which clocks differ, to an older deletion

OnProgress = Callable[[int], None]  # objects removed so far

_ANY = b""  # model and root of an entry: they do not matter, the folder is the namespace's


class Removal(NamedTuple):
    """The removal of a deletion's objects.

    `is_second`: the last one, after every server knows the deletion.
    """

    tombstone: Tombstone
    is_second: bool = False
    due_at: float = 0.0  # monotonic

    def reach(self, now: float) -> Tombstone:
        """Return the tombstone with the time until which objects are removed."""
        scope, at = self.tombstone.scope, self.tombstone.at
        is_fresh = not self.is_second and now < at + FRESH_SECONDS
        return Tombstone(scope=scope, at=inf if is_fresh else at + CLOCK_SECONDS)


class Removed(NamedTuple):
    n_objects: int  # entries and turns
    is_complete: bool  # False: the time was up


class Deletion:
    """Removes objects until `deadline`, a monotonic time. Raises TierFailed."""

    def __init__(
        self,
        objects: ObjectStore,
        seal: Seal,
        *,
        deadline: float,
        on_progress: OnProgress = lambda n_objects: None,
    ) -> None:
        self._objects = objects
        self._seal = seal
        self._deadline = deadline
        self._on_progress = on_progress
        self._head_bytes = HEAD_BYTES + seal.OVERHEAD_BYTES
        self._n_objects = 0

    def run(self, tombstones: Sequence[Tombstone]) -> Removed:
        """Remove what the tombstones of one namespace cover. An infinite `at` covers all times."""
        namespace = tombstones[0].scope.namespace
        folder = "" if namespace is None else f"{self._seal.folder(namespace)}/"
        try:
            if any(each.scope.session is None and each.at == inf for each in tombstones):
                for page in self._pages(ENTRY + GROUP + TURN, folder):
                    self._remove(page)
            else:
                self._remove_turns(folder, tombstones)
                self._remove_entries(folder, tombstones)
        except _TimeIsUp:
            return Removed(self._n_objects, is_complete=False)
        return Removed(self._n_objects, is_complete=True)

    # -- turns ----------------------------------------------------------------------------------

    def _remove_turns(self, folder: str, tombstones: Sequence[Tombstone]) -> None:
        for names in self._batches(TURN, folder, TURNS_AT_ONCE):
            found = self._objects.read(names, max_bytes=MAX_TURN_BYTES)
            self._remove(
                name
                for name, data in zip(names, found, strict=True)
                if data is not None and self._is_covered(folder, name, data, tombstones)
            )

    def _is_covered(
        self, folder: str, name: str, data: bytes, tombstones: Sequence[Tombstone]
    ) -> bool:
        try:
            owner = decode_owner(self._seal.open(data, name), None)
        except EntryCorrupt:
            return _is_ours(folder, name)
        return any(each.covers(owner) for each in tombstones)

    # -- entries --------------------------------------------------------------------------------

    def _remove_entries(self, folder: str, tombstones: Sequence[Tombstone]) -> None:
        of_all = [each for each in tombstones if each.scope.session is None]
        of_sessions = [each for each in tombstones if each.scope.session is not None]
        rest: dict[str, _StoredEntry] = {}  # by name
        for found in self._entries(folder):
            doomed = [each for each in found if any(t.covers(each.owner) for t in of_all)]
            self._remove_with_groups(doomed)
            if of_sessions:
                rest |= {each.name: each for each in found}
                for entry in doomed:
                    rest.pop(entry.name, None)
        self._remove_sessions(sorted(rest.values(), key=lambda each: each.start), of_sessions)

    def _remove_sessions(
        self, entries: "Sequence[_StoredEntry]", tombstones: Sequence[Tombstone]
    ) -> None:
        """Remove children first, so that a deletion that ends early leaves no orphans.

        `entries`: parents first.
        """
        sessions = {each for entry in entries for each in sessions_over(entry.link.session)}
        verdict = Verdict([each for each in tombstones if each.scope.session in sessions], _ANY)
        for entry in reversed(entries):
            verdict.look_back(entry.link)
        doomed = [entry for entry in entries if verdict.judge(entry.link)]
        self._remove_with_groups(doomed[::-1])
        self._hand_over(
            {
                entry.name: heir
                for entry in entries
                if (heir := verdict.heirs.get(entry.link.key)) is not None
            }
        )

    def _remove_with_groups(self, entries: "Sequence[_StoredEntry]") -> None:
        for first in range(0, len(entries), HEADS_AT_ONCE):
            some = entries[first : first + HEADS_AT_ONCE]
            self._remove(entry.name for entry in some)
            self._remove(self._group_after(entry) for entry in some)

    def _group_after(self, entry: "_StoredEntry") -> str:
        _, folder, _ = entry.name.split("/")
        return self._seal.name(GROUP, folder, entry.link.key)

    def _entries(self, folder: str) -> "Iterator[list[_StoredEntry]]":
        """Read all heads of a folder. Remove damaged entries."""
        for names in self._batches(ENTRY, folder, HEADS_AT_ONCE):
            entries, damaged = [], []
            answers = self._objects.read(names, max_bytes=self._head_bytes)
            for name, data in zip(names, answers, strict=True):
                try:
                    if data is not None:
                        entries.append(self._decoded(name, data))
                except EntryCorrupt:
                    damaged.append(name)
            self._remove(name for name in damaged if _is_ours(folder, name))
            yield entries

    def _decoded(self, name: str, data: bytes) -> "_StoredEntry":
        head = bytes(self._seal.open(data, name))
        owner = decode_owner(head, None)
        header, _ = decode_preamble(head[OWNER_BYTES:])
        link = Link(header.key, header.parent, _ANY, owner.session or "", owner.asked_at)
        return _StoredEntry(header.start, name, owner, link)

    def _hand_over(self, heirs: dict[str, Heir]) -> None:
        """Give entries to other sessions. One that cannot be changed is removed."""
        names = list(heirs)
        for first in range(0, len(names), HEADS_AT_ONCE):
            some = names[first : first + HEADS_AT_ONCE]
            found = self._objects.read(some, max_bytes=self._head_bytes)
            for name, data in zip(some, found, strict=True):
                self._check_time()
                if data is None:
                    continue
                try:
                    head = given_to(bytes(self._seal.open(data, name)), *heirs[name])
                    self._objects.overwrite(name, self._seal.seal(head, name))
                except (EntryCorrupt, TierFailed):
                    self._remove([name])

    # -- names ----------------------------------------------------------------------------------

    def _batches(self, kind: str, folder: str, n_names: int) -> Iterator[list[str]]:
        for page in self._pages(kind, folder):
            for first in range(0, len(page), n_names):
                yield page[first : first + n_names]

    def _pages(self, kinds: str, folder: str) -> Iterator[list[str]]:
        starts = tuple(f"{kind}/{folder}" for kind in kinds)
        for page in self._objects.pages(kinds, folder):
            self._check_time()
            # A hostile store may list anything.
            yield [name for name in page if name.startswith(starts)]

    def _remove(self, names: Iterable[str]) -> None:
        if listed := list(names):
            self._check_time()
            self._objects.remove(listed)
            self._n_objects += sum(name[0] in CONTENTS for name in listed)
            self._on_progress(self._n_objects)

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise _TimeIsUp


class _StoredEntry(NamedTuple):
    start: int
    name: str
    owner: Owner
    link: Link


def _is_ours(folder: str, name: str) -> bool:
    """Return whether an object without a readable owner is removed.

    In the folder of a namespace it is damaged. Without a folder, an earlier version stored it.
    Elsewhere it may be an object of servers with another key.
    """
    return bool(folder) or name.count("/") == 1


class _TimeIsUp(Exception):
    pass
