"""What a server says while it primes: the stream of any dialect, as progress and an account."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rekindle.errors import PrimeError


@dataclass(frozen=True, slots=True)
class PrimeProgress:
    n_done: int  # with what was cached
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Primed:
    n_cached: int
    n_computed: int

    @property
    def n_tokens(self) -> int:
        return self.n_cached + self.n_computed


def outcome_of(
    lines: Iterable[str], on_progress: Callable[[PrimeProgress], None] = lambda _: None
) -> Primed:
    """Raises PrimeError with what the server says, or where it says nothing to the end."""
    primed: Primed | None = None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        data = json.loads(line.removeprefix("data: "))
        if error := data.get("error"):
            raise PrimeError(str(error["message"]))
        if progress := data.get("prompt_progress"):
            on_progress(PrimeProgress(n_done=progress["processed"], n_tokens=progress["total"]))
        primed = account_in(data) or primed
    if primed is None:
        raise PrimeError("The stream ended before the prompt was computed.")
    return primed


def refusal_in(content: bytes, status: str) -> str:
    """What an answer that is no stream says, whichever dialect's shape it has."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return status


def account_in(data: dict[str, Any]) -> Primed | None:
    story = data.get("rekindle") or (data.get("response") or {}).get("rekindle")
    if not story:
        return None
    n_cached = sum(each["tokens"] for each in story["cached"])
    return Primed(n_cached=n_cached, n_computed=story["prefilled"])
