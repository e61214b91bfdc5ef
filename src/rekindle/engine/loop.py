"""The hot loop: one thread owns the backend and every Sequence.

Nothing here knows text, JSON or asyncio. Requests arrive and token events leave
through `handle.py`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from rekindle.engine.backend import Backend
from rekindle.engine.batch_planner import BatchItem, BatchLimits, plan_batch, prefill_allowance
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import Slots
from rekindle.errors import ContextFull, DecodeFailed, EngineError, RekindleError, ShuttingDown
from rekindle.generation import (
    EngineStatus,
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenEvent,
    TokenSampled,
)

_log = logging.getLogger(__name__)

# Looking up a member of an Enum takes longer than all else that is done with it per token.
_DECODING, _PREFILLING = Phase.DECODING, Phase.PREFILLING

SPEED_MEMORY = 0.8  # weight of the past in the running mean of prefill speed; picked


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class FailAll:
    error: RekindleError


class Stop:
    pass


Order = Submit | Cancel | FailAll | Stop
Delivery = tuple[str, TokenEvent | RekindleError]  # request id, what happened to it


class EngineLoop:
    """`deliver` gets everything one step has to say, in one call, on the engine thread."""

    def __init__(
        self, backend: Backend, deliver: Callable[[list[Delivery]], None], *, queue_size: int
    ) -> None:
        self.inbox: SimpleQueue[Order] = SimpleQueue()
        self._backend = backend
        self._deliver = deliver
        self._queue_size = queue_size
        self._slots = Slots(backend.n_slots, backend.n_cells)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._outbox: list[Delivery] = []
        self._prefill_seconds_per_token = 0.0

    def run(self) -> None:
        self._guarded(self._backend.warm_up)
        while self.receive():
            self._guarded(self.step)
            self.flush()
        self._fail_all(ShuttingDown("The engine has stopped."))
        self.flush()
        self._backend.close()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong ends requests, never the thread: nobody could restart it."""
        try:
            action()
        except Exception as error:
            _log.exception("the engine failed; every request ends")
            self._fail_all(EngineError(f"The engine failed: {error}"))

    def step(self) -> None:
        self._admit_waiting()
        plan = self._plan()
        if plan and self._decode(plan):
            self._settle(plan)

    def status(self) -> EngineStatus:
        """A glance from another thread: each number is right, the set may be one step apart."""
        running = list(self._running)
        return EngineStatus(
            n_slots=self._backend.n_slots,
            n_running=len(running),
            n_waiting=len(self._waiting),
            max_waiting=self._queue_size,
            n_ctx=self._backend.n_ctx,
            n_cells=self._backend.n_cells,
            n_cells_used=sum(sequence.n_computed for sequence in running),
        )

    def receive(self) -> bool:
        """Takes all orders there are; blocks only when there is nothing to do."""
        is_idle = not self._running and not self._waiting
        while is_idle or not self.inbox.empty():
            order = self.inbox.get()
            if isinstance(order, Stop):
                return False
            self._obey(order)
            is_idle = False
        return True

    def _obey(self, order: Submit | Cancel | FailAll) -> None:
        match order:
            case Submit(request):
                self._accept(request)
            case Cancel(request_id):
                self._cancel(request_id)
            case FailAll(error):
                self._fail_all(error)

    def _accept(self, request: GenerationRequest) -> None:
        max_length = self._backend.n_ctx
        if request.max_tokens is not None:
            max_length = min(max_length, len(request.prompt) + request.max_tokens)
        self._waiting.append(
            Sequence(request=request, arrived_at=time.monotonic(), max_length=max_length)
        )

    def _cancel(self, request_id: str) -> None:
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.id == request_id:
                self._release(sequence)

    def _fail_all(self, error: RekindleError) -> None:
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, error)

    def _admit_waiting(self) -> None:
        while self._waiting and self._slots.can_admit(self._waiting[0], self._running):
            sequence = self._waiting.popleft()
            sequence.slot = self._slots.take()
            sequence.phase = Phase.PREFILLING
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            self._running.append(sequence)
            try:
                self._prepare(sequence)
            except RekindleError as error:
                self._fail(sequence, error)
            except Exception as error:  # one request's sampler must not end the others
                _log.exception("request=%s cannot be sampled", sequence.request.id)
                self._fail(sequence, EngineError(f"The request cannot be sampled: {error}"))

    def _prepare(self, sequence: Sequence) -> None:
        if sequence.sampler is None:
            request = sequence.request
            sequence.sampler = self._backend.new_sampler(
                request.sampling, request.prompt, request.n_top_logprobs
            )

    def _plan(self) -> list[BatchItem]:
        """The next batch; makes room when not even the streams that run have a cell left."""
        while self._running:
            n_free_cells, n_decoding = self._slots.n_cells, 0
            for sequence in self._running:
                n_free_cells -= sequence.n_computed
                n_decoding += sequence.phase is _DECODING
            if n_free_cells > 0 and n_free_cells >= n_decoding:
                return plan_batch(self._running, self._limits(n_decoding, n_free_cells))
            self._preempt_youngest()
        return []

    def _limits(self, n_decoding: int, n_free_cells: int) -> BatchLimits:
        n_ubatch = self._backend.n_ubatch
        return BatchLimits(
            max_tokens=max(n_ubatch, n_decoding),
            max_prefill=prefill_allowance(self._prefill_seconds_per_token, n_ubatch),
            n_free_cells=n_free_cells,
        )

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
            if start + n_tokens == len(sequence.tokens):
                outputs.append(len(tokens) - 1)
        started = time.perf_counter()
        try:
            self._backend.decode(tokens, positions, slots, outputs)
        except ContextFull:
            # Our count of cells said yes: llama.cpp's word is final.
            if len(self._running) > 1:
                self._preempt_youngest()
            else:
                self._fail(plan[0].sequence, EngineError("The context has no room left."))
            return False
        except DecodeFailed as error:
            for sequence, _ in plan:
                self._fail(sequence, error)
            return False
        elapsed = time.perf_counter() - started
        if n_prefill > len(tokens) // 2:
            self._learn_prefill_speed(elapsed / len(tokens))
        return True

    def _learn_prefill_speed(self, seconds_per_token: float) -> None:
        past = self._prefill_seconds_per_token or seconds_per_token
        self._prefill_seconds_per_token = (
            SPEED_MEMORY * past + (1 - SPEED_MEMORY) * seconds_per_token
        )

    def _settle(self, plan: list[BatchItem]) -> None:
        """What the batch computed becomes part of its sequences; complete ones get a token."""
        complete: list[Sequence] = []
        for sequence, n_tokens in plan:
            sequence.n_computed += n_tokens
            if sequence.phase is _PREFILLING and not sequence.has_replied:
                self._report_prefill(sequence)
            if sequence.n_computed == len(sequence.tokens):
                complete.append(sequence)
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
            self._finish(sequence, StopCause.END_OF_TURN)
            return
        sequence.tokens.append(token)
        self._outbox.append((sequence.request.id, sampled))
        if len(sequence.tokens) >= sequence.max_length:
            self._finish(sequence, StopCause.LENGTH)

    def _report_prefill(self, sequence: Sequence) -> None:
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        n_prompt = len(sequence.request.prompt)
        event: TokenEvent
        if sequence.n_computed < n_prompt:
            event = PrefillProgress(sequence.n_computed, n_prompt, 0, elapsed)
        else:
            waited = sequence.admitted_at - sequence.arrived_at
            event = PromptEvaluated(n_prompt, 0, waited, elapsed)
        self._outbox.append((sequence.request.id, event))

    def _preempt_youngest(self) -> None:
        """Its tokens are kept: it computes them again when there is room, and goes on."""
        sequence = self._running.pop()
        _log.info("request=%s waits again: the context is full", sequence.request.id)
        self._backend.clear_slot(sequence.slot)
        self._slots.give_back(sequence.slot)
        sequence.slot, sequence.n_computed = -1, 0
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence, cause: StopCause) -> None:
        self._outbox.append((sequence.request.id, Finished(cause)))
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: RekindleError) -> None:
        self._outbox.append((sequence.request.id, error))
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._backend.clear_slot(sequence.slot)
            self._slots.give_back(sequence.slot)
        if sequence.sampler is not None:
            sequence.sampler.close()
        sequence.phase = Phase.DONE

    def flush(self) -> None:
        if self._outbox:
            self._deliver(self._outbox)
            self._outbox = []
