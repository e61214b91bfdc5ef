"""The engine loop: one thread owns the backend, every Sequence and the PrefixCache.

The loop knows nothing of text, JSON or asyncio. Orders arrive in `inbox` and token events leave
through `deliver`. Each part of a step has a file of its own; this file puts them in order.
"""

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.embedding_queue import EmbeddingQueue
from rekindle.engine.export.persist_queue import PersistQueue
from rekindle.engine.export.slot_saver import Exported, SlotSaver
from rekindle.engine.live_rows import LiveRows
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
from rekindle.engine.questions import EnginePrefixes, QuestionQueue
from rekindle.engine.replies import ReplySampler
from rekindle.engine.reports import Reports, slot_status
from rekindle.engine.reuse.placement import Placement
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.engine.reuse.restorer import Restorer
from rekindle.engine.scheduler.admission import Admission
from rekindle.engine.scheduler.batch_runner import BatchRunner
from rekindle.engine.scheduler.compaction import Compaction
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.scheduler.sampler_queue import Preparer, SamplerQueue
from rekindle.engine.sequence import Sequence, new_sequence
from rekindle.engine.slots import Slot, Slots
from rekindle.engine.speculation.speculation import Speculation
from rekindle.engine.step_time import StepTime
from rekindle.errors import RekindleError, ShuttingDown
from rekindle.generation.events import Finished, StopCause
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import EmbeddingRequest, GenerationRequest
from rekindle.generation.status import EngineStatus
from rekindle.link.activity_page import Activity, ActivityPage
from rekindle.observe.watchdog import EngineWatchdog

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
        preparer: Preparer,
        activity: ActivityPage,
    ) -> None:
        self.inbox: SimpleQueue[Order] = SimpleQueue()
        self._activity = activity
        self._watchdog = EngineWatchdog(lambda seconds: self._cache.counters.stalls.note(seconds))
        self._backend = backend
        self._open_cache = open_cache
        self._queue_size = queue_size
        self._slots = Slots(backend.n_slots, backend.n_cells)
        self.outbox = Outbox(deliver)
        self._embeddings = EmbeddingQueue(embedder, self.outbox, activity, self._watchdog)
        self._persisting = PersistQueue(self.outbox)
        self._time = StepTime()
        self._run_queue = RunQueue(backend, self._slots, self._persisting, self.outbox)
        self._samplers = SamplerQueue(backend, self._run_queue, activity, preparer, self._wake)
        self._is_stalled = False  # the last step made no progress
        self._has_more_events = False  # of finished transfers, for the next poll
        self._has_started = False
        self._puts_off = False  # the last step put exports off
        self._use_cache(PrefixCache.switched_off("The engine is starting."))

    def run(self) -> None:
        """Run until a `Stop`. An exception ends the process, and the next one takes over."""
        self.start()
        self._watchdog.start()
        try:
            while self.receive():
                self._activity.begin_step()
                self.step()
                self.outbox.flush()  # events after the step's own flush
        finally:
            self._watchdog.stop()
        self.stop()
        self.outbox.flush()
        self._embeddings.close()
        self._backend.close()

    def start(self) -> None:
        self._samplers.start()
        self._backend.warm_up()
        self._slots.rows_take_cells = self._backend.traits.model_class is not ModelClass.RECURRENT
        self._use_cache(self._open_cache(self._backend.traits, self._wake))
        self._cache.start()
        self._has_started = True
        if self._cache.is_on:
            self._backend.expect_exports(BLOCK_TOKENS)

    def _wake(self) -> None:
        self.inbox.put(Wake())

    def _use_cache(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._saver = SlotSaver(self._backend, self._slots, cache, self._time)
        holders = (self._backend, self._slots, cache, self._saver)
        self._finder = PrefixFinder(*holders)
        live = LiveRows(self._slots, self._saver, self._run_queue, self._persisting)
        prefixes = EnginePrefixes(cache, self._slots, self._saver, self._finder, live)
        self._questions = QuestionQueue(prefixes, self._time, self._activity)
        self._reports = Reports(cache, self.outbox)
        self._speculation = Speculation(self._backend, self._slots, cache)
        cache.texts.is_wanted = self._speculation.off_because is None
        restorer = Restorer(*holders, self._activity)
        placement = Placement(*holders, restorer)
        self._admission = Admission(
            self._backend,
            self._slots,
            cache,
            self._run_queue,
            self._finder,
            placement,
            restorer,
            self._reports,
            self._activity,
            self._speculation,
        )
        self._replies = ReplySampler(
            *holders,
            self._run_queue,
            self._reports,
            self._activity,
            self._speculation,
            self.outbox,
        )
        compaction = Compaction(self._backend, self._slots)
        self._batches = BatchRunner(
            *holders,
            self._run_queue,
            compaction,
            self._activity,
            self._watchdog,
            self._speculation,
        )

    def stop(self) -> None:
        self._fail_all(ShuttingDown("The engine has stopped."))
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            for slot in self._slots.all:
                self._save_at_shutdown(slot, deadline)
        finally:
            self._cache.close(_seconds_until(deadline))
            self._samplers.close()

    def _save_at_shutdown(self, slot: Slot, deadline: float) -> None:
        while True:
            self._time.renew()
            exported = self._saver.save_all(slot, Reason.SHUTDOWN, others_decode=False)
            if exported is Exported.ALL:
                return
            if exported is Exported.BLOCKED and not self._cache.wait(_seconds_until(deadline)):
                return  # memory is full, and the disk does not keep up

    def _fail_all(self, error: RekindleError) -> None:
        self._fail_without_slot(error)
        self._run_queue.fail_all(error)

    def step(self) -> None:
        self._time.renew()
        self._has_more_events = self._cache.poll()
        progressed = self._samplers.collect()
        if self._run_queue.waiting or not self._run_queue.is_prefilling:
            self._batches.catch_up()
        if self._questions.read_stores and not self._run_queue.running:
            self._batches.catch_up()
            progressed |= self._saver.save_some([])  # the answer includes the last reply
        progressed |= self._questions.advance()
        progressed |= self._admission.admit_waiting()
        progressed |= self._admission.advance_restores()
        if self._admission.may_clear_way:
            self._batches.catch_up()
            self._admission.clear_way()
        is_first = False  # a reply has begun; an export would compete with its way to the client
        if self._replies.sample_ends():
            is_first = self._deliver_tokens()  # a first token waits for no batch
            progressed = True
        progressed |= self._batches.run(on_computed=self._replies.sample)
        is_first |= self._deliver_tokens()  # tokens never wait for an export
        if self._embeddings.is_busy:
            self._batches.catch_up()
        self._puts_off = is_first and not self._puts_off  # never in two steps in a row
        if not (self._batches.is_ahead or self._puts_off):  # an export would wait for the batch
            works = self._persisting.is_busy or self._embeddings.is_busy
            is_idle = self._run_queue.is_empty and not works
            progressed |= self._saver.save_some(self._run_queue.running, is_idle=is_idle)
        self._persisting.advance(self._cache)
        progressed |= self._embeddings.advance()  # one part per step, with any number of streams
        self._is_stalled = not progressed

    def _deliver_tokens(self) -> bool:
        """Return whether a first token was among them."""
        self.outbox.flush()
        return self._replies.begin_drafts()

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
            cache=self._cache.status() if self._has_started else None,
            n_background=_n_background(running + waiting),
            embedder=self._embeddings.status(),
            slots=tuple(slot_status(slot) for slot in self._slots.all),
            no_drafts_because=self._speculation.off_because,
        )

    def receive(self) -> bool:
        """Carry out all orders; block only when idle. Return False after a Stop."""
        timeout = self._seconds_to_wait()
        self._watchdog.free()  # each step ends here, and new orders are seen
        if timeout != 0.0:
            self._activity.rest()
        else:
            self._watchdog.busy()
        while True:
            try:
                order = self.inbox.get(block=timeout != 0.0, timeout=timeout)
            except Empty:
                if timeout != 0.0:
                    self._watchdog.busy()
                return True
            if isinstance(order, Stop):
                return False
            if timeout != 0.0:
                self._watchdog.busy()
            self._obey(order)
            timeout = 0.0

    def _seconds_to_wait(self) -> float | None:
        """Return how long to wait for an order; None: until one comes."""
        if self._has_more_events or not self._is_stalled:
            return 0.0
        if self._run_queue.is_empty and not self._persisting.is_busy:
            seconds = self._embeddings.seconds_to_rest()
        else:
            seconds = self._run_queue.seconds_to_wait(STALL_CHECK_SECONDS)
        seconds = _sooner(seconds, self._saver.seconds_to_export())
        return self._questions.seconds_to_wait(seconds)

    def _obey(
        self,
        order: GenerationRequest | EmbeddingRequest | Ask[Any] | Cancel | FailAll | Wake,
    ) -> None:
        match order:
            case GenerationRequest():
                self._accept(order)
            case EmbeddingRequest():
                self._run_queue.yield_background()
                self._embeddings.accept(order)
            case Ask():
                self._questions.add(order)
            case Cancel(request_id):
                for queue in (self._embeddings, self._persisting, self._run_queue):
                    queue.cancel(request_id)
            case FailAll(error):
                self._fail_all(error)
            case Wake():
                pass  # the next step polls

    def _accept(self, request: GenerationRequest) -> None:
        self._activity.note(Activity.ADMIT, [request.number])
        if not request.background:
            self._run_queue.yield_background()
        elif self._embeddings.is_busy or self._run_queue.has_foreground:
            self.outbox.put(request.id, Finished(StopCause.YIELDED))
            return
        sequence = new_sequence(request, self._cache, n_ctx=self._backend.n_ctx)
        terms = request.terms
        if self._cache.deletions.covers(sequence.keys.root, terms.session, terms.asked_at):
            sequence.make_private()
        self._run_queue.waiting.append(sequence)
        self._finder.look_up_stores(sequence)
        self._samplers.ask(sequence)

    def _fail_without_slot(self, error: RekindleError) -> None:
        self._embeddings.fail_all(error)
        self._persisting.fail_all(error)
        self._questions.fail_all(error)


def _n_background(sequences: list[Sequence]) -> int:
    return sum(sequence.request.background for sequence in sequences)


def _sooner(first: float | None, second: float | None) -> float | None:
    """Return the shorter time; None: neither ends."""
    return min((each for each in (first, second) if each is not None), default=None)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
