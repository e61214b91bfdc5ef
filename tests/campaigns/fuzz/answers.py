"""What every answer must be: no 5xx, errors in the dialect of the API, whole JSON and streams."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from tests.campaigns.fuzz.case import Kind, WireCase
from tests.campaigns.fuzz.client import Answer

ANTHROPIC_ROOTS = ("/v1/messages",)
GOOGLE_ROOTS = ("/v1beta", "/v1/cachedContents")
GOOGLE_VERBS = (
    *(":generateContent", ":streamGenerateContent", ":countTokens"),
    *(":embedContent", ":batchEmbedContents"),
)
OLLAMA_ROOTS = ("/api",)
# 501: the model cannot do it. 503: the limit on connections, or a model that is being unloaded.
# 529: Anthropic's 429.
ALLOWED = {
    (501, "not_supported"),
    *((503, "too_many_connections"), (503, "shutting_down"), (503, "UNAVAILABLE")),
    (529, "overloaded_error"),
}
# Ollama's errors have no code.
ALLOWED_MESSAGES = (
    "The server is shutting down",
    "The model was unloaded",
    "The server has as many",
)
FAULTS = ("internal_error", "engine_error", "engine_failed", "api_error", "INTERNAL")
GREW = b"The grammar is too complex"  # seen only while it is followed: the stream has begun
SSE, JSON, JSON_LINES = "text/event-stream", "application/json", "application/x-ndjson"


def problem_of(case: WireCase, answer: Answer) -> str | None:
    """Return what is wrong with the answer, or None."""
    if case.kind is Kind.RAW:
        return _server_error(answer) if answer.status >= 500 else None
    if answer.status >= 400:
        return _error_problem(case, answer)
    if not answer.body or case.method == "HEAD":
        return None
    if answer.media_type == JSON:
        return _json_problem(answer)
    if answer.media_type == JSON_LINES:
        return _lines_problem(answer)
    return _stream_problem(answer) if answer.media_type == SSE else None


class ToldIds(NamedTuple):
    responses: list[str]
    prefixes: list[str]  # their keys
    contents: list[str]


def ids_in(answer: Answer) -> ToldIds:
    """Return the ids that an answer tells."""
    told = ToldIds([], [], [])
    if answer.status != 200 or answer.media_type != JSON or not 0 < len(answer.body) < 200_000:
        return told
    value = json.loads(answer.body)
    if not isinstance(value, dict):
        return told
    if isinstance(name := value.get("name"), str) and name.startswith("cachedContents/"):
        told.contents.append(name.partition("/")[2])
    if isinstance(id := value.get("id"), str) and id.startswith("resp_"):
        told.responses.append(id)
    for entry in value.get("entries") or value.get("data") or ():
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            told.prefixes.append(entry["key"])
    return told


def _server_error(answer: Answer) -> str | None:
    code = _code(answer.body)
    if (answer.status, code) in ALLOWED:
        return None
    return f"status {answer.status}: {answer.body[:300]!r}"


def _error_problem(case: WireCase, answer: Answer) -> str | None:
    if answer.status >= 500 and (problem := _server_error(answer)):
        return problem
    if case.method == "HEAD":
        return None
    if answer.media_type != JSON:
        return f"status {answer.status} as {answer.media_type!r}: {answer.body[:200]!r}"
    try:
        body = json.loads(answer.body)
    except ValueError as error:
        return f"status {answer.status}, not JSON ({error}): {answer.body[:200]!r}"
    is_right = _shape_at(unquote(case.path.partition("?")[0]))(body)
    return None if is_right else f"status {answer.status} in another dialect: {answer.body[:200]!r}"


def _shape_at(path: str) -> Callable[[Any], bool]:
    """Return the check of errors at this path."""
    if _is_below(path, ANTHROPIC_ROOTS):
        return _is_anthropic
    if _is_below(path, GOOGLE_ROOTS) or path.endswith(GOOGLE_VERBS):
        return _is_google
    return _is_ollama if _is_below(path, OLLAMA_ROOTS) else _is_openai


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _is_openai(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and isinstance(error.get("message"), str)
        and isinstance(error.get("type"), str)
        and {"param", "code"} <= error.keys()
    )


def _is_anthropic(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and body.get("type") == "error"
        and isinstance(body.get("request_id"), str)
        and isinstance(error.get("message"), str)
        and isinstance(error.get("type"), str)
    )


def _is_google(body: Any) -> bool:
    error = body.get("error") if isinstance(body, dict) else None
    return (
        isinstance(error, dict)
        and isinstance(error.get("code"), int)
        and isinstance(error.get("message"), str)
        and isinstance(error.get("status"), str)
    )


def _is_ollama(body: Any) -> bool:
    return isinstance(body, dict) and isinstance(body.get("error"), str)


def _code(data: bytes) -> str | None:
    try:
        error = json.loads(data)["error"]
        if isinstance(error, str):
            return "shutting_down" if error.startswith(ALLOWED_MESSAGES) else None
        code: str | None = error.get("status") or error.get("code") or error["type"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return code


def _json_problem(answer: Answer) -> str | None:
    try:
        value = json.loads(answer.body)
    except ValueError as error:
        return f"status {answer.status}, not JSON ({error}): {answer.body[:200]!r}"
    items = value if isinstance(value, list) else []  # Gemini's streams are arrays
    if any(isinstance(each, dict) and _is_fault(each) for each in items):
        return None if GREW in answer.body else f"an error in a stream: {answer.body[-300:]!r}"
    return None


def _stream_problem(answer: Answer) -> str | None:
    for line in answer.body.split(b"\n"):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        try:
            frame = json.loads(line.removeprefix(b"data: "))
        except ValueError as error:
            return f"an event is not JSON ({error}): {line[:200]!r}"
        if isinstance(frame, dict) and _is_fault(frame) and GREW not in line:
            return f"an error in a stream: {line[:300]!r}"
    return None


def _lines_problem(answer: Answer) -> str | None:
    """Check a stream as clients read it: each line is an object, and the last one ends it."""
    frame: Any = {}
    for line in answer.body.splitlines():
        try:
            frame = json.loads(line)
        except ValueError as error:
            return f"a line is not JSON ({error}): {line[:200]!r}"
    if "error" in frame and GREW not in line:  # refusals come before a stream begins
        return f"an error in a stream: {line[:300]!r}"
    return None if frame.get("done") is True or GREW in line else "a stream without an end"


def _is_fault(frame: dict[str, Any]) -> bool:
    error = frame.get("error") or (frame.get("response") or {}).get("error")
    if not isinstance(error, dict):
        return False
    names = {error.get("code"), error.get("type"), error.get("status")}
    return bool(names & {*FAULTS, "server_error"})
