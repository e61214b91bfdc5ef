"""The client half of `rekindle chat`: messages in, a stream of what happens to them out.

Speaks /v1/chat/completions and knows nothing of the terminal.
"""

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from rekindle.errors import StartupError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prefilling:
    n_done: int  # with what was cached
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
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


ReplyEvent = Prefilling | ReasoningDelta | TextDelta | ReplyTimings | Failed


def answers(url: str) -> bool:
    """Whether a server is at `url`, ready or still loading its model."""
    try:
        httpx.get(f"{url}/health", timeout=1.0, trust_env=False)
    except httpx.ReadTimeout:
        return True  # it listens before its model is loaded, and answers after
    except httpx.HTTPError:
        return False
    return True


class ChatClient:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self.model = self._first_model()

    def reply(self, messages: list[ChatMessage]) -> Generator[ReplyEvent]:
        """Ends after `Failed`; closing it early cancels the request."""
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
                    response.read()
                    yield Failed(_refusal(response))
                    return
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield from _events(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            yield Failed(f"The connection broke off: {error}.")

    def _first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StartupError(f"{self._http.base_url} cannot be reached: {error}.") from error
        if response.is_error:
            raise StartupError(f"{self._http.base_url} refused: {_refusal(response)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(
                f"{self._http.base_url} does not answer like an OpenAI server with a model."
            ) from error


def _events(chunk: dict[str, Any]) -> Iterator[ReplyEvent]:
    if error := chunk.get("error"):
        yield Failed(error["message"])
        return
    if progress := chunk.get("prompt_progress"):
        yield Prefilling(n_done=progress["processed"], n_tokens=progress["total"])
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        # Other servers, which `--url` may name, call it `reasoning`.
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningDelta(reasoning)
        if text := delta.get("content"):
            yield TextDelta(text)
    if timings := chunk.get("timings"):
        yield ReplyTimings(
            n_cached=timings["cache_n"],
            n_prefilled=timings["prompt_n"],
            prefill_seconds=timings["prompt_ms"] / 1000,
            n_predicted=timings["predicted_n"],
            predicted_per_second=timings["predicted_per_second"],
        )


def _refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
