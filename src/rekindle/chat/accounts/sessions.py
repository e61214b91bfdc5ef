"""Sessions: requests that belong together, their cost, and the rank of each request.

A session is only a name. All sessions of a namespace share the cache: equal tokens give equal rows.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.conversation import Conversation, Role
from rekindle.generation.forgetting import Owner, Tombstone
from rekindle.generation.request import DEFAULT_SESSION, Rank

MAX_SESSIONS = 1024  # the least recently used is dropped first; picked
MAX_ASIDE_TOKENS = 64  # longest reply of a title or a label; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of requests and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    prefilled_twice_tokens: int = 0  # prefilled though this process had computed them before

    def __add__(self, other: "Ledger") -> "Ledger":
        mine, theirs = asdict(self), asdict(other)
        return Ledger(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(slots=True)
class Session:
    namespace: str
    id: str
    ledger: Ledger = Ledger()
    used_at: float = field(default_factory=time.time)  # seconds since the epoch
    has_used_tools: bool = False
    asked_at: float = 0.0  # arrival of the last request

    @property
    def owner(self) -> Owner:
        return Owner(namespace=self.namespace, session=self.id, asked_at=self.asked_at)


class Sessions:
    def __init__(self, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._sessions = BoundedCache[tuple[str, str], Session](max_items=max_sessions)

    def use(self, namespace: str, session_id: str, *, asked_at: float) -> Session:
        """Return the session, made on its first use, and mark it as used now."""
        key = (namespace, session_id)
        session = self._sessions.peek(key) or Session(namespace, session_id)
        session.used_at = time.time()
        session.asked_at = asked_at
        self._sessions.put(key, session)
        return session

    def forget(self, tombstone: Tombstone) -> int:
        """Drop the sessions that the deletion covers. Return how many."""
        covered = [key for key, each in self._sessions.items() if tombstone.covers(each.owner)]
        for key in covered:
            self._sessions.pop(key)
        return len(covered)

    def list(self, namespace: str) -> Sequence[Session]:
        """Return the sessions of a namespace, most recently used first."""
        return [each for each in reversed(self._sessions.values()) if each.namespace == namespace]


def rank_for(
    session: Session,
    conversation: Conversation | None,
    *,
    max_tokens: int | None,
    declared: Rank | None,
) -> Rank:
    """Return the declared rank; otherwise guess whether the request is a title or a summary.

    Titles and summaries come without tools in a session that used tools. `session` is as it
    was before this request.
    """
    if declared is not None:
        return declared
    if conversation is None or conversation.callable_tools or not session.has_used_tools:
        return Rank.MAIN
    # The default session may hold several clients, one with tools and one without.
    is_named = session.id != DEFAULT_SESSION
    is_first_turn = is_named and all(m.role is not Role.ASSISTANT for m in conversation.messages)
    is_short = max_tokens is not None and 0 < max_tokens <= MAX_ASIDE_TOKENS
    return Rank.BACKGROUND if is_first_turn or is_short else Rank.MAIN
