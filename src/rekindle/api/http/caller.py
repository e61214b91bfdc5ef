"""The caller of a request: session, rank and namespace, from headers and from the body.

A session groups requests, for display and for eviction. A namespace isolates them: rows and
turns are shared within one namespace only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import unquote

from rekindle.api.body import fault
from rekindle.api.http.session_header import SESSION_HEADER
from rekindle.api.json import string_in
from rekindle.config import NamespaceBy
from rekindle.generation.request import DEFAULT_SESSION, Rank

MAX_SESSION_CHARS = 128
DIGEST_BYTES = 16

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Fields of a body that identify the caller."""

    sessions: tuple[str | None, ...] = ()  # the first that is not empty counts
    cache_class: str | None = None
    cache_salt: str | None = None


def caller_of(headers: Mapping[str, str], hints: Hints, namespace_by: NamespaceBy) -> Caller:
    """Identify the caller. `headers`: lower-case keys, or a case-insensitive mapping."""
    return Caller(
        session=_session(headers, hints),
        rank=_rank(headers, hints),
        namespace=namespace_of(headers, hints.cache_salt, namespace_by),
    )


def namespace_of(headers: Mapping[str, str], salt: str | None, namespace_by: NamespaceBy) -> str:
    """Return a digest of API key and salt, or an empty string for the common namespace."""
    salt = salt or headers.get(SALT_HEADER) or None
    key = next(iter(offered_keys(headers)), None) if namespace_by is NamespaceBy.API_KEY else None
    if salt is None and key is None:
        return ""
    return _digest(json.dumps({"api_key": key, "cache_salt": salt}))


def session_in_user_id(user_id: str | None) -> str | None:
    """Extract the session from `metadata.user_id`, where Claude Code sends JSON."""
    return string_in(user_id or "", "session_id") or user_id


def _session(headers: Mapping[str, str], hints: Hints) -> str:
    ours, *others = (headers.get(name, "") for name in SESSION_HEADERS)
    named = (*hints.sessions, unquote(ours), *others)
    session = next((id for each in named if (id := _cleaned(each))), DEFAULT_SESSION)
    agent = _agent(headers, session)
    if not agent or session.endswith(f"/{agent}"):  # our own name, sent back
        return _bounded(session)
    return _bounded(f"{session}/{agent}")


def _agent(headers: Mapping[str, str], session: str) -> str:
    """Return the id of a sub-agent that shares its parent's session, or an empty string."""
    if agent := _cleaned(headers.get(CLAUDE_CODE_AGENT)):
        return agent
    thread = _cleaned(headers.get(CODEX_THREAD))
    return "" if thread in (session, _cleaned(headers.get(CODEX_SESSION))) else thread


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


def offered_keys(headers: Mapping[str, str]) -> list[str]:
    """List the API keys that a request offers; none is empty."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "")) if key]


def _cleaned(id: str | None) -> str:
    return "".join(filter(str.isprintable, id or "")).strip()


def _bounded(id: str) -> str:
    return id if len(id) <= MAX_SESSION_CHARS else _digest(id)


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
