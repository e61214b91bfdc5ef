"""What every answer must be: no 5xx, errors in the dialect of the API, whole JSON and streams."""

import json
from typing import Any
from urllib.parse import unquote

from tests.campaigns.fuzz.case import Kind, WireCase
from tests.campaigns.fuzz.client import Answer

ANTHROPIC_ROOT = "/v1/messages"
# 501: the model cannot do it. 503: the limit on connections, or a model that is being unloaded.
# 529: Anthropic's 429.
ALLOWED = {
    (501, "not_supported"),
    (503, "too_many_connections"),
    (503, "shutting_down"),
    (529, "overloaded_error"),
}
FAULTS = ("internal_error", "engine_error", "engine_failed", "api_error")
SSE, JSON = "text/event-stream", "application/json"


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
    return _stream_problem(answer) if answer.media_type == SSE else None


def ids_in(answer: Answer) -> tuple[list[str], list[str]]:
    """Return ids of responses and keys of prefixes that an answer tells."""
    if answer.status != 200 or answer.media_type != JSON or not 0 < len(answer.body) < 200_000:
        return [], []
    value = json.loads(answer.body)
    if not isinstance(value, dict):
        return [], []
    responses, keys = [], []
    if isinstance(id := value.get("id"), str) and id.startswith("resp_"):
        responses.append(id)
    for entry in value.get("entries") or value.get("data") or ():
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            keys.append(entry["key"])
    return responses, keys


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
    is_right = _is_anthropic(body) if _path_is_anthropic(case.path) else _is_openai(body)
    return None if is_right else f"status {answer.status} in another dialect: {answer.body[:200]!r}"


def _path_is_anthropic(path: str) -> bool:
    plain = unquote(path.partition("?")[0])
    return plain == ANTHROPIC_ROOT or plain.startswith(f"{ANTHROPIC_ROOT}/")


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


def _code(data: bytes) -> str | None:
    try:
        error = json.loads(data)["error"]
        code: str | None = error.get("code") or error["type"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return code


def _json_problem(answer: Answer) -> str | None:
    try:
        json.loads(answer.body)
    except ValueError as error:
        return f"status {answer.status}, not JSON ({error}): {answer.body[:200]!r}"
    return None


def _stream_problem(answer: Answer) -> str | None:
    for line in answer.body.split(b"\n"):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        try:
            frame = json.loads(line.removeprefix(b"data: "))
        except ValueError as error:
            return f"an event is not JSON ({error}): {line[:200]!r}"
        if isinstance(frame, dict) and _is_fault(frame):
            return f"an error in a stream: {line[:300]!r}"
    return None


def _is_fault(frame: dict[str, Any]) -> bool:
    error = frame.get("error") or (frame.get("response") or {}).get("error")
    if not isinstance(error, dict):
        return False
    return bool({error.get("code"), error.get("type")} & {*FAULTS, "server_error"})
