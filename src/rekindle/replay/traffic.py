"""Read recorded files as requests to send again, in the order they were sent.

A line is one of our trace, one of recorded traffic with `t` and `conv`, or a bare request of any
wire format. `priming.files` finds the format.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rekindle.api.http.caller import (
    CLASS_HEADER,
    INTERACTION_HEADER,
    SESSION_HEADERS,
    SUBAGENT_HEADERS,
    Hints,
    session_of,
)
from rekindle.errors import PrimeError, StartupError
from rekindle.generation.request import DEFAULT_SESSION
from rekindle.json_size import MAX_MEMBERS, MAX_VALUES, is_too_large
from rekindle.priming.files import Body, requests_of
from rekindle.replay.recorded_file import recorded_text

OUR_SESSION_HEADER = SESSION_HEADERS[0]
# Headers that name the caller. Keys and other credentials are never sent.
SENT_HEADERS = frozenset(
    {*SESSION_HEADERS, *SUBAGENT_HEADERS, INTERACTION_HEADER, CLASS_HEADER, "x-client-request-id"}
)
OLLAMA_PATHS = ("/api/chat", "/api/generate")
GEMINI_ENDS = (":generateContent", ":streamGenerateContent")
DIGEST_BYTES = 8
MAX_IN_LIST = 25  # times the values of the largest request, in a file that is one list; picked
_MAX_TIME = 1e12  # seconds; a larger number or an infinity is no time


class Skipped(StrEnum):
    OTHER_CALL = "no request for a reply"
    NO_TEXT = "recorded without its prompt"
    NOT_SENT = "of an API that cannot be replayed"
    UNREADABLE = "not readable"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    name: str  # `client:seq`, or the file and line
    path: str  # of the endpoint
    body: Body
    headers: tuple[tuple[str, str], ...]
    conversation: str
    source: int  # number of the file
    started: float | None = None
    ended: float | None = None  # None: unknown, or the reply was cut off
    first_byte: float | None = None  # of the reply; None: unknown
    line: int = 1  # of the file
    is_named: bool = False  # the conversation was recorded by name


@dataclass(frozen=True, slots=True)
class Traffic:
    requests: tuple[ReplayRequest, ...]
    skipped: Mapping[Skipped, int]

    @property
    def n_damaged(self) -> int:
        """Count the lines that have, or may have, a request whose text is missing."""
        return sum(self.skipped.get(each, 0) for each in (Skipped.NO_TEXT, Skipped.UNREADABLE))

    @property
    def has_times(self) -> bool:
        return all(request.started is not None for request in self.requests)


def is_gemini(path: str) -> bool:
    return path.endswith(GEMINI_ENDS)


def read_traffic(
    paths: Sequence[Path], limit: int | None = None, *, every_format: bool = False
) -> Traffic:
    """Read the files. `every_format`: also requests of APIs that cannot be replayed."""
    requests: list[ReplayRequest] = []
    skipped: Counter[Skipped] = Counter()
    for source, path in enumerate(paths):
        found = [
            each
            for number, record in _records(path)
            for each in _read(record, path, number, source, skipped)
            if _is_taken(each, skipped, every_format=every_format)
        ]
        if all(each.started is not None for each in found):
            found.sort(key=lambda each: each.started or 0.0)
        requests += found
    if not requests:
        raise StartupError(_nothing_in(paths, skipped))
    return Traffic(tuple(requests[:limit]), skipped)


def _nothing_in(paths: Sequence[Path], skipped: Mapping[Skipped, int]) -> str:
    files = ", ".join(map(str, paths))
    if not skipped:
        return f"{files}: no requests to replay."
    found = ", ".join(f"{n} x {reason}" for reason, n in skipped.items())
    return f"{files}: no line can be replayed ({found})."


def _is_taken(request: ReplayRequest, skipped: Counter[Skipped], *, every_format: bool) -> bool:
    if every_format or not _is_other_format(request.path):
        return True
    skipped[Skipped.NOT_SENT] += 1
    return False


def _is_other_format(path: str) -> bool:
    return path in OLLAMA_PATHS or is_gemini(path)


def _records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the JSON values of the file with their numbers. None: a line that is not JSON."""
    text = recorded_text(path)
    if (whole := _json(text, max_requests=MAX_IN_LIST)) is not None:
        values = whole if isinstance(whole, list) else [whole]
        yield from enumerate(values, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _json(line, max_requests=1)


def _json(text: str, *, max_requests: int) -> object:
    """Return None for what is not JSON, and for more values than so many requests may have."""
    if is_too_large(text.encode(), max_requests * MAX_MEMBERS, max_requests * MAX_VALUES):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _read(
    record: object, file: Path, number: int, source: int, skipped: Counter[Skipped]
) -> Iterator[ReplayRequest]:
    name = f"{file.name}:{number}"
    if not isinstance(record, dict):
        skipped[Skipped.UNREADABLE] += 1
        return
    if "path" in record and not isinstance(record.get("body"), dict):
        is_post = record.get("method", "POST") == "POST"
        skipped[Skipped.NO_TEXT if is_post else Skipped.OTHER_CALL] += 1
        return
    try:
        asked = _other_format(record) or [
            (dialect.path, body) for dialect, body in requests_of(record, name)
        ]
    except PrimeError:
        skipped[Skipped.UNREADABLE] += 1
        return
    if not asked:
        skipped[Skipped.OTHER_CALL] += 1
    about = record if "path" in record else {}
    if "client" in about and "seq" in about:
        name = f"{about['client']}:{about['seq']}"
    started, ended = _times(about)
    conversation = _recorded_name(about, source)
    for path, body in asked:
        yield ReplayRequest(
            name=name,
            path=path,
            body=body,
            headers=_headers(about),
            conversation=conversation or _derived_name(body, source),
            is_named=conversation is not None,
            source=source,
            started=started,
            ended=ended,
            first_byte=_time(about.get("t_first")),
            line=number,
        )


def _other_format(record: Mapping[str, Any]) -> list[tuple[str, Body]]:
    """Return the request if it is one of Gemini or Ollama, recorded with its path."""
    path = str(record.get("path", "")).partition("?")[0].rstrip("/")
    path = next((known for known in OLLAMA_PATHS if path.endswith(known)), path)
    return [(path, record["body"])] if _is_other_format(path) else []


def _headers(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    recorded = record.get("headers")
    if isinstance(recorded, dict):
        return tuple(
            (name.lower(), value)
            for name, value in recorded.items()
            if name.lower() in SENT_HEADERS and isinstance(value, str) and _can_be_sent(value)
        )
    session = record.get("session")
    if isinstance(session, str) and session != DEFAULT_SESSION and _can_be_sent(session):
        return ((OUR_SESSION_HEADER, session),)
    return ()


def _can_be_sent(value: str) -> bool:
    return bool(value) and value.isascii() and value.isprintable()


def _recorded_name(record: Mapping[str, Any], source: int) -> str | None:
    in_headers = session_of(dict(_headers(record)), Hints())
    for value in (record.get("conv"), record.get("session"), in_headers):
        if value is not None and value != DEFAULT_SESSION:
            return f"{source}/{record.get('client', '')}/{value}"
    return None


def _derived_name(body: Body, source: int) -> str:
    """Name the conversation by its beginning: equal first questions make one."""
    beginning = json.dumps(_beginning(body), sort_keys=True).encode()
    return f"{source}/{blake2b(beginning, digest_size=DIGEST_BYTES).hexdigest()}"


def _beginning(body: Body) -> object:
    turns = body.get("messages", body.get("input", body.get("contents")))
    if not isinstance(turns, list):
        return turns if turns is not None else body.get("prompt")
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and turn.get("role") == "user":
            return turns[: index + 1]
    return turns


def _times(record: Mapping[str, Any]) -> tuple[float | None, float | None]:
    started = _time(record.get("t", record.get("started_at")))
    ended = _time(record.get("t_end", record.get("ended_at")))
    if started is None or ended is None:
        return started, None
    return started, max(started, ended)


def _time(value: object) -> float | None:
    """Return seconds of any clock, from a number or a date."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < _MAX_TIME else None
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    return None
