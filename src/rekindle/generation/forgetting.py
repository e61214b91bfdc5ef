"""Deleting what clients sent: what a deletion covers, and what it reports.

A deletion is a tombstone. The tombstone covers everything that was asked for before it: stored,
being written, or still being computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import product
from threading import Lock
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")


class Owner(Struct, frozen=True, kw_only=True):
    """The client of a request, by namespace and session, and when the request arrived.

    Data that an earlier version stored has unknown fields. A deletion covers it if one of
    its possible owners is covered.
    """

    namespace: str | None  # None: unknown
    session: str | None  # None: unknown
    asked_at: float  # seconds since the epoch; 0: unknown


UNKNOWN_OWNER = Owner(namespace=None, session=None, asked_at=0.0)


class Scope(Struct, frozen=True, kw_only=True):
    """What to delete: everything, one namespace, or one session of a namespace."""

    namespace: str | None = None  # None: every namespace
    session: str | None = None  # None: every session

    def covers_session(self, session: str | None) -> bool:
        """Return whether a session may be in scope. None: an unknown session.

        The session of a sub-agent is stored as `session/agent`, and deleted with its parent.
        """
        return (
            self.session is None
            or session is None
            or session == self.session
            or session.startswith(f"{self.session}/")
        )


def sessions_over(session: str) -> Iterator[str]:
    """Yield the session and its parents: `a/b/c`, `a`, `a/b`. A scope of any covers the session."""
    yield session
    for at, letter in enumerate(session):
        if letter == "/":
            yield session[:at]


class Tombstone(Struct, frozen=True, kw_only=True):
    """A deletion. Requests that arrived until then must leave nothing that can be found."""

    scope: Scope
    at: float  # seconds since the epoch

    def covers(self, owner: Owner) -> bool:
        return (
            owner.asked_at <= self.at
            and (owner.namespace is None or self.scope.namespace in (None, owner.namespace))
            and self.scope.covers_session(owner.session)
        )


MAX_TOMBSTONES = 10_000  # scopes; picked
NEVER = -1.0  # before the time of any request, also of one whose time is unknown


def newest_of(
    ends: dict[T, float], place: Callable[[T], tuple[object | None, str | None]]
) -> dict[T, float]:
    """Return nine tenths of MAX_TOMBSTONES: the newest deletions, and those of everything.

    `place` returns namespace and session; None: all of them. Half of the room is for sessions, so
    that neither those of sessions nor those of namespaces displace the others.
    """
    n_kept = MAX_TOMBSTONES * 9 // 10
    wide = {key: at for key, at in ends.items() if place(key)[1] is None}
    oldest_first = sorted(wide, key=lambda key: (place(key) == (None, None), wide[key]))
    wide = {key: wide[key] for key in oldest_first[-(n_kept // 2) :]}
    narrow = sorted((key for key in ends if place(key)[1] is not None), key=ends.__getitem__)
    return wide | {key: ends[key] for key in narrow[len(wide) - n_kept :]}


class Tombstones:
    """The deletions that this process knows: the newest of each scope. Any thread may call it.

    Every late write, read and lookup is checked against them.
    """

    def __init__(self, known: Iterable[Tombstone] = ()) -> None:
        self._lock = Lock()
        self._newest: dict[Scope, float] = {}
        self._last_at: dict[str | None, float] = {}  # by namespace
        for tombstone in known:
            self.add(tombstone)

    def add(self, tombstone: Tombstone) -> bool:
        """Return whether the deletion is new here."""
        with self._lock:
            scope = tombstone.scope
            if self._newest.get(scope, NEVER) >= tombstone.at:
                return False
            self._newest[scope] = tombstone.at
            last_at = self._last_at.get(scope.namespace, NEVER)
            self._last_at[scope.namespace] = max(last_at, tombstone.at)
            if len(self._newest) > MAX_TOMBSTONES:
                self._drop_oldest()
            return True

    def all(self) -> list[Tombstone]:
        with self._lock:
            return [Tombstone(scope=scope, at=at) for scope, at in self._newest.items()]

    def cover(self, owner: Owner) -> bool:
        """Return whether a deletion covers the owner."""
        if owner.namespace is None:
            return max(self._last_at.values(), default=NEVER) >= owner.asked_at
        if owner.session is None:
            return self.last_at(owner.namespace) >= owner.asked_at
        return any(
            self._newest.get(Scope(namespace=namespace, session=session), NEVER) >= owner.asked_at
            for namespace, session in product(
                (None, owner.namespace), (None, *sessions_over(owner.session))
            )
        )

    def _drop_oldest(self) -> None:
        newest = newest_of(self._newest, lambda scope: (scope.namespace, scope.session))
        last_at: dict[str | None, float] = {}
        for scope, at in newest.items():
            last_at[scope.namespace] = max(last_at.get(scope.namespace, NEVER), at)
        self._newest, self._last_at = newest, last_at  # `cover` reads without the lock

    def last_at(self, namespace: str) -> float:
        """Return when something of the namespace was last deleted."""
        return max(self._last_at.get(each, NEVER) for each in (None, namespace))


class Place(StrEnum):
    """Where deleted things were."""

    LIVE = "live"  # rows in the context
    MEMORY = "memory"
    DISK = "disk"
    SHARED = "shared"
    TURNS = "turns"
    NAMES = "names"
    RESPONSES = "responses"
    PROMPTS = "prompts"  # recent prompts and sessions, for explanations
    QUARANTINE = "quarantine"


class Deleted(Struct, frozen=True, kw_only=True):
    """How much a deletion removed from each place, and which places it could not reach."""

    counts: dict[Place, int]
    unreached: tuple[str, ...] = ()  # sentences: "The shared store does not answer."


def total(parts: Sequence[Deleted]) -> Deleted:
    counts = {place: sum(part.counts.get(place, 0) for part in parts) for place in Place}
    unreached = dict.fromkeys(line for part in parts for line in part.unreached)
    return Deleted(
        counts={place: n for place, n in counts.items() if n}, unreached=tuple(unreached)
    )
