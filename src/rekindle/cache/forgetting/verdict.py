"""Which entries deletions remove.

A deletion removes what it covers and all that follows. A deletion of one session leaves what
has been sent as well by another session, or again later: an entry that such an entry follows. It
belongs to that request from then on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rekindle.cache.entry import UNKNOWN_SESSION, Key
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.generation.forgetting import Tombstone


class Link(NamedTuple):
    """An entry, by its place in a chain of entries."""

    key: Key
    parent: Key
    root: Key  # empty: unknown
    session: str  # empty: unknown
    asked_at: float


class Heir(NamedTuple):
    """The request that an entry belongs to from now on."""

    session: str
    asked_at: float


class Verdict:
    """Takes all entries twice: children first with `look_back`, then parents first with `judge`."""

    def __init__(self, tombstones: Sequence[Tombstone], fingerprint: Key) -> None:
        self.doomed: set[Key] = set()
        self.heirs: dict[Key, Heir] = {}  # of entries that stay
        self._deletions = Deletions(fingerprint, tombstones)
        self._followed_by: dict[Key, Heir] = {}  # a request that has sent this prefix, too

    def may_cover(self, root: Key) -> bool:
        """Return whether any entry of a namespace may be deleted."""
        return self._deletions.covers(root, UNKNOWN_SESSION, 0.0)

    def look_back(self, link: Link) -> None:
        sender = self._followed_by.get(link.key)
        if sender is None and link.session != UNKNOWN_SESSION and not self._covers(link):
            sender = Heir(link.session, link.asked_at)
        if sender is not None:
            self._followed_by.setdefault(link.parent, sender)

    def judge(self, link: Link) -> bool:
        """Return whether the entry is deleted."""
        is_doomed = link.parent in self.doomed
        if not is_doomed and self._covers(link):
            heir = self._followed_by.get(link.key)
            is_doomed = heir is None
            if heir is not None:
                self.heirs[link.key] = heir
        if is_doomed:
            self.doomed.add(link.key)
        return is_doomed

    def _covers(self, link: Link) -> bool:
        return self._deletions.covers(link.root, link.session, link.asked_at)
