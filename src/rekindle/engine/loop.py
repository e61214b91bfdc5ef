"""The hot loop: one thread owns the backend, every Sequence and the PrefixCache.

Nothing here knows text, JSON or asyncio. Requests arrive and token events leave
through `handle.py`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from rekindle.cache.block import Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.batch_planner import (
    PREFILL_GRAIN,
    BatchItem,
    BatchLimits,
    plan_batch,
    prefill_allowance,
)
from rekindle.engine.embedding_queue import EmbeddingQueue
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
from rekindle.engine.persist_queue import PersistQueue
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slot_saver import SlotSaver
from rekindle.engine.slots import Slot, Slots
from rekindle.engine.warm_start import WarmStart
from rekindle.errors import ContextFull, DecodeFailed, EngineError, RekindleError, ShuttingDown
from rekindle.generation import (
    EngineStatus,
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptEvaluated,
    SlotPhase,
    SlotStatus,
    StopCause,
    TokenSampled,
)
from rekindle.model_state import ModelClass

_log = logging.getLogger(__name__)

# Looking up a member of an Enum takes longer than all else that is done with it per token.
_DECODING, _PREFILLING = Phase.DECODING, Phase.PREFILLING
_SHOWN = {
    Phase.RESTORING: SlotPhase.RESTORING,
    Phase.PREFILLING: SlotPhase.PREFILLING,
    Phase.DECODING: SlotPhase.DECODING,
}

SPEED_MEMORY = 0.8  # weight of the past in the running mean of prefill speed; picked
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
        self._deliver = deliver
        self._open_cache = open_cache
        self._queue_size = queue_size
        self._slots = Slots(backend.n_slots, backend.n_cells)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._embeddings = EmbeddingQueue(embedder)
        self._persisting = PersistQueue()
        self._outbox: list[Delivery] = []
        self._prefill_seconds_per_token = 0.0
        self._is_stalled = False  # the last step could do nothing
        self._has_news = False  # the cache has more to take in
        self._is_crowded = False  # llama.cpp said full, and nobody has left since
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

    def _use_cache(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._saver = SlotSaver(self._backend, self._slots, cache)
        self._warm_start = WarmStart(self._backend, self._slots, cache, self._saver)
        self._inquiries = Inquiries(cache, self._slots, self._saver, self._warm_start)

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
        sequences = dict.fromkeys([*self._running, *self._waiting])
        self._running, self._waiting = [], deque()
        for sequence in sequences:
            self._outbox.append((sequence.request.id, error))
            sequence.phase = Phase.DONE
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
        n_decoding = sum(sequence.phase is _DECODING for sequence in self._running)
        did_something = self._admit_waiting(n_decoding)
        did_something |= self._advance_restores(n_decoding)
        if plan := self._plan():
            did_something = True
            if self._decode(plan):
                self._settle(plan)
        self.flush()  # nobody's token waits for an export
        phases = {sequence.phase for sequence in self._running}
        did_something |= self._saver.save_some(
            others_decode=_DECODING in phases,
            others_compute=_DECODING in phases or _PREFILLING in phases,
        )
        self._outbox += self._persisting.advance(self._cache)
        if self._embeddings.is_busy:  # one part in a step, however many streams run beside it
            did_something = True
            self._outbox += self._embeddings.advance()
        self._embeddings.rest_when_idle(time.monotonic())
        self._is_stalled = not did_something

    def status(self) -> EngineStatus:
        """A glance from another thread: the numbers may be one step apart."""
        running, waiting = list(self._running), list(self._waiting)
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
            slots=tuple(_status(slot) for slot in self._slots.all),
        )

    def receive(self) -> bool:
        """Takes all orders there are; blocks only when there is nothing to do."""
        timeout = self._embeddings.seconds_to_rest(time.monotonic())
        if self._has_news or self._embeddings.is_busy:
            timeout = 0.0
        elif self._running or self._waiting or self._persisting.is_busy:
            timeout = STALL_CHECK_SECONDS if self._is_stalled else 0.0
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
                self._yield_background()
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
        self._outbox.append((question_id, answer))

    def _accept(self, request: GenerationRequest) -> None:
        """What runs and waits is all in the background, or none of it is."""
        if not request.background:
            self._yield_background()
        elif self._embeddings.is_busy or any(
            not other.request.background for other in [*self._running, *self._waiting]
        ):
            self._outbox.append((request.id, Finished(StopCause.YIELDED)))
            return
        max_length = self._backend.n_ctx
        if request.max_tokens is not None:
            max_length = min(max_length, len(request.prompt) + request.max_tokens)
        tokens = list(request.prompt)
        self._waiting.append(
            Sequence(
                request=request,
                arrived_at=time.monotonic(),
                max_length=max_length,
                tokens=tokens,
                keys=self._cache.keys(tokens, request.terms.namespace),
            )
        )

    def _cancel(self, request_id: str) -> None:
        self._embeddings.cancel(request_id)
        self._persisting.cancel(request_id)
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.id == request_id:
                self._release(sequence)

    @property
    def _is_in_background(self) -> bool:
        return bool(self._running) and self._running[0].request.background

    def _yield_background(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.background:
                self._finish(sequence, StopCause.YIELDED)

    def _fail_beside(self, error: RekindleError) -> None:
        """What neither runs nor waits for a slot."""
        self._outbox += self._embeddings.fail_all(error)
        self._outbox += [(request_id, error) for request_id in self._persisting.drain()]

    def _fail_all(self, error: RekindleError) -> None:
        self._fail_beside(error)
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, error)

    def _admit_waiting(self, n_decoding: int) -> bool:
        """In order of arrival, but nobody behind waits for one that follows another's prefill."""
        n_admitted = 0
        for sequence in list(self._waiting):
            if len(self._running) == self._backend.n_slots or self._is_crowded:
                break
            if self._warm_start.is_following(sequence):
                continue
            if sequence.request.background and self._running:
                break  # one after another
            start = self._warm_start.find(sequence)
            if self._warm_start.take_as_it_is(sequence, start):
                n_admitted += 1
                sequence.admitted_at = sequence.admitted_at or time.monotonic()
                self._report_evaluated(sequence)
                self._finish(sequence, StopCause.LENGTH)
                continue
            self._warm_start.find_leader(sequence, start, self._running)
            if sequence.leader is not None:
                continue
            if not self._warm_start.place(
                sequence, start, self._running, others_decode=n_decoding > 0
            ):
                if sequence.request.background:
                    self._finish(sequence, StopCause.YIELDED)  # not for what others left
                    continue
                break
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            n_admitted += 1
            try:
                self._prepare(sequence)
            except RekindleError as error:
                self._fail(sequence, error)
            except Exception as error:  # one request's sampler must not end the others
                _log.exception("request=%s cannot be sampled", sequence.request.id)
                self._fail(sequence, EngineError(f"The request cannot be sampled: {error}"))
        return n_admitted > 0

    def _advance_restores(self, n_decoding: int) -> bool:
        """While others decode, one piece in a step: each holds them up."""
        did_put = False
        for sequence in self._running:
            if sequence.phase is Phase.RESTORING and not (did_put and n_decoding):
                did_put |= self._warm_start.advance_restore(
                    sequence, others_decode=n_decoding > 0 or sequence.request.background
                )
        return did_put

    def _prepare(self, sequence: Sequence) -> None:
        if sequence.sampler is None and sequence.is_sampled:
            request = sequence.request
            sequence.sampler = self._backend.new_sampler(
                request.sampling, request.prompt, request.n_top_logprobs
            )

    def _plan(self) -> list[BatchItem]:
        """The next batch; makes room when not even the streams that run have a cell left."""
        while self._running:
            n_free_cells = self._slots.n_cells_free
            n_decoding = sum(sequence.phase is _DECODING for sequence in self._running)
            if n_free_cells > 0 and n_free_cells >= n_decoding:
                return plan_batch(self._running, self._limits(n_decoding, n_free_cells))
            if self._is_in_background:
                self._yield_background()
            elif not self._saver.reclaim_one(must=True):
                self._preempt_youngest()
        return []

    def _limits(self, n_decoding: int, n_free_cells: int) -> BatchLimits:
        n_ubatch = self._backend.n_ubatch
        max_tokens = max(n_ubatch, n_decoding)
        max_prefill = prefill_allowance(self._prefill_seconds_per_token, n_ubatch)
        if self._is_in_background:
            # Whoever arrives waits for the step to end. An unknown speed may be a slow one.
            is_known = self._prefill_seconds_per_token > 0
            max_tokens = min(n_ubatch, max_prefill if is_known else PREFILL_GRAIN)
        return BatchLimits(max_tokens, max_prefill, n_free_cells)

    def _decode(self, plan: list[BatchItem]) -> bool:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        n_prefill = 0
        for sequence, n_tokens in plan:
            start = sequence.n_computed
            if n_tokens == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                slots.append(sequence.slot)
            else:
                tokens += sequence.tokens[start : start + n_tokens]
                positions += range(start, start + n_tokens)
                slots += [sequence.slot] * n_tokens
                n_prefill += n_tokens
            if start + n_tokens == len(sequence.tokens) and sequence.is_sampled:
                outputs.append(len(tokens) - 1)
        started = time.perf_counter()
        try:
            self._decode_making_room(tokens, positions, slots, outputs)
        except ContextFull:
            # Our count of cells said yes: llama.cpp's word is final.
            if self._is_in_background:
                self._yield_background()
            elif len(self._running) > 1:
                self._preempt_youngest()
                self._is_crowded = True
            else:
                self._fail(plan[0].sequence, EngineError("The context has no room left."))
            return False
        except DecodeFailed as error:
            for sequence, _ in plan:
                self._fail(sequence, error)
            if not error.rows_intact:
                self._forget_rows()
            return False
        elapsed = time.perf_counter() - started
        self._saver.earn(elapsed)
        self._cache.count("steps", 1)
        self._cache.count("step_tokens", len(tokens))
        if n_prefill > len(tokens) // 2:
            self._learn_prefill_speed(elapsed / len(tokens))
        elif not n_prefill:
            self._saver.observe_step(len(tokens), elapsed)
        return True

    def _decode_making_room(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        while True:
            try:
                self._backend.decode(tokens, positions, slots, outputs)
                return
            except ContextFull:
                if self._is_in_background or not self._saver.reclaim_one(must=True):
                    raise

    def _forget_rows(self) -> None:
        """After a failure nobody's rows can be trusted: what runs goes on from what is stored."""
        while self._running:
            self._wait_again(self._running[-1])
        self._backend.clear_all()
        for slot in self._slots.all:
            self._slots.forget(slot)

    def _learn_prefill_speed(self, seconds_per_token: float) -> None:
        past = self._prefill_seconds_per_token or seconds_per_token
        self._prefill_seconds_per_token = (
            SPEED_MEMORY * past + (1 - SPEED_MEMORY) * seconds_per_token
        )
        self._saver.prefill_seconds_per_token = self._prefill_seconds_per_token

    def _settle(self, plan: list[BatchItem]) -> None:
        """What the batch computed becomes part of its sequences; complete ones get a token."""
        complete: list[Sequence] = []
        for sequence, n_tokens in plan:
            sequence.n_computed += n_tokens
            if sequence.phase is _PREFILLING:
                self._cache.count("prefilled_tokens", n_tokens)
                if sequence.stops and sequence.stops[-1] == sequence.n_computed:
                    sequence.stops.pop()
                    self._saver.take_checkpoint(sequence)
                if not sequence.has_replied:
                    self._report_prefill(sequence)
            if sequence.n_computed < len(sequence.tokens):
                continue
            if sequence.is_sampled:
                complete.append(sequence)
            else:
                self._finish(sequence, StopCause.LENGTH)
        if not complete:
            return
        samplers = [sequence.sampler for sequence in complete]
        results = self._backend.sample(samplers, range(len(complete)))
        for sequence, result in zip(complete, results, strict=True):
            if isinstance(result, TokenSampled):
                self._append(sequence, result)
            elif isinstance(result, RekindleError):
                self._fail(sequence, result)
            else:
                self._fail(sequence, EngineError(f"Sampling failed: {result}"))

    def _append(self, sequence: Sequence, sampled: TokenSampled) -> None:
        sequence.phase = _DECODING
        token = sampled.token
        if token in self._backend.eog_tokens:
            self._finish(sequence, StopCause.END_OF_TURN, token)
            return
        sequence.tokens.append(token)
        self._outbox.append((sequence.request.id, sampled))
        if len(sequence.tokens) >= sequence.max_length:
            self._finish(sequence, StopCause.LENGTH)

    def _report_prefill(self, sequence: Sequence) -> None:
        n_prompt = len(sequence.request.prompt)
        if sequence.n_computed == n_prompt:
            self._report_evaluated(sequence)
            return
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        progress = PrefillProgress(sequence.n_computed, n_prompt, elapsed, sequence.spans)
        self._outbox.append((sequence.request.id, progress))

    def _report_evaluated(self, sequence: Sequence) -> None:
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        for span in sequence.spans:
            self._cache.count(f"{span.source}_tokens", span.stop - span.start)
        evaluated = PromptEvaluated(
            n_prompt=len(sequence.request.prompt),
            n_cached=sequence.n_cached,
            queue_seconds=sequence.admitted_at - sequence.arrived_at,
            prefill_seconds=elapsed - sequence.restore_seconds,
            restore_seconds=sequence.restore_seconds,
            spans=sequence.spans,
            n_refused=sequence.n_refused,
        )
        self._outbox.append((sequence.request.id, evaluated))
        if sequence.request.cache_prompt:
            terms = sequence.request.terms
            self._cache.give_name(sequence.keys, len(sequence.request.prompt), terms)
            self._cache.pin(sequence.keys, terms)

    def _preempt_youngest(self) -> None:
        """Its tokens are kept, and what is stored of its rows: it goes on when there is room.

        Side requests first.
        """
        rank = max(sequence.request.terms.rank for sequence in self._running)
        sequence = [each for each in self._running if each.request.terms.rank == rank][-1]
        _log.info("request=%s waits again: the context is full", sequence.request.id)
        slot = self._slots.all[sequence.slot]
        self._wait_again(sequence)
        self._saver.save_all(slot, Reason.RECLAIM, others_decode=False)
        self._saver.clear(slot)

    def _wait_again(self, sequence: Sequence) -> None:
        self._leave_slot(sequence)
        sequence.is_resumed = True
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence, cause: StopCause, token: int | None = None) -> None:
        finished = Finished(cause, token)
        if sequence.request.terms.persist and cause is not StopCause.YIELDED:
            self._persisting.add(sequence, finished)
        else:
            self._outbox.append((sequence.request.id, finished))
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: RekindleError) -> None:
        self._outbox.append((sequence.request.id, error))
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._is_crowded = False
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        if sequence.sampler is not None:
            sequence.sampler.close()
        sequence.phase = Phase.DONE

    def _leave_slot(self, sequence: Sequence) -> None:
        """The slot is idle from now on, and keeps the rows whose computation is complete."""
        self._running.remove(sequence)
        slot = self._slots.all[sequence.slot]
        is_half_restored = (
            sequence.phase is Phase.RESTORING and self._backend.traits.has_checkpoints
        )
        if sequence.restore is not None:
            sequence.restore.give_up()
            sequence.restore = None
        slot.sequence, slot.n_kept_rows = None, sequence.n_computed
        slot.last_used_at = time.monotonic()
        slot.tax_seconds, slot.seconds_to_bring_back = 0.0, None
        slot.is_looked_after = False
        sequence.slot, sequence.n_computed, sequence.stops = -1, 0, []
        if is_half_restored or not sequence.request.cache_prompt:
            self._backend.clear_slot(slot.id)
            self._slots.forget(slot)

    def flush(self) -> None:
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []


def _status(slot: Slot) -> SlotStatus:
    sequence = slot.sequence
    return SlotStatus(
        id=slot.id,
        request_id=sequence.request.id if sequence else None,
        session=slot.terms.session,
        rank=slot.rank,
        n_prompt=slot.n_prompt,
        n_rows=slot.n_rows,
        n_generated=max(len(sequence.tokens) - slot.n_prompt, 0) if sequence else 0,
        # It may have ended since it was looked at.
        phase=_SHOWN.get(sequence.phase, SlotPhase.IDLE) if sequence else SlotPhase.IDLE,
        n_cached=sequence.n_cached if sequence else 0,
    )


def _n_background(sequences: list[Sequence]) -> int:
    return sum(sequence.request.background for sequence in sequences)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
