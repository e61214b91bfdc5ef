"""The next batch: planned, given room, computed. Owns the speed that prefills turn out to have.

Where streams have no cell left, idle slots are emptied, then the youngest waits again.
"""

import logging
import time

from rekindle.cache.entry import Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.scheduler.batch_planner import (
    PREFILL_GRAIN,
    BatchItem,
    BatchLimits,
    plan_batch,
    prefill_allowance,
)
from rekindle.engine.scheduler.compaction import Compaction
from rekindle.engine.scheduler.roster import Roster
from rekindle.engine.sequence import Phase
from rekindle.engine.slots import Slots
from rekindle.errors import ContextFull, DecodeFailed, EngineError

_log = logging.getLogger(__name__)

_DECODING = Phase.DECODING  # looking up a member of an Enum is slow

SPEED_MEMORY = 0.8  # weight of the past in the running mean of prefill speed; picked


class BatchRunner:
    def __init__(
        self,
        backend: Backend,
        slots: Slots,
        roster: Roster,
        cache: PrefixCache,
        saver: SlotSaver,
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._roster = roster
        self._cache = cache
        self._saver = saver
        self._compaction = Compaction(backend, slots)
        self._prefill_seconds_per_token = 0.0

    def plan(self) -> list[BatchItem]:
        """The next batch; makes room when not even the streams that run have a cell left."""
        while self._roster.running:
            n_free_cells = self._slots.n_cells_free
            n_decoding = sum(sequence.phase is _DECODING for sequence in self._roster.running)
            if n_free_cells > 0 and n_free_cells >= n_decoding:
                return plan_batch(self._roster.running, self._limits(n_decoding, n_free_cells))
            if self._roster.is_in_background:
                self._roster.yield_background()
            elif not self._saver.reclaim_one(must=True):
                self._preempt_youngest()
        return []

    def _limits(self, n_decoding: int, n_free_cells: int) -> BatchLimits:
        n_ubatch = self._backend.n_ubatch
        max_tokens = max(n_ubatch, n_decoding)
        max_prefill = prefill_allowance(self._prefill_seconds_per_token, n_ubatch)
        if self._roster.is_in_background:
            # Whoever arrives waits for the step to end. An unknown speed may be a slow one.
            is_known = self._prefill_seconds_per_token > 0
            max_tokens = min(n_ubatch, max_prefill if is_known else PREFILL_GRAIN)
        return BatchLimits(max_tokens, max_prefill, n_free_cells)

    def decode(self, plan: list[BatchItem]) -> bool:
        """False: it could not be computed, and who could not go on was told or waits again."""
        if self._compaction.is_due and not self._close_holes():
            return False
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
            if self._roster.is_in_background:
                self._roster.yield_background()
            elif len(self._roster.running) > 1:
                self._preempt_youngest()
                self._roster.is_crowded = True
            else:
                self._roster.fail(plan[0].sequence, EngineError("The context has no room left."))
            return False
        except DecodeFailed as error:
            for sequence, _ in plan:
                self._roster.fail(sequence, error)
            if not error.rows_intact:
                self._forget_rows()
            return False
        elapsed = time.perf_counter() - started
        self._saver.earn(elapsed)
        self._cache.counters.steps += 1
        self._cache.counters.step_tokens += len(tokens)
        if n_prefill > len(tokens) // 2:
            self._learn_prefill_speed(elapsed / len(tokens))
        elif not n_prefill:
            n_cells = self._compaction.n_attended
            seconds_per_cell = self._saver.observe_step(len(tokens), n_cells, elapsed)
            self._compaction.observe_step(seconds_per_cell)
        return True

    def _close_holes(self) -> bool:
        try:
            self._compaction.move()
        except DecodeFailed as error:
            _log.error("%s", error)
            self._forget_rows()
            return False
        return True

    def _decode_making_room(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        while True:
            try:
                self._backend.decode(tokens, positions, slots, outputs)
                return
            except ContextFull:
                if self._roster.is_in_background or not self._saver.reclaim_one(must=True):
                    raise

    def _preempt_youngest(self) -> None:
        """Its tokens are kept, and what is stored of its rows: it goes on when there is room.

        Side requests first.
        """
        rank = max(sequence.request.terms.rank for sequence in self._roster.running)
        sequence = [each for each in self._roster.running if each.request.terms.rank == rank][-1]
        _log.info("request=%s waits again: the context is full", sequence.request.id)
        slot = self._slots.all[sequence.slot]
        self._roster.wait_again(sequence)
        self._saver.save_all(slot, Reason.RECLAIM, others_decode=False)
        self._saver.clear(slot)

    def _forget_rows(self) -> None:
        """After a failure nobody's rows can be trusted: what runs goes on from what is stored."""
        while self._roster.running:
            self._roster.wait_again(self._roster.running[-1])
        self._backend.clear_all()
        for slot in self._slots.all:
            self._slots.forget(slot)
        self._compaction.forget()

    def _learn_prefill_speed(self, seconds_per_token: float) -> None:
        past = self._prefill_seconds_per_token or seconds_per_token
        self._prefill_seconds_per_token = (
            SPEED_MEMORY * past + (1 - SPEED_MEMORY) * seconds_per_token
        )
        self._saver.prefill_seconds_per_token = self._prefill_seconds_per_token
