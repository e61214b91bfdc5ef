"""The client of `rekindle chat`: messages in, a stream of events out.

Speaks /v1/chat/completions, and does not touch the terminal.
"""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from rekindle.cli.remote import Remote, refusal_of
from rekindle.errors import StartupError
from rekindle.priming.stream import PrefillUpdate, events_in, progress_in


@dataclass(frozen=True, slots=True)
class ChatLine:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ReplyTimings:
    n_cached: int
    n_prefilled: int
    prefill_seconds: float
    n_predicted: int
    predicted_per_second: float


@dataclass(frozen=True, slots=True)
class Failed:
    message: str


ChatEvent = PrefillUpdate | ReasoningPiece | TextPiece | ReplyTimings | Failed


def answers(url: str) -> bool:
    """Return True if a server is at `url`, ready or still loading its model."""
    try:
        httpx.get(f"{url}/health", timeout=1.0, trust_env=False)
    except httpx.ReadTimeout:
        return True  # a server listens before its model is loaded, and answers after
    except httpx.HTTPError:
        return False
    return True


class ChatClient:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.model = first_model(Remote(http))

    def reply(self, messages: list[ChatLine]) -> Generator[ChatEvent]:
        """Yield the events of one reply. Ends after `Failed`; closing it cancels the request."""
        body = {
            "model": self.model,
            "messages": [{"role": each.role, "content": each.content} for each in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    yield Failed(refusal_of(response))
                    return
                for chunk in events_in(response.iter_lines()):
                    yield from _events(chunk)
        except httpx.HTTPError as error:
            yield Failed(f"The connection was lost: {error}.")


def first_model(remote: Remote) -> str:
    """Return the id of the first model that the server lists. Raises StartupError."""
    try:
        return str(json.loads(remote.get_text("/v1/models"))["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(
            f"{remote.url} does not answer like an OpenAI server with a model."
        ) from error


def _events(chunk: dict[str, Any]) -> Iterator[ChatEvent]:
    if error := chunk.get("error"):
        yield Failed(error["message"])
        return
    if progress := progress_in(chunk):
        yield progress
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        # Servers other than ours, given with --url, call it `reasoning`.
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningPiece(reasoning)
        if text := delta.get("content"):
            yield TextPiece(text)
    if timings := chunk.get("timings"):
        yield ReplyTimings(
            n_cached=timings["cache_n"],
            n_prefilled=timings["prompt_n"],
            prefill_seconds=timings["prompt_ms"] / 1000,
            n_predicted=timings["predicted_n"],
            predicted_per_second=timings["predicted_per_second"],
        )
