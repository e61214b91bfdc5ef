"""Send requests to one server by a schedule, and measure each."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from rekindle.errors import StartupError
from rekindle.generation.drafts import DraftCount
from rekindle.priming.files import Body
from rekindle.priming.stream import refusal_in
from rekindle.replay.shape import Schedule
from rekindle.replay.stream import NO_COUNTS, Counts, ReplyFailed, StreamReader
from rekindle.replay.traffic import ReplayRequest

CONNECT_SECONDS = 5.0
ANTHROPIC_VERSION = "2023-06-01"  # its API refuses requests without one
UNAUTHORIZED = (401, 403)
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
STREAMS_USAGE = ("/v1/chat/completions", "/v1/completions")  # only on request


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to the recorded requests."""

    max_tokens: int | None  # None: as recorded
    model: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    index: int  # of the request in the traffic
    start: float  # seconds since the run began
    seconds: float
    first_token_seconds: float | None = None
    counts: Counts = NO_COUNTS
    text: str | None = None  # None: the reply has more than text
    message: Body | None = None  # the reply of a chat completion
    drafted: DraftCount = field(default_factory=DraftCount)
    error: str | None = None


class Server:
    """A server at one URL. Requests have no time limit: a prompt may take minutes."""

    def __init__(self, url: str, api_key: str | None, changes: Changes) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}", "X-Api-Key": api_key} if api_key else {}
        try:
            self.http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(CONNECT_SECONDS, read=None, write=None, pool=None),
                # No reuse of connections: some servers close idle ones without notice.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise StartupError(f"{url!r} is not a URL: {error}.") from error
        self._changes = changes
        self._models: tuple[str, ...] = ()

    async def check(self) -> None:
        """Read the list of models. Raise StartupError if the server is down or refuses the key."""
        try:
            response = await self.http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StartupError(f"{self.url} cannot be reached: {_error_text(error)}.") from error
        if response.status_code in UNAUTHORIZED:
            raise StartupError(
                f"{self.url} denied access ({response.status_code}): pass its key in --api-key."
            )
        self._models = _model_names(response)

    def body_of(self, request: ReplayRequest) -> Body:
        body = {**request.body, "stream": True}
        if request.path in STREAMS_USAGE:
            body["stream_options"] = {"include_usage": True}
        if (model := self._model_for(request.body.get("model"))) is not None:
            body["model"] = model
        return body | self._limits(request)

    async def send(self, index: int, request: ReplayRequest, run_start: float) -> Outcome:
        start = time.monotonic()
        first: float | None = None
        reader = StreamReader()
        headers = dict(request.headers)
        if request.path == "/v1/messages":
            headers["anthropic-version"] = ANTHROPIC_VERSION
        try:
            async with self.http.stream(
                "POST", request.path, json=self.body_of(request), headers=headers
            ) as response:
                if response.is_error:
                    raise ReplyFailed(refusal_of(response, await response.aread()))
                async for line in response.aiter_lines():
                    reader.feed(line)
                    if first is None and reader.has_begun:
                        first = time.monotonic() - start
            if not reader.has_ended:
                raise ReplyFailed("The stream ended before the reply did.")
        except (ReplyFailed, httpx.HTTPError, httpx.InvalidURL) as error:
            seconds = time.monotonic() - start
            return Outcome(index, start - run_start, seconds, error=_error_text(error))
        seconds = time.monotonic() - start
        return Outcome(
            index,
            start - run_start,
            seconds,
            # An empty reply has no first token: its end counts.
            first_token_seconds=seconds if first is None else first,
            counts=reader.counts(),
            text=reader.text if reader.is_plain else None,
            message=reader.message(),
            drafted=reader.drafted(),
        )

    def _model_for(self, recorded: object) -> str | None:
        """Return the recorded name if the server has that model; else its first model."""
        if self._changes.model is not None:
            return self._changes.model
        return None if recorded in self._models else next(iter(self._models), None)

    def _limits(self, request: ReplayRequest) -> dict[str, Any]:
        cap = self._changes.max_tokens
        if cap is None:
            return {}
        usual = LIMITS[request.path]
        names = [
            name for name in ("max_completion_tokens", "n_predict", usual) if name in request.body
        ]
        recorded = {name: request.body[name] for name in names} or {usual: None}
        return {
            name: min(value, cap) if isinstance(value, int) and value >= 0 else cap
            for name, value in recorded.items()
        }


Send = Callable[[int], Awaitable[Outcome]]


async def run(
    schedule: Schedule,
    send: Send,
    *,
    on_start: Callable[[int], None],
    on_end: Callable[[Outcome], None],
) -> None:
    """Send requests until the schedule is done. A cancelled run drops the requests in flight."""
    running: set[asyncio.Task[Outcome]] = set()
    try:
        while True:
            for index in schedule.take_ready():
                on_start(index)
                running.add(asyncio.ensure_future(send(index)))
            if not running:
                return
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [task.result() for task in ended]
            for outcome in sorted(outcomes, key=lambda each: each.start + each.seconds):
                schedule.end(outcome.index)
                on_end(outcome)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def refusal_of(response: httpx.Response, content: bytes) -> str:
    """Return the status and the error message of a refused request."""
    status = f"{response.status_code} {response.reason_phrase}"
    if response.status_code in UNAUTHORIZED:
        return f"{status}: give its key with --api-key"
    message = refusal_in(content, status)
    return message if message == status else f"{status}: {message}"


def _error_text(error: Exception) -> str:
    """Return the error's text. Timeouts of httpx have none, so their class is named."""
    return (str(error) or type(error).__name__).rstrip(".")


def _model_names(response: httpx.Response) -> tuple[str, ...]:
    try:
        return tuple(str(each["id"]) for each in response.json()["data"])
    except (ValueError, LookupError, TypeError):
        return ()
