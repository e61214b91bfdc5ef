"""Plans the next batch, makes room for it and computes it. Measures the speed of prefills.

When running streams have no cell left, idle slots are evicted, then the youngest is requeued.

While only prompts are prefilled, the engine does not wait for a GPU: it prepares the next batch
meanwhile. Several batches are then timed as one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import Reclaimed, SlotSaver
from rekindle.engine.scheduler.batch_planner import (
    ENOUGH_ON_GPU,
    FIRST_ON_GPU,
    LONGEST_STEP_SECONDS,
    PREFILL_GRAIN,
    BatchItem,
    BatchLimits,
    plan_batch,
    prefill_allowance,
)
from rekindle.engine.scheduler.compaction import Compaction
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import DECODING
from rekindle.engine.slots import Slots
from rekindle.engine.speculation.speculation import Speculation
from rekindle.errors import ContextFull, DecodeFailed, EngineError
from rekindle.link.activity_page import Activity, ActivityPage
from rekindle.observe.watchdog import EngineWatchdog

_log = logging.getLogger(__name__)

SPEED_MEMORY = 0.8  # weight of the past in the mean prefill speed; picked
LONGEST_RUN_SECONDS = 1.0  # without a wait, so that rows are stored meanwhile; picked


@dataclass(slots=True, eq=False)
class BatchRunner:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _saver: SlotSaver
    _run_queue: RunQueue
    _compaction: Compaction
    _activity: ActivityPage
    _watchdog: EngineWatchdog
    _speculation: Speculation
    _began_at: float | None = None  # of the first batch that nobody has waited for
    _n_begun: int = 0  # tokens since then
    _begun: set[int] = field(default_factory=set)  # numbers of their requests

    @property
    def is_ahead(self) -> bool:
        """Whether a batch may still run."""
        return self._began_at is not None

    def catch_up(self) -> None:
        """Wait for the batches that may still run: what comes next uses their rows, or is timed."""
        if self._began_at is None:
            return
        self._activity.note(Activity.DECODE, list(self._begun))
        self._wait()
        elapsed, n_tokens = time.perf_counter() - self._began_at, self._n_begun
        self._began_at, self._n_begun, self._begun = None, 0, set()
        self._saver.earn(elapsed)
        self._learn_prefill_speed(n_tokens, elapsed)

    def run(self, on_computed: Callable[[list[BatchItem]], None]) -> bool:
        """Plan and compute one batch. Return False if there is nothing to compute now."""
        plan = self._plan()
        if not plan:
            self.catch_up()
            return False
        if self._decode(plan):
            on_computed(plan)
        return True

    def _plan(self) -> list[BatchItem]:
        """Return the next batch. Make room first if the running streams have no cell left."""
        while self._run_queue.running:
            n_free_cells = self._slots.n_cells_free
            n_decoding = sum(sequence.phase is DECODING for sequence in self._run_queue.running)
            if n_free_cells > 0 and n_free_cells >= n_decoding:
                limits = self._limits(n_decoding, n_free_cells)
                plan = plan_batch(self._run_queue.running, limits)
                return self._speculation.widen(plan, limits)
            if self._run_queue.is_in_background:
                self._run_queue.yield_background()
                continue
            self.catch_up()  # the rows of idle slots are exported
            reclaimed = self._saver.reclaim_one(must=True)
            if reclaimed is Reclaimed.LATER:
                return []  # its rows are being stored; streams wait, but new orders do not
            if reclaimed is Reclaimed.NONE:
                self._preempt_youngest()
        return []

    def _limits(self, n_decoding: int, n_free_cells: int) -> BatchLimits:
        n_ubatch = self._backend.n_ubatch
        known = self._saver.prefill_seconds_per_token
        # An unknown speed may be slow, and a step must not look like a hang.
        n_first = FIRST_ON_GPU if self._backend.on_gpu else PREFILL_GRAIN
        speed = LONGEST_STEP_SECONDS / n_first if known is None else known
        max_alone = prefill_allowance(speed, n_ubatch, LONGEST_STEP_SECONDS)
        max_tokens = max(min(max_alone + n_decoding, n_ubatch), n_decoding)
        enough = ENOUGH_ON_GPU if self._backend.on_gpu else n_ubatch
        max_prefill = min(prefill_allowance(speed, n_ubatch), enough)
        if self._run_queue.is_in_background:  # a new request waits for the step to end
            max_tokens = min(n_ubatch, PREFILL_GRAIN if known is None else max_prefill)
        # On a GPU no bits are promised.
        fills_up = self._backend.on_gpu and self._backend.traits.is_dense
        grain = 1 if fills_up else PREFILL_GRAIN
        return BatchLimits(max_tokens, max_prefill, n_free_cells, grain, enough)

    def _decode(self, plan: list[BatchItem]) -> bool:
        """Return False if the batch was not computed: it failed, or has to wait for room.

        Sequences of a failed batch have been failed or requeued.
        """
        if self._compaction.is_due:
            self.catch_up()
            self._compaction.move()
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        n_prefill = n_drafted = 0
        is_end = False  # of a prompt
        for sequence, n_tokens in plan:
            start = sequence.n_computed
            drafted = [] if sequence.draft is None else sequence.draft.tokens
            tokens += sequence.tokens[start : start + n_tokens - len(drafted)]
            if drafted:
                tokens += drafted
                outputs += range(len(tokens) - n_tokens, len(tokens) - 1)
                n_drafted += len(drafted)
            positions += range(start, start + n_tokens)
            slots += [sequence.slot] * n_tokens
            if sequence.phase is not DECODING:
                n_prefill += n_tokens
            if start + n_tokens >= len(sequence.tokens):
                is_end = True
                if sequence.is_sampled:
                    outputs.append(len(tokens) - 1)
        numbers = [sequence.request.number for sequence, _ in plan]
        self._activity.note(Activity.DECODE, numbers)
        is_prefill = n_prefill == len(tokens)
        if not is_prefill:
            self.catch_up()
        try:
            started = self._decode_with_room(
                tokens, positions, slots, outputs, may_reclaim=not n_drafted
            )
            if started is None:
                return False
        except ContextFull:
            if n_drafted:  # nobody makes room for a draft
                self._speculation.narrow(plan)
                return self._decode(plan)
            # By our count there were enough cells; llama.cpp decides.
            if self._run_queue.is_in_background:
                self._run_queue.yield_background()
            elif len(self._run_queue.running) > 1:
                self._preempt_youngest()
                self._run_queue.is_context_full = True
            else:
                self._run_queue.fail(plan[0].sequence, EngineError("The context has no room left."))
            return False
        except DecodeFailed as error:
            if not error.rows_intact:
                raise  # only a new process can be trusted
            for sequence, _ in plan:
                self._run_queue.fail(sequence, error)
            return False
        self._cache.counters.steps += 1
        self._cache.counters.step_tokens += len(tokens)
        if is_prefill:
            self._begin_prefill(len(tokens), numbers, started)
            if is_end or not self._may_run_on():
                self.catch_up()
            return True
        self._wait()
        elapsed = time.perf_counter() - started
        self._saver.earn(elapsed)
        if n_prefill > len(tokens) // 2 or n_prefill >= PREFILL_GRAIN:
            self._learn_prefill_speed(len(tokens), elapsed)
        elif not n_prefill:
            self._speculation.observe_step(len(tokens), elapsed)
            n_cells = self._compaction.n_attended
            seconds_per_cell = self._saver.observe_step(len(tokens), n_cells, elapsed)
            self._compaction.observe_step(seconds_per_cell)
        return True

    def _begin_prefill(self, n_tokens: int, numbers: list[int], started: float) -> None:
        if self._began_at is None:
            self._began_at = started
        self._n_begun += n_tokens
        self._begun.update(numbers)

    def _may_run_on(self) -> bool:
        """Return whether the next batch may be prepared before this prefill is computed.

        Checkpoints of other models than dense ones are exported between two batches, and so are
        the rows of ended replies.
        """
        return (
            self._backend.on_gpu
            and self._backend.traits.is_dense
            and not self._saver.owes_rows
            and self._began_at is not None
            and time.perf_counter() - self._began_at < LONGEST_RUN_SECONDS
        )

    def _decode_with_room(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
        *,
        may_reclaim: bool,
    ) -> float | None:
        """Return when the batch began; None if a slot is being stored to make room: retry."""
        while True:
            started = time.perf_counter()
            try:
                self._compute(tokens, positions, slots, outputs)
                return started
            except ContextFull:
                if self._run_queue.is_in_background or not may_reclaim:
                    raise
                self.catch_up()
                reclaimed = self._saver.reclaim_one(must=True)
                if reclaimed is Reclaimed.LATER:
                    return None
                if reclaimed is Reclaimed.NONE:
                    raise

    def _compute(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        self._watchdog.free()
        try:
            self._backend.decode(tokens, positions, slots, outputs)
        finally:
            self._watchdog.busy()

    def _wait(self) -> None:
        self._watchdog.free()
        try:
            self._backend.wait()
        finally:
            self._watchdog.busy()

    def _preempt_youngest(self) -> None:
        """Requeue the youngest sequence, side requests first. The sequence resumes later.

        Its slot becomes idle. The slot is evicted like any other, once its rows are stored.
        """
        rank = max(sequence.request.terms.rank for sequence in self._run_queue.running)
        sequence = [each for each in self._run_queue.running if each.request.terms.rank == rank][-1]
        _log.info("engine: context full, requeued request=%s", sequence.request.id)
        self._run_queue.requeue(sequence)

    def _learn_prefill_speed(self, n_tokens: int, seconds: float) -> None:
        """Few tokens count for little: a batch of one, such as the last token, takes a step."""
        past = self._saver.prefill_seconds_per_token or seconds / n_tokens
        share = (1 - SPEED_MEMORY) * min(1.0, n_tokens / PREFILL_GRAIN)
        self._saver.prefill_seconds_per_token = (1 - share) * past + share * seconds / n_tokens
