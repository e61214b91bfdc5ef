"""Read the lines of a trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import StartupError
from rekindle.json_size import MAX_MEMBERS, MAX_VALUES, is_too_large
from rekindle.observe.request_record import Miss, MissReason
from rekindle.replay.recorded_file import recorded_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedReply:
    at: float
    session: str
    n_prompt: int
    n_cached: int
    n_prefilled: int
    n_recomputed: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class ReadTrace:
    replies: tuple[TracedReply, ...]  # in order of time
    n_skipped: int  # lines that are damaged or not of a trace


def read_trace(paths: Sequence[Path]) -> ReadTrace:
    """Read the files. Raise StartupError if one has no line of a trace."""
    replies: list[TracedReply] = []
    n_skipped = 0
    for path in paths:
        found = [_reply(line) for line in recorded_lines(path)]
        if not any(found):
            raise StartupError(
                f"{path} is not a trace. To look up a request, name a server with --url."
            )
        replies += [reply for reply in found if reply is not None]
        n_skipped += found.count(None)
    return ReadTrace(tuple(sorted(replies, key=lambda reply: reply.at)), n_skipped)


def miss_of(value: object) -> Miss | None:
    """Read a miss as traces and replies write it. None: there was none, or it is unknown."""
    if not isinstance(value, dict):
        return None
    try:
        return Miss(**{**value, "reason": MissReason(value["reason"])})
    except (TypeError, ValueError, KeyError):
        return None


def _reply(line: bytes) -> TracedReply | None:
    if is_too_large(line, MAX_MEMBERS, MAX_VALUES):
        return None
    try:
        record: Any = json.loads(line)
        return TracedReply(
            at=float(record["t"]),
            session=str(record["session"]),
            n_prompt=int(record["prompt_tokens"]),
            n_cached=int(record["cached_tokens"]),
            n_prefilled=int(record["prefilled_tokens"]),
            n_recomputed=int(record["prefilled_twice_tokens"]),
            miss=miss_of(record["miss"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
