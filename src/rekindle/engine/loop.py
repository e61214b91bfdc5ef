"""The hot loop: one thread owns the backend, every Sequence and the PrefixCache.

Nothing here knows text, JSON or asyncio. Requests arrive and token events leave
through `handle.py`. The parts of a step have files of their own; this one puts them in order.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.embedding_queue import EmbeddingQueue
from rekindle.engine.export.persist_queue import PersistQueue
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.inquiries import Inquiries, Question
from rekindle.engine.orders import (
    Answered,
    Ask,
    Cancel,
    Delivery,
    Embed,
    FailAll,
    OpenCache,
    Order,
    Stop,
    Submit,
    Wake,
)
from rekindle.engine.outbox import Outbox
from rekindle.engine.reports import Reports, slot_status
from rekindle.engine.reuse.warm_start import WarmStart
from rekindle.engine.scheduler.admission import Admission
from rekindle.engine.scheduler.batch_planner import BatchItem
from rekindle.engine.scheduler.batch_runner import BatchRunner
from rekindle.engine.scheduler.roster import Roster
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import Slots
from rekindle.errors import EngineError, RekindleError, ShuttingDown
from rekindle.generation.events import Finished, StopCause, TokenSampled
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import GenerationRequest
from rekindle.generation.status import EngineStatus

_log = logging.getLogger(__name__)

# Looking up a member of an Enum takes longer than all else that is done with it per token.
_DECODING, _PREFILLING = Phase.DECODING, Phase.PREFILLING

STALL_CHECK_SECONDS = 1.0  # a restore that waits is looked after this often, besides every wake
CLOSE_SECONDS = 10.0  # for writes to reach the disk at the end; picked


class EngineLoop:
    """`deliver` gets everything one step has to say, in one call, on the engine thread."""

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[list[Delivery]], None],
        open_cache: OpenCache,
        *,
        queue_size: int,
        embedder: Embedder | None = None,
    ) -> None:
        self.inbox: SimpleQueue[Order] = SimpleQueue()
        self._backend = backend
        self._open_cache = open_cache
        self._queue_size = queue_size
        self._slots = Slots(backend.n_slots, backend.n_cells)
        self._embeddings = EmbeddingQueue(embedder)
        self._persisting = PersistQueue()
        self._outbox = Outbox(deliver)
        self._roster = Roster(backend, self._slots, self._persisting, self._outbox)
        self._is_stalled = False  # the last step could do nothing
        self._has_news = False  # the cache has more to take in
        self._use_cache(PrefixCache.switched_off("The engine is starting."))

    def run(self) -> None:
        self._guarded(self.start)
        while self.receive():
            self._guarded(self.step)
            self.flush()  # what a step did last, or left when it failed
        self._guarded(self.stop)
        self.flush()
        self._embeddings.close()
        self._backend.close()

    def start(self) -> None:
        self._backend.warm_up()
        self._slots.rows_take_cells = self._backend.traits.model_class is not ModelClass.RECURRENT
        self._use_cache(self._open_cache(self._backend.traits, lambda: self.inbox.put(Wake())))
        self._cache.start()
        if self._cache.is_on:
            self._backend.expect_exports(BLOCK_TOKENS)

    def _use_cache(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._saver = SlotSaver(self._backend, self._slots, cache)
        self._warm_start = WarmStart(self._backend, self._slots, cache, self._saver)
        self._inquiries = Inquiries(cache, self._slots, self._saver, self._warm_start)
        self._reports = Reports(cache, self._outbox)
        self._admission = Admission(self._backend, self._roster, self._warm_start, self._reports)
        self._batches = BatchRunner(self._backend, self._slots, self._roster, cache, self._saver)

    def stop(self) -> None:
        self._fail_all(ShuttingDown("The engine has stopped."))
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            for slot in self._slots.all:
                while not self._saver.save_all(slot, Reason.SHUTDOWN, others_decode=False):
                    if not self._cache.wait(_seconds_until(deadline)):
                        break  # memory has no room, and the disk makes none
        finally:
            self._cache.close(_seconds_until(deadline))

    def _guarded(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong ends requests, never the thread: nobody could restart it."""
        try:
            action()
        except Exception as error:
            _log.exception("the engine failed; every request ends")
            self._start_afresh(EngineError(f"The engine failed: {error}"))

    def _start_afresh(self, error: EngineError) -> None:
        """In the middle of anything: everyone is told, and nothing that was in hand is trusted."""
        sequences = self._roster.abandon(error)
        self._fail_beside(error)
        try:
            for sequence in sequences:
                if sequence.restore is not None:
                    sequence.restore.give_up()
                if sequence.sampler is not None:
                    sequence.sampler.close()
            self._backend.clear_all()
        except Exception:
            _log.exception("the engine could not be cleaned up")
        for slot in self._slots.all:
            self._slots.forget(slot)

    def step(self) -> None:
        self._has_news = self._cache.poll()
        n_decoding = sum(sequence.phase is _DECODING for sequence in self._roster.running)
        did_something = self._admission.admit_waiting(n_decoding)
        did_something |= self._admission.advance_restores(n_decoding)
        if plan := self._batches.plan():
            did_something = True
            if self._batches.decode(plan):
                self._settle(plan)
        self.flush()  # nobody's token waits for an export
        phases = {sequence.phase for sequence in self._roster.running}
        did_something |= self._saver.save_some(
            others_decode=_DECODING in phases,
            others_compute=_DECODING in phases or _PREFILLING in phases,
        )
        self._outbox.put_all(self._persisting.advance(self._cache))
        if self._embeddings.is_busy:  # one part in a step, however many streams run beside it
            did_something = True
            self._outbox.put_all(self._embeddings.advance())
        self._embeddings.rest_when_idle(time.monotonic())
        self._is_stalled = not did_something

    def status(self) -> EngineStatus:
        """A glance from another thread: the numbers may be one step apart."""
        running, waiting = list(self._roster.running), list(self._roster.waiting)
        return EngineStatus(
            n_slots=self._backend.n_slots,
            n_running=len(running) - _n_background(running),
            n_waiting=len(waiting) - _n_background(waiting),
            max_waiting=self._queue_size,
            n_ctx=self._backend.n_ctx,
            n_cells=self._backend.n_cells,
            n_cells_used=self._slots.n_cells_used,
            cache=self._cache.status(),
            n_background=_n_background(running + waiting),
            embedder=self._embeddings.status(),
            slots=tuple(slot_status(slot) for slot in self._slots.all),
        )

    def receive(self) -> bool:
        """Takes all orders there are; blocks only when there is nothing to do."""
        timeout = self._embeddings.seconds_to_rest(time.monotonic())
        if self._has_news or self._embeddings.is_busy:
            timeout = 0.0
        elif not self._roster.is_empty or self._persisting.is_busy:
            timeout = self._roster.seconds_to_wait(STALL_CHECK_SECONDS) if self._is_stalled else 0.0
        while True:
            try:
                order = self.inbox.get(block=timeout != 0.0, timeout=timeout)
            except Empty:
                return True
            if isinstance(order, Stop):
                return False
            self._guarded(partial(self._obey, order))
            timeout = 0.0

    def _obey(self, order: Submit | Embed | Ask | Cancel | FailAll | Wake) -> None:
        match order:
            case Submit(request):
                self._accept(request)
            case Embed(embedding):
                self._roster.yield_background()
                self._embeddings.accept(embedding)
            case Ask(question_id, question):
                self._answer(question_id, question)
            case Cancel(request_id):
                self._cancel(request_id)
            case FailAll(error):
                self._fail_all(error)
            case Wake():
                pass  # the next step polls

    def _answer(self, question_id: str, question: Question) -> None:
        try:
            answer: Answered | EngineError = Answered(self._inquiries.answer(question))
        except Exception as error:  # whoever asks waits for a word
            _log.exception("a question could not be answered")
            answer = EngineError(f"The engine has no answer: {error}")
        self._outbox.put(question_id, answer)

    def _accept(self, request: GenerationRequest) -> None:
        if not request.background:
            self._roster.yield_background()
        elif self._embeddings.is_busy or self._roster.has_foreground:
            self._outbox.put(request.id, Finished(StopCause.YIELDED))
            return
        max_length = self._backend.n_ctx
        if request.max_tokens is not None:
            max_length = min(max_length, len(request.prompt) + request.max_tokens)
        tokens = list(request.prompt)
        sequence = Sequence(
            request=request,
            arrived_at=time.monotonic(),
            max_length=max_length,
            tokens=tokens,
            keys=self._cache.keys(tokens, request.terms.namespace),
        )
        self._roster.enlist(sequence)
        self._warm_start.ask_others(sequence)

    def _cancel(self, request_id: str) -> None:
        self._embeddings.cancel(request_id)
        self._persisting.cancel(request_id)
        self._roster.cancel(request_id)

    def _fail_beside(self, error: RekindleError) -> None:
        """What neither runs nor waits for a slot."""
        self._outbox.put_all(self._embeddings.fail_all(error))
        self._outbox.put_all((request_id, error) for request_id in self._persisting.drain())

    def _fail_all(self, error: RekindleError) -> None:
        self._fail_beside(error)
        self._roster.fail_all(error)

    def _settle(self, plan: list[BatchItem]) -> None:
        """What the batch computed becomes part of its sequences; complete ones get a token."""
        complete: list[Sequence] = []
        for sequence, n_tokens in plan:
            sequence.n_computed += n_tokens
            if sequence.phase is _PREFILLING:
                self._cache.counters.prefilled_tokens += n_tokens
                if sequence.stops and sequence.stops[-1] == sequence.n_computed:
                    sequence.stops.pop()
                    self._saver.take_checkpoint(sequence)
                if not sequence.has_replied:
                    self._reports.prefilled(sequence)
            if sequence.n_computed < len(sequence.tokens):
                continue
            if sequence.is_sampled:
                complete.append(sequence)
            else:
                self._roster.finish(sequence, StopCause.LENGTH)
        if not complete:
            return
        samplers = [sequence.sampler for sequence in complete]
        results = self._backend.sample(samplers, range(len(complete)))
        for sequence, result in zip(complete, results, strict=True):
            if isinstance(result, TokenSampled):
                self._append(sequence, result)
            elif isinstance(result, RekindleError):
                self._roster.fail(sequence, result)
            else:
                self._roster.fail(sequence, EngineError(f"Sampling failed: {result}"))

    def _append(self, sequence: Sequence, sampled: TokenSampled) -> None:
        sequence.phase = _DECODING
        token = sampled.token
        if token in self._backend.eog_tokens:
            self._roster.finish(sequence, StopCause.END_OF_TURN, token)
            return
        sequence.tokens.append(token)
        self._outbox.put(sequence.request.id, sampled)
        if len(sequence.tokens) >= sequence.max_length:
            self._roster.finish(sequence, StopCause.LENGTH)

    def flush(self) -> None:
        self._outbox.flush()


def _n_background(sequences: list[Sequence]) -> int:
    return sum(sequence.request.background for sequence in sequences)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
