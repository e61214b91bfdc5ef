"""`generation.Engine` over an engine process that may die: its requests then continue in the next.

All of it runs on the event loop, except `check_grammar`, which other threads call, and `close`,
which blocks them.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TypeVar, cast

from rekindle.errors import (
    EngineError,
    EngineFailed,
    PromptTooLong,
    RekindleError,
    RequestCrashed,
    ShuttingDown,
)
from rekindle.generation.events import Embedded, Finished, StopCause, TokenEvent, TokenSampled
from rekindle.generation.forgetting import Scope, Tombstone, Tombstones
from rekindle.generation.questions import AnyQuestion, Forget, ForgetKey, Quarantine, Question
from rekindle.generation.request import (
    EmbeddingRequest,
    GenerationRequest,
    Grammar,
)
from rekindle.generation.request_queue import RequestQueue, RequestStream
from rekindle.generation.status import DeathCause, EngineStatus, ProcessState
from rekindle.link.encoding import decode_answer, error_of
from rekindle.link.messages import (
    Answer,
    AskPrefixes,
    Begin,
    CancelRequest,
    Embed,
    Event,
    FailRequests,
    Failure,
    Load,
    LoadedModel,
    Logged,
    NoAnswer,
    Report,
    SetMemoryBudget,
    Started,
    StatusReport,
    Step,
    Submit,
    Token,
)
from rekindle.supervisor.journal import Journal, Unfinished, as_journaled
from rekindle.supervisor.lives import EngineLives
from rekindle.supervisor.poison import PoisonedPrompts
from rekindle.supervisor.process import Death, EngineProcess, write_log
from rekindle.supervisor.questions import OpenQuestions
from rekindle.supervisor.status import LastStatus

T = TypeVar("T")
_ENDINGS = (Finished, Embedded, RekindleError)
_log = logging.getLogger("rekindle.engine")


class SupervisedEngine:
    finishes_calls = True

    def __init__(
        self,
        process: EngineProcess,
        model: LoadedModel,
        load: Load,
        begin: Begin,
        *,
        start_process: Callable[[], EngineProcess],
        check_files: Callable[[], None],
        queue_size: int,
        hang_seconds: float,
    ) -> None:
        self._model = model
        self._lives = EngineLives(
            process,
            load,
            begin,
            self,
            start_process=start_process,
            check_files=check_files,
            hang_seconds=hang_seconds,
        )
        self._questions = OpenQuestions(self._lives)
        self._numbers = itertools.count(1)
        self._journal = Journal()
        self._poisoned = PoisonedPrompts()
        self._tombstones = Tombstones()
        self.row_bytes = 0  # of one position in the context; 0: not known yet
        self._last_status = LastStatus(model, queue_size)
        self._replies: RequestQueue[TokenEvent] = RequestQueue(
            max_waiting=queue_size, on_cancel=self._cancel
        )
        self._embeddings: RequestQueue[Embedded] = RequestQueue(
            max_waiting=queue_size, on_cancel=self._cancel
        )
        self._is_cut = False  # requests are not continued any more
        self._event_loop: asyncio.AbstractEventLoop | None = None

    # -- requests --

    def submit(self, request: GenerationRequest) -> RequestStream[TokenEvent]:
        if len(request.prompt) >= self._model.n_ctx:
            raise PromptTooLong(n_prompt=len(request.prompt), n_ctx=self._model.n_ctx)
        self._check_alive()
        is_suspect = self._poisoned.check(request)
        stream = self._replies.open(
            request.id, n_slots=self._model.n_slots, background=request.background
        )
        if self._tombstones.cover(request.terms.owner):
            request = replace(request, cache_prompt=False)
        unfinished = self._journal.add(as_journaled(request, self._model.n_ctx))
        if is_suspect:
            unfinished.suspect()
        self._send_wanted()
        unfinished.was_delayed = not unfinished.is_sent
        return stream

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        self._check_alive()
        # One embedding request is computed at a time.
        stream = self._embeddings.open(request.id, n_slots=1, background=False)
        self._journal.add(request)
        self._send_wanted()
        async with aclosing(aiter(stream)) as events:
            return await anext(events)

    async def ask(self, question: Question[T]) -> T:
        self._note_deletion(question)
        self._replies.check_open()
        self._check_alive()
        order = AskPrefixes(next(self._numbers), cast(AnyQuestion, question))
        return decode_answer(question, await self._questions.ask(order))

    def _note_deletion(self, question: Question[T]) -> None:
        """Keep requests that a deletion covers out of the cache, should they be sent again.

        Which requests a key covers, only the engine knows. Here it stands for its namespace.
        """
        match question:
            case Forget(tombstone=tombstone):
                pass
            case ForgetKey(namespace=namespace, at=at):
                tombstone = Tombstone(scope=Scope(namespace=namespace), at=at)
            case _:
                return
        self._tombstones.add(tombstone)
        self._journal.forget(tombstone)

    def check_grammar(self, grammar: Grammar) -> "Future[None]":
        """Let the engine process compile the grammar. Call it on any thread."""
        assert self._event_loop is not None
        return asyncio.run_coroutine_threadsafe(self._check_grammar(grammar), self._event_loop)

    async def _check_grammar(self, grammar: Grammar) -> None:
        self._check_alive()
        await self._questions.check(grammar, next(self._numbers))

    def _cancel(self, request_id: str) -> None:
        unfinished = self._journal.find(request_id)
        if unfinished is None:
            return
        self._journal.remove(unfinished)
        if unfinished.is_sent:
            self._lives.send(CancelRequest(unfinished.sent_id))
        self._send_wanted()

    def _check_alive(self) -> None:
        if self._lives.state is ProcessState.FAILED:
            raise self._failure()

    def _failure(self) -> EngineFailed:
        restarts = self._lives.restarts
        return EngineFailed(
            f"The engine cannot run at the moment: {restarts.last_death}. The server tries again.",
            retry_after_seconds=max(1, round(restarts.delay_seconds)),
        )

    # -- status --

    @property
    def is_idle(self) -> bool:
        return self._replies.is_idle and self._embeddings.is_idle

    def status(self) -> EngineStatus:
        """Return the last status that the engine reported. `refresh` asks for a new one."""
        return self._last_status.status(self._lives, n_unfinished=len(self._journal))

    async def refresh(self) -> None:
        """Ask the engine for its status, and wait a moment for it."""
        if self._lives.is_connected:
            await self._last_status.ask(self._lives, next(self._numbers))

    # -- life --

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._lives.start(on_end=self._end_all)

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
        self._is_cut = True
        self._questions.fail_all(ShuttingDown("The server is shutting down."))
        if self._lives.is_connected and all(each.is_sent for each in self._journal):
            self._lives.send(FailRequests("The server is shutting down."))
        else:
            self._end_requests()

    def close(self) -> None:
        """Let the process store the rows of every slot and end. Blocks."""
        self._refuse_requests()
        self._lives.close()

    def set_memory_budget(self, n_bytes: int) -> None:
        """Change the memory for stored prefixes. Any thread may call it."""
        self._lives.set_memory_budget(n_bytes)
        if self._event_loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._event_loop.call_soon_threadsafe(self._lives.send, SetMemoryBudget(n_bytes))

    def _refuse_requests(self) -> None:
        self._replies.close()
        self._embeddings.close()

    def _end_all(self) -> None:
        self._questions.fail_all(ShuttingDown("The model was unloaded."))
        self._end_requests()

    def _end_requests(self) -> None:
        self._replies.cut()
        self._embeddings.cut()

    # -- lives of the process --

    def on_connected(self) -> None:
        """Send everything that waits for an answer to the new process."""
        self._questions.ask_again()
        self._send_wanted()

    def _finish(self, unfinished: Unfinished) -> None:
        """End a request whose tokens have all arrived, or only store its prompt."""
        request = unfinished.request
        assert isinstance(request, GenerationRequest)
        if request.terms.persist:
            unfinished.request = replace(request, max_tokens=0)
            unfinished.reply.clear()
        else:
            self._deliver(unfinished, Finished(StopCause.LENGTH))

    def on_death(self, death: Death) -> None:
        """Count the death for what the engine was at.

        Deaths whose cause is found say nothing about the next process: they count as a success.
        """
        self._last_status.note_death()
        if self._questions.note_death(death.doing):
            self._lives.restarts.note_success()
        if self._is_cut:
            self._end_requests()
        numbers = {*death.doing.numbers, *death.doing.preparing}
        for unfinished in self._journal.note_death(numbers):
            _log.error(
                "engine: in the batch at a death request=%s deaths=%d",
                unfinished.request.id,
                unfinished.n_deaths,
            )
            if unfinished.is_fatal:
                self._give_up(unfinished, death)
                self._lives.restarts.note_success()

    def _give_up(self, unfinished: Unfinished, death: Death) -> None:
        """Fail a request that was in the batch at too many deaths."""
        request = unfinished.request
        if isinstance(request, GenerationRequest):
            self._poisoned.add(request)
            # A step that is too slow is not the fault of stored rows.
            if unfinished.may_be_restored and death.cause is not DeathCause.HANG:
                tokens = (*request.prompt, *unfinished.reply)
                question = Quarantine(tokens=tokens, namespace=request.terms.namespace)
                self._questions.ask_aside(AskPrefixes(next(self._numbers), question))
        self._deliver(
            unfinished,
            RequestCrashed(
                f"The engine process died {unfinished.n_deaths} times while it computed this"
                f" request; the last time, {death}. The request is not tried again."
            ),
        )

    def on_failed(self) -> None:
        error = self._failure()
        for unfinished in self._journal:
            self._deliver(unfinished, error)
        self._questions.fail_all(error)

    def _send_wanted(self) -> None:
        """Send the requests that the engine should have, and take back those it should not."""
        if not self._lives.is_connected:
            return
        for unfinished in self._journal:
            if not unfinished.is_sent and unfinished.has_whole_reply(self._model.n_ctx):
                self._finish(unfinished)
        wanted = self._journal.wanted()
        if len(wanted) < len(self._journal):
            for unfinished in self._journal:
                if unfinished.is_sent and unfinished not in wanted:
                    self._lives.send(CancelRequest(unfinished.sent_id))
                    unfinished.take_back()
        for unfinished in wanted:
            if not unfinished.is_sent:
                unfinished.is_sent = True
                self._journal.number(unfinished, next(self._numbers))
                request = unfinished.as_sent()
                try:
                    if isinstance(request, GenerationRequest):
                        self._lives.send(Submit(request.number, request))
                    else:
                        self._lives.send(Embed(request.number, request))
                except Exception as error:  # one request must not stop the others
                    _log.exception("engine: request=%s cannot be sent", unfinished.request.id)
                    self._deliver(unfinished, EngineError(f"The request cannot be sent: {error}"))

    # -- reports --

    def on_report(self, report: Report) -> None:
        match report:
            case Step(events):
                self._lives.note_success()
                for event in events:
                    self._on_event(event)
            case Answer() | NoAnswer():
                self._lives.note_success()
                self._questions.on_answer(report)
            case StatusReport():
                self._last_status.note(report)
            case Started(traits):
                self.row_bytes = traits.row_bytes
                self._lives.note_started()
            case Logged():
                write_log(report)

    def _on_event(self, event: Event) -> None:
        unfinished = self._journal.get(event.number)
        if unfinished is None:
            return  # cancelled a moment ago
        was_suspect = unfinished.is_suspect
        match event:
            case Token(_, token, logprobs, lands, drafted, state):  # by far the most frequent
                sampled = TokenSampled(token, logprobs, lands, drafted, state)
                unfinished.note(sampled)
                self._replies.deliver(unfinished.request.id, sampled)
            case Failure(_, error):
                self._deliver(unfinished, error_of(error))
            case _:
                self._deliver(unfinished, event.event)
        if was_suspect and not (unfinished.is_suspect and unfinished in self._journal):
            self._send_wanted()

    def _deliver(
        self, unfinished: Unfinished, event: TokenEvent | Embedded | RekindleError
    ) -> None:
        request_id = unfinished.request.id
        if isinstance(event, _ENDINGS):
            self._journal.remove(unfinished)
        if isinstance(event, Finished) and isinstance(unfinished.request, GenerationRequest):
            self._poisoned.forgive(unfinished.request)
        if not isinstance(event, RekindleError) and not unfinished.note(event):
            return  # the client has it from an earlier process
        if not isinstance(event, Embedded) and self._replies.deliver(request_id, event):
            return
        if isinstance(event, Embedded | RekindleError):
            self._embeddings.deliver(request_id, event)
