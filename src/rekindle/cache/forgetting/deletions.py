"""The tombstones as they apply to the entries of one model.

An entry knows the root of its namespace, its session, and when its request arrived. Where one of
the first two is unknown, every tombstone counts that could be meant.
"""

from collections.abc import Iterable
from itertools import product
from threading import Lock

from rekindle.cache.entry import Key, namespace_root
from rekindle.generation.forgetting import (
    MAX_TOMBSTONES,
    NEVER,
    Tombstone,
    newest_of,
    sessions_over,
)


class Deletions:
    """Any thread may call it."""

    def __init__(self, fingerprint: Key, tombstones: Iterable[Tombstone] = ()) -> None:
        self._fingerprint = fingerprint
        self._lock = Lock()
        self._at: dict[tuple[Key | None, str | None], float] = {}  # by root and session
        self.add(tombstones)

    def add(self, tombstones: Iterable[Tombstone]) -> None:
        with self._lock:
            ends = dict(self._at)
            for tombstone in tombstones:
                scope = tombstone.scope
                root = None
                if scope.namespace is not None:
                    root = namespace_root(self._fingerprint, scope.namespace)
                place = (root, scope.session)
                ends[place] = max(tombstone.at, ends.get(place, NEVER))
            if len(ends) > MAX_TOMBSTONES:
                ends = newest_of(ends, lambda place: place)
            self._at = ends

    def covers(self, root: Key, session: str, asked_at: float) -> bool:
        """Return whether something was deleted. An empty root or session is unknown."""
        ends = self._at
        if not ends:
            return False
        sessions: tuple[str | None, ...] = (None, session)
        if "/" in session:
            sessions = (None, *sessions_over(session))
        if root and session:
            places = product((None, root), sessions)
            return any(asked_at <= ends.get(place, NEVER) for place in places)
        return any(
            asked_at <= at
            for (of_root, of_session), at in ends.items()
            if (not root or of_root in (None, root)) and (not session or of_session in sessions)
        )
