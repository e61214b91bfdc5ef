"""The caller of a request: session, rank and namespace, from headers and from the body.

A session groups requests, for display and for eviction. A namespace isolates them: rows and
turns are shared within one namespace only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from rekindle.api.body import fault
from rekindle.api.http.session_header import SESSION_HEADER
from rekindle.api.json import string_in
from rekindle.generation.forgetting import Owner
from rekindle.generation.request import (
    DEFAULT_SESSION,
    MAX_SESSION_CHARS,
    Rank,
    digest,
    session_name,
)

SALT_HEADER = "x-rekindle-cache-salt"
CLASS_HEADER = "x-rekindle-class"
CLASSES = {rank.name.lower(): rank for rank in Rank}

CODEX_SESSION, CODEX_THREAD = "session-id", "thread-id"
CLAUDE_CODE_AGENT = "x-claude-code-agent-id"
# Ours, Claude Code, opencode (twice), Codex, pi, Codex without a session.
SESSION_HEADERS = (
    SESSION_HEADER,
    "x-claude-code-session-id",
    "x-session-id",
    "x-session-affinity",
    CODEX_SESSION,
    "session_id",
    CODEX_THREAD,
)
# Sent with the requests of sub-agents only: Codex (twice), Claude Code, opencode.
SUBAGENT_HEADERS = (
    "x-openai-subagent",
    "x-codex-parent-thread-id",
    CLAUDE_CODE_AGENT,
    "x-parent-session-id",
)
# Copilot's. Its `x-initiator: agent` does not help: the main tool loop sends it as well.
INTERACTION_HEADER = "x-interaction-type"
INTERACTIONS = {
    "conversation-subagent": Rank.EPHEMERAL,
    "conversation-background": Rank.BACKGROUND,
}


@dataclass(frozen=True, slots=True)
class Caller:
    session: str
    rank: Rank | None  # None: not declared
    namespace: str
    asked_at: float = 0.0  # when the request arrived, in seconds since the epoch; 0: unknown

    @property
    def owner(self) -> Owner:
        return Owner(namespace=self.namespace, session=self.session, asked_at=self.asked_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Fields of a body that identify the caller."""

    sessions: tuple[str | None, ...] = ()  # the first that is not empty counts
    cache_class: str | None = None
    cache_salt: str | None = None


def caller_of(
    headers: Mapping[str, str], hints: Hints, key: str | None, asked_at: float = 0.0
) -> Caller:
    """Describe the caller. `headers`: lower-case keys, or a case-insensitive mapping.

    `key` is the API key that has a namespace of its own; None: the common namespace.
    """
    return Caller(
        session=session_of(headers, hints),
        rank=_rank(headers, hints),
        namespace=namespace_of(headers, hints.cache_salt, key),
        asked_at=asked_at,
    )


def namespace_of(headers: Mapping[str, str], salt: str | None, key: str | None) -> str:
    """Return a digest of API key and salt, or an empty string for the common namespace."""
    salt = salt or headers.get(SALT_HEADER) or None
    if salt is None and key is None:
        return ""
    return digest(json.dumps({"api_key": key, "cache_salt": salt}))


def session_in_user_id(user_id: str | None) -> str | None:
    """Extract the session from `metadata.user_id`, where Claude Code sends JSON."""
    return string_in(user_id or "", "session_id") or user_id


def session_of(headers: Mapping[str, str], hints: Hints) -> str:
    """Return the session's name; that of a sub-agent has the id of the sub-agent behind it."""
    ours, *others = (headers.get(name, "") for name in SESSION_HEADERS)
    named = (*hints.sessions, unquote(ours), *others)
    session = next((name for id in named if (name := session_name(id or ""))), DEFAULT_SESSION)
    agent = _agent(headers, session)
    if not agent:
        return session
    ends = (f"/{agent}", f"/{digest(agent)}")
    if session.endswith(ends):  # our own name, sent back
        return session
    # The name begins with the parent's, so that a deletion of the parent covers the sub-agent.
    names = (session + end for end in ends)
    return next((name for name in names if len(name) <= MAX_SESSION_CHARS), session)


def _agent(headers: Mapping[str, str], session: str) -> str:
    """Return the id of a sub-agent that shares its parent's session, or an empty string."""
    if agent := session_name(headers.get(CLAUDE_CODE_AGENT, "")):
        return agent
    thread = session_name(headers.get(CODEX_THREAD, ""))
    return "" if thread in (session, session_name(headers.get(CODEX_SESSION, ""))) else thread


def _rank(headers: Mapping[str, str], hints: Hints) -> Rank | None:
    if hints.cache_class is not None:
        return _declared(hints.cache_class, "cache_class")
    if (declared := headers.get(CLASS_HEADER)) is not None:
        return _declared(declared.strip().lower(), CLASS_HEADER)
    if any(headers.get(name) for name in SUBAGENT_HEADERS):
        return Rank.EPHEMERAL
    return INTERACTIONS.get(headers.get(INTERACTION_HEADER, "").lower())


def _declared(name: str, param: str) -> Rank:
    if name not in CLASSES:
        allowed = ", ".join(f"`{each}`" for each in CLASSES)
        raise fault(param, f" should be one of {allowed}.")
    return CLASSES[name]
