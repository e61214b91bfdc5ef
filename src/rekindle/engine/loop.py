"""The engine loop: one thread owns the backend, every Sequence and the PrefixCache.

The loop knows nothing of text, JSON or asyncio. Requests arrive and token events leave through
`handle.py`. Each part of a step has a file of its own; this file puts them in order.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.embedding_queue import EmbeddingQueue
from rekindle.engine.export.persist_queue import PersistQueue
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.orders import (
    Ask,
    Cancel,
    Delivery,
    FailAll,
    OpenCache,
    Order,
    Outbox,
    Stop,
    Wake,
)
from rekindle.engine.questions import EnginePrefixes
from rekindle.engine.reports import Reports, slot_status
from rekindle.engine.reuse.placement import Placement
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.engine.reuse.restorer import Restorer
from rekindle.engine.scheduler.admission import Admission
from rekindle.engine.scheduler.batch_planner import BatchItem
from rekindle.engine.scheduler.batch_runner import BatchRunner
from rekindle.engine.scheduler.compaction import Compaction
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import DECODING, PREFILLING, Sequence, new_sequence
from rekindle.engine.slots import Slots
from rekindle.errors import EngineError, RekindleError, ShuttingDown
from rekindle.generation.events import Finished, StopCause, TokenSampled
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import EmbeddingRequest, GenerationRequest
from rekindle.generation.status import EngineStatus

T = TypeVar("T")

_log = logging.getLogger(__name__)

STALL_CHECK_SECONDS = 1.0  # between two steps while every sequence waits, unless woken
CLOSE_SECONDS = 10.0  # for the last writes to the disk; picked


class EngineLoop:
    """`deliver` gets the events of one step in one call, on the engine thread."""

    def __init__(
        self,
        backend: Backend,
        deliver: Callable[[list[Delivery]], None],
        open_cache: OpenCache,
        *,
        queue_size: int,
        embedder: Embedder,
    ) -> None:
        self.inbox: SimpleQueue[Order] = SimpleQueue()
        self._backend = backend
        self._open_cache = open_cache
        self._queue_size = queue_size
        self._slots = Slots(backend.n_slots, backend.n_cells)
        self.outbox = Outbox(deliver)
        self._embeddings = EmbeddingQueue(embedder, self.outbox)
        self._persisting = PersistQueue(self.outbox)
        self._run_queue = RunQueue(backend, self._slots, self._persisting, self.outbox)
        self._is_stalled = False  # the last step made no progress
        self._has_more_events = False  # of finished transfers, for the next poll
        self._use_cache(PrefixCache.switched_off("The engine is starting."))

    def run(self) -> None:
        self._guarded(self.start)
        while self.receive():
            self._guarded(self.step)
            self.outbox.flush()  # events after the step's own flush, or of a failed step
        self._guarded(self.stop)
        self.outbox.flush()
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
        holders = (self._backend, self._slots, cache, self._saver)
        self._finder = PrefixFinder(*holders)
        self._prefixes = EnginePrefixes(cache, self._slots, self._saver, self._finder)
        self._reports = Reports(cache, self.outbox)
        restorer = Restorer(*holders)
        placement = Placement(*holders, restorer)
        self._admission = Admission(
            self._backend, self._run_queue, self._finder, placement, restorer, self._reports
        )
        compaction = Compaction(self._backend, self._slots)
        self._batches = BatchRunner(*holders, self._run_queue, compaction)

    def stop(self) -> None:
        self._fail_all(ShuttingDown("The engine has stopped."))
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            for slot in self._slots.all:
                while not self._saver.save_all(slot, Reason.SHUTDOWN, others_decode=False):
                    if not self._cache.wait(_seconds_until(deadline)):
                        break  # memory is full, and the disk does not keep up
        finally:
            self._cache.close(_seconds_until(deadline))

    def _fail_all(self, error: RekindleError) -> None:
        self._fail_without_slot(error)
        self._run_queue.fail_all(error)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Fail every request on an error, but never end the thread: it cannot be restarted."""
        try:
            action()
        except Exception as error:
            _log.exception("engine: loop failed, failing all requests")
            self._reset(EngineError(f"The engine failed: {error}"))

    def _reset(self, error: EngineError) -> None:
        """Fail every request and drop every row. The engine may have failed at any point."""
        sequences = self._run_queue.abandon(error)
        self._fail_without_slot(error)
        try:
            for sequence in sequences:
                if sequence.restore is not None:
                    sequence.restore.give_up()
                if sequence.sampler is not None:
                    sequence.sampler.close()
            self._backend.clear_all()
        except Exception:
            _log.exception("engine: reset failed")
        self._slots.forget_all()

    def step(self) -> None:
        self._has_more_events = self._cache.poll()
        progressed = self._admission.admit_waiting()
        progressed |= self._admission.advance_restores()
        progressed |= self._batches.run(on_computed=self._sample)
        self.outbox.flush()  # tokens never wait for an export
        progressed |= self._saver.save_some(self._run_queue.running)
        self._persisting.advance(self._cache)
        progressed |= self._embeddings.advance()  # one part per step, with any number of streams
        self._is_stalled = not progressed

    def status(self) -> EngineStatus:
        """Return the status. Any thread may call it; the numbers may be one step apart."""
        running, waiting = list(self._run_queue.running), list(self._run_queue.waiting)
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
        """Carry out all orders; block only when idle. Return False after a Stop."""
        timeout = self._seconds_to_wait()
        while True:
            try:
                order = self.inbox.get(block=timeout != 0.0, timeout=timeout)
            except Empty:
                return True
            if isinstance(order, Stop):
                return False
            self._guarded(partial(self._obey, order))
            timeout = 0.0

    def _seconds_to_wait(self) -> float | None:
        """Return how long to wait for an order; None: until one comes."""
        if self._has_more_events or self._embeddings.is_busy:
            return 0.0
        if self._run_queue.is_empty and not self._persisting.is_busy:
            return self._embeddings.seconds_to_rest()
        return self._run_queue.seconds_to_wait(STALL_CHECK_SECONDS) if self._is_stalled else 0.0

    def _obey(
        self, order: GenerationRequest | EmbeddingRequest | Ask[Any] | Cancel | FailAll | Wake
    ) -> None:
        match order:
            case GenerationRequest():
                self._accept(order)
            case EmbeddingRequest():
                self._run_queue.yield_background()
                self._embeddings.accept(order)
            case Ask():
                self._answer(order)
            case Cancel(request_id):
                for queue in (self._embeddings, self._persisting, self._run_queue):
                    queue.cancel(request_id)
            case FailAll(error):
                self._fail_all(error)
            case Wake():
                pass  # the next step polls

    def _answer(self, order: Ask[T]) -> None:
        if not order.outcome.set_running_or_notify_cancel():
            return
        try:
            order.outcome.set_result(order.question(self._prefixes))
        except Exception as error:  # the client waits for an answer or an error
            _log.exception("engine: query failed")
            order.outcome.set_exception(EngineError(f"The engine could not answer: {error}"))

    def _accept(self, request: GenerationRequest) -> None:
        if not request.background:
            self._run_queue.yield_background()
        elif self._embeddings.is_busy or self._run_queue.has_foreground:
            self.outbox.put(request.id, Finished(StopCause.YIELDED))
            return
        sequence = new_sequence(request, self._cache, n_ctx=self._backend.n_ctx)
        self._run_queue.waiting.append(sequence)
        self._finder.look_up_stores(sequence)

    def _fail_without_slot(self, error: RekindleError) -> None:
        self._embeddings.fail_all(error)
        self._persisting.fail_all(error)

    def _sample(self, plan: list[BatchItem]) -> None:
        """Advance sequences by what the batch computed; sample a token for the complete ones."""
        complete: list[Sequence] = []
        for sequence, n_tokens in plan:
            sequence.n_computed += n_tokens
            if sequence.phase is PREFILLING:
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
                self._run_queue.finish(sequence, StopCause.LENGTH)
        if not complete:
            return
        samplers = [sequence.sampler for sequence in complete]
        results = self._backend.sample(samplers, range(len(complete)))
        for sequence, result in zip(complete, results, strict=True):
            if isinstance(result, TokenSampled):
                self._append(sequence, result)
            elif isinstance(result, RekindleError):
                self._run_queue.fail(sequence, result)
            else:
                self._run_queue.fail(sequence, EngineError(f"Sampling failed: {result}"))

    def _append(self, sequence: Sequence, sampled: TokenSampled) -> None:
        sequence.phase = DECODING
        token = sampled.token
        if token in self._backend.eog_tokens:
            self._run_queue.finish(sequence, StopCause.END_OF_TURN, token)
            return
        sequence.tokens.append(token)
        self.outbox.put(sequence.request.id, sampled)
        if len(sequence.tokens) >= sequence.max_length:
            self._run_queue.finish(sequence, StopCause.LENGTH)


def _n_background(sequences: list[Sequence]) -> int:
    return sum(sequence.request.background for sequence in sequences)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
