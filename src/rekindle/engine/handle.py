"""The engine as the event loop sees it: submit, cancel, and one event queue per request.

Its methods are for the event loop's thread; the engine runs in a thread of its own and
answers through `call_soon_threadsafe`, once per step.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.inquiries import (
    Forget,
    ListStored,
    LookUp,
    PinStored,
    Question,
    ReadTokens,
    ShowForest,
)
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import (
    Answered,
    Ask,
    Cancel,
    Delivery,
    Embed,
    FailAll,
    OpenCache,
    Stop,
    Submit,
)
from rekindle.errors import Overloaded, PromptTooLong, RekindleError, ShuttingDown
from rekindle.generation.events import Embedded, Finished, StopCause, TokenEvent
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar, GrammarKind
from rekindle.generation.status import EngineStatus, Forecast, StoredBranch, StoredPrefix

_log = logging.getLogger(__name__)

MAX_RETRY_SECONDS = 60
SETTLE_SECONDS = 1.0  # after the start, until grammars are made ready, if nobody streams; picked
ANY_GRAMMAR = Grammar(GrammarKind.REGEX, ".")


class _Stream:
    """A TokenStream. Its queue grows with what the engine says, which max_length bounds."""

    def __init__(self, request_id: str, handle: "EngineHandle", *, is_in_background: bool) -> None:
        self.request_id = request_id
        self.is_in_background = is_in_background
        self.events: asyncio.Queue[TokenEvent | RekindleError] = asyncio.Queue()
        self.started_at = time.monotonic()
        self._handle = handle

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            while True:
                event = await self.events.get()
                if isinstance(event, RekindleError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._handle.cancel(self)


class EngineHandle:
    def __init__(
        self,
        backend: Backend,
        open_cache: OpenCache,
        *,
        queue_size: int,
        embedder: Embedder | None = None,
    ) -> None:
        self._backend = backend
        self._queue_size = queue_size
        self._engine = EngineLoop(
            backend,
            self._deliver_from_engine,
            open_cache,
            queue_size=queue_size,
            embedder=embedder,
        )
        self._thread = threading.Thread(target=self._engine.run, name="engine", daemon=True)
        self._is_closing = threading.Event()
        self._preparing = threading.Thread(target=self._prepare, name="prepare", daemon=True)
        self._streams: dict[str, _Stream] = {}
        self._embeddings: dict[str, asyncio.Future[Embedded]] = {}
        self._questions: dict[str, asyncio.Future[Answered]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._mean_seconds = 1.0  # of a request, for Retry-After
        self._draining = False
        self._drained = asyncio.Event()

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()
        self._preparing.start()

    def _prepare(self) -> None:
        """The first grammar takes up to a second, in which nothing else runs: once all is quiet."""
        while not self._is_closing.wait(SETTLE_SECONDS):
            if not self._streams:
                break
        else:
            return
        try:
            self._backend.check_grammar(ANY_GRAMMAR)
        except Exception as error:  # whoever asks for one will be told
            _log.warning("grammars cannot be used with this model: %s", error)

    def submit(self, request: GenerationRequest) -> _Stream:
        if self._draining:
            raise ShuttingDown("The server is shutting down.")
        n_ctx = self._backend.n_ctx
        if len(request.prompt) >= n_ctx:
            raise PromptTooLong(n_prompt=len(request.prompt), n_ctx=n_ctx)
        n_ahead = len(self._foreground()) - self._backend.n_slots
        if n_ahead >= self._queue_size and not request.background:
            raise Overloaded(
                f"All {self._backend.n_slots} slots are busy and {n_ahead} requests wait.",
                retry_after_seconds=self._retry_after(n_ahead),
            )
        assert request.id not in self._streams
        stream = _Stream(request.id, self, is_in_background=request.background)
        self._streams[request.id] = stream
        self._engine.inbox.put(Submit(request))
        return stream

    def cancel(self, stream: _Stream) -> None:
        if stream.request_id in self._streams:
            self._forget(stream)
            self._engine.inbox.put(Cancel(stream.request_id))

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        if self._draining:
            raise ShuttingDown("The server is shutting down.")
        n_ahead = len(self._embeddings) - 1  # one is computed at a time
        if n_ahead >= self._queue_size:
            raise Overloaded(
                f"An embedding request runs and {n_ahead} wait.",
                retry_after_seconds=self._retry_after(n_ahead),
            )
        assert request.id not in self._embeddings
        outcome = asyncio.get_running_loop().create_future()
        self._embeddings[request.id] = outcome
        self._engine.inbox.put(Embed(request))
        try:
            embedded: Embedded = await outcome
            return embedded
        finally:
            if outcome.cancelled():
                self._engine.inbox.put(Cancel(request.id))
            del self._embeddings[request.id]
            self._notice_drained()

    async def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        forecast: Forecast = await self._ask(LookUp(tuple(tokens), namespace))
        return forecast

    async def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        stored: list[StoredPrefix] = await self._ask(ListStored(namespace, limit))
        return stored

    async def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        forest: list[StoredBranch] = await self._ask(ShowForest(namespace, limit))
        return forest

    async def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        tokens: tuple[int, ...] | None = await self._ask(ReadTokens(key, namespace))
        return tokens

    async def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        is_there: bool = await self._ask(PinStored(key, namespace, seconds))
        return is_there

    async def forget(self, key: str | None, *, namespace: str) -> int:
        n_gone: int = await self._ask(Forget(key, namespace))
        return n_gone

    async def _ask(self, question: Question) -> Any:
        """What it is depends on the question; see `Inquiries.answer`."""
        if self._draining:
            raise ShuttingDown("The server is shutting down.")
        question_id = f"question.{secrets.token_hex(6)}"
        outcome = asyncio.get_running_loop().create_future()
        self._questions[question_id] = outcome
        self._engine.inbox.put(Ask(question_id, question))
        try:
            answered: Answered = await outcome
            return answered.answer
        finally:
            del self._questions[question_id]

    def check_grammar(self, grammar: Grammar) -> None:
        self._backend.check_grammar(grammar)

    def status(self) -> EngineStatus:
        return self._engine.status()

    async def shut_down(self, grace_seconds: float) -> None:
        """Takes no more, lets streams end for a while, then cuts them."""
        self._draining = True
        for stream in list(self._streams.values()):
            if stream.is_in_background:
                stream.events.put_nowait(Finished(StopCause.YIELDED))
                self.cancel(stream)
        if self._streams or self._embeddings:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_seconds)
        self.cut()

    def cut(self) -> None:
        """Ends every request at once, with an error that says why."""
        self._draining = True
        self._engine.inbox.put(FailAll(ShuttingDown("The server is shutting down.")))

    def close(self) -> None:
        self._draining = True
        self._is_closing.set()
        self._engine.inbox.put(Stop())
        self._thread.join()
        self._preparing.join()

    def _deliver_from_engine(self, deliveries: list[Delivery]) -> None:
        assert self._event_loop is not None
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(self._deliver, deliveries)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for request_id, event in deliveries:
            # What was cancelled a moment ago is gone from here, not yet from there.
            if (embedding := self._embeddings.get(request_id)) is not None:
                _settle(embedding, event, Embedded)
            if (question := self._questions.get(request_id)) is not None:
                _settle(question, event, Answered)
            if isinstance(event, Embedded | Answered):
                continue
            if (stream := self._streams.get(request_id)) is None:
                continue
            stream.events.put_nowait(event)
            if isinstance(event, Finished | RekindleError):
                self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        if not stream.is_in_background:
            self._mean_seconds += 0.1 * (time.monotonic() - stream.started_at - self._mean_seconds)
        self._notice_drained()

    def _notice_drained(self) -> None:
        if self._draining and not self._streams and not self._embeddings:
            self._drained.set()

    def _foreground(self) -> list[_Stream]:
        return [stream for stream in self._streams.values() if not stream.is_in_background]

    def _retry_after(self, n_ahead: int) -> int:
        rounds = 1 + n_ahead / self._backend.n_slots
        return min(MAX_RETRY_SECONDS, max(1, round(self._mean_seconds * rounds)))


T = TypeVar("T", Embedded, Answered)


def _settle(outcome: asyncio.Future[T], event: object, kind: type[T]) -> None:
    if outcome.done():
        return
    if isinstance(event, kind):
        outcome.set_result(event)
    elif isinstance(event, RekindleError):
        outcome.set_exception(event)
