"""Questions about live and stored prefixes, and changes to them. Asked with `Engine.ask`.

Each class names the type of its answer. They are msgspec structs because they also travel to the
process of the engine.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from rekindle.generation.forgetting import Deleted, Tombstone
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix

T = TypeVar("T")


class Question(Struct, Generic[T], frozen=True, kw_only=True, tag=True):
    """A question whose answer is a `T`."""


class LookUp(Question[Forecast], frozen=True, kw_only=True):
    """The prefix that a request with this prompt would find. Nothing is computed."""

    namespace: str
    tokens: tuple[int, ...]


class ListStored(Question[Sequence[StoredPrefix]], frozen=True, kw_only=True):
    """Named prompts, then conversations, last used first."""

    namespace: str
    limit: int


class ListBranches(Question[Sequence[StoredBranch]], frozen=True, kw_only=True):
    """Stored prefixes as a tree: parents first; beyond `limit`, the last used ones."""

    namespace: str
    limit: int


class ReadTokens(Question[tuple[int, ...] | None], frozen=True, kw_only=True):
    """All tokens up to the end of an entry; None: there is no such entry."""

    namespace: str
    key: str


class PinStored(Question[bool], frozen=True, kw_only=True):
    """Pin an entry for `seconds`, or unpin it with 0. The answer: whether the entry exists."""

    namespace: str
    key: str
    seconds: float


class Forget(Question[Deleted], frozen=True, kw_only=True):
    """Delete what a tombstone covers: live rows, entries in every tier, names, quarantined files.

    Requests in scope that still run end for their clients. Nothing of them is kept.
    """

    tombstone: Tombstone


class ForgetKey(Question[Deleted], frozen=True, kw_only=True):
    """Delete the entries that only this key needs, from every tier.

    A key is that of a `StoredPrefix`, or a name.
    """

    namespace: str
    key: str
    at: float  # seconds since the epoch; requests that arrived until then keep nothing of it


class Quarantine(Question[int], frozen=True, kw_only=True):
    """Quarantine the stored entries that this prompt would be restored from. The answer: how many.

    The prompt has crashed the engine.
    """

    namespace: str
    tokens: tuple[int, ...]


AnyQuestion = (
    LookUp | ListStored | ListBranches | ReadTokens | PinStored | Forget | ForgetKey | Quarantine
)
