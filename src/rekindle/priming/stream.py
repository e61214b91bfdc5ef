"""The stream of a priming request, in any wire format: its progress and its result."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rekindle.errors import PrimeError


@dataclass(frozen=True, slots=True)
class PrefillUpdate:
    n_done: int  # with cached tokens
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Primed:
    n_cached: int
    n_computed: int

    @property
    def n_tokens(self) -> int:
        return self.n_cached + self.n_computed


def outcome_of(
    lines: Iterable[str], on_progress: Callable[[PrefillUpdate], None] = lambda _: None
) -> Primed:
    """Return the result. Raises PrimeError with the server's error, or if the stream breaks off."""
    primed: Primed | None = None
    for data in events_in(lines):
        if error := data.get("error"):
            raise PrimeError(str(error["message"]))
        if progress := progress_in(data):
            on_progress(progress)
        primed = account_in(data) or primed
    if primed is None:
        raise PrimeError("The stream ended before the prompt was computed.")
    return primed


def events_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent stream."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def progress_in(data: dict[str, Any]) -> PrefillUpdate | None:
    progress = data.get("prompt_progress")
    return PrefillUpdate(progress["processed"], progress["total"]) if progress else None


def refusal_in(content: bytes, status: str) -> str:
    """Return the message of an error reply in any wire format; `status` if there is none."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return status


def account_in(data: dict[str, Any]) -> Primed | None:
    account = data.get("rekindle") or (data.get("response") or {}).get("rekindle")
    if not account:
        return None
    n_cached = sum(each["tokens"] for each in account["cached"])
    return Primed(n_cached=n_cached, n_computed=account["prefilled"])
