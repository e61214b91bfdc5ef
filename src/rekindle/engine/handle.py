"""The engine as the event loop sees it: requests, embeddings and questions.

The methods run on the event loop's thread. The engine runs on a thread of its own and delivers
events through `call_soon_threadsafe`, once per step.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Ask, Cancel, Delivery, FailAll, OpenCache, Stop
from rekindle.errors import PromptTooLong, RekindleError, ShuttingDown
from rekindle.generation.engine import PrefixStore
from rekindle.generation.events import Embedded, Finished, StopCause, TokenEvent
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar, GrammarKind
from rekindle.generation.request_queue import RequestQueue, RequestStream
from rekindle.generation.status import EngineStatus

T = TypeVar("T")
_log = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0  # delay after the start before grammars are prepared; picked
ANY_GRAMMAR = Grammar(GrammarKind.REGEX, ".")


class EngineHandle:
    def __init__(
        self,
        backend: Backend,
        open_cache: OpenCache,
        *,
        queue_size: int,
        embedder: Embedder,
    ) -> None:
        self._backend = backend
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
        self._replies: RequestQueue[TokenEvent] = RequestQueue(
            max_waiting=queue_size, on_cancel=self._cancel
        )
        self._embeddings: RequestQueue[Embedded] = RequestQueue(
            max_waiting=queue_size, on_cancel=self._cancel
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()
        self._preparing.start()

    def _prepare(self) -> None:
        """Compile a first grammar while no reply runs: it blocks the process for up to a second."""
        while not self._is_closing.wait(SETTLE_SECONDS):
            if self._replies:
                continue
            try:
                self._backend.check_grammar(ANY_GRAMMAR)
            except Exception as error:  # a request with a grammar will get the error
                _log.warning("engine: grammars do not work with this model: %s", error)
            return

    def submit(self, request: GenerationRequest) -> RequestStream[TokenEvent]:
        n_ctx = self._backend.n_ctx
        if len(request.prompt) >= n_ctx:
            raise PromptTooLong(n_prompt=len(request.prompt), n_ctx=n_ctx)
        stream = self._replies.open(
            request.id, n_slots=self._backend.n_slots, background=request.background
        )
        self._engine.inbox.put(request)
        return stream

    def _cancel(self, request_id: str) -> None:
        self._engine.inbox.put(Cancel(request_id))

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        # One embedding request is computed at a time.
        stream = self._embeddings.open(request.id, n_slots=1, background=False)
        self._engine.inbox.put(request)
        async with aclosing(aiter(stream)) as events:
            return await anext(events)

    async def ask(self, question: Callable[[PrefixStore], T]) -> T:
        self._replies.check_open()
        order = Ask(question)
        self._engine.inbox.put(order)
        return await asyncio.wrap_future(order.outcome)

    def check_grammar(self, grammar: Grammar) -> None:
        self._backend.check_grammar(grammar)

    def status(self) -> EngineStatus:
        return self._engine.status()

    async def shut_down(self, grace_seconds: float) -> None:
        self._refuse_requests()
        self._replies.end_background(Finished(StopCause.YIELDED))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._replies.drained()
                await self._embeddings.drained()
        self.cut()

    def cut(self) -> None:
        """End every request with ShuttingDown.

        The engine ends them, so a client has received every token whose rows are stored.
        """
        self._refuse_requests()
        self._engine.inbox.put(FailAll(ShuttingDown("The server is shutting down.")))

    def close(self) -> None:
        """Store the rows of every slot and end the engine thread. Blocks."""
        self._refuse_requests()
        self._is_closing.set()
        self._engine.inbox.put(Stop())
        self._thread.join()
        self._preparing.join()

    def _refuse_requests(self) -> None:
        self._replies.close()
        self._embeddings.close()

    def _deliver_from_engine(self, deliveries: list[Delivery]) -> None:
        assert self._event_loop is not None
        with suppress(RuntimeError):  # the event loop is closed: there are no readers left
            self._event_loop.call_soon_threadsafe(self._deliver, deliveries)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for request_id, event in deliveries:
            if not isinstance(event, Embedded) and self._replies.deliver(request_id, event):
                continue
            if isinstance(event, Embedded | RekindleError):
                self._embeddings.deliver(request_id, event)
