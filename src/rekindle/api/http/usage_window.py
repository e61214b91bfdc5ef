"""`usage` for clients that believe in a window that the model does not have.

Such a client compares `usage` with 128,000 or 200,000 tokens, and compacts its conversation much
too late. With its counts scaled by the same factor, it compacts at the right moment.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rekindle.errors import StartupError

MAX_WINDOW = 100_000_000
U = TypeVar("U")

# A total stays the sum of its parts, each of which is rounded.
TOTALS = {"total_tokens", "totalTokenCount"}
PARTS = {
    *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
    *("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount"),
}


@dataclass(frozen=True, slots=True)
class UsageWindow:
    client: str  # in lower case, a part of its User-Agent; empty: every client
    n_tokens: int


def usage_windows(settings: Iterable[str]) -> tuple[UsageWindow, ...]:
    """Read `TOKENS` or `CLIENT=TOKENS`. Raises StartupError."""
    windows = []
    for each in settings:
        client, _, tokens = each.rpartition("=")
        if not (tokens.isascii() and tokens.isdigit() and 0 < int(tokens) <= MAX_WINDOW):
            raise StartupError(
                f"usage_window: {each!r} should be TOKENS, or CLIENT=TOKENS with a part of the"
                f" client's User-Agent, and from 1 to {MAX_WINDOW:,} tokens."
            )
        windows.append(UsageWindow(client.strip().lower(), int(tokens)))
    return tuple(windows)


def usage_scale(windows: Iterable[UsageWindow], headers: Mapping[str, str], *, n_ctx: int) -> float:
    """Return the factor for the client's counts: by the first window that names it, or 1."""
    agent = headers.get("user-agent", "").lower()
    n_tokens = next((each.n_tokens for each in windows if each.client in agent), n_ctx)
    return n_tokens / n_ctx


def scaled(usage: U, scale: float) -> U:
    """Scale a count, or every count of a body, and round it up."""
    return usage if scale == 1 else cast(U, _scaled(usage, scale))


def _scaled(value: Any, scale: float) -> Any:
    match value:
        case dict():
            counts = {name: _scaled(each, scale) for name, each in value.items()}
            for total in TOTALS & counts.keys():
                counts[total] = sum(counts[part] for part in PARTS & counts.keys())
            return counts
        case int():
            return math.ceil(value * scale)
        case _:
            return value
