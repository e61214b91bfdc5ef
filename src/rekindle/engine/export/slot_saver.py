"""Exports the rows of slots to the cache, block by block, and evicts idle slots.

Exports run on the engine thread and delay running sequences. They are limited to a share of the
time, to one export per step while others decode, and in any step to the time of `StepTime`.
"""

import time
from dataclasses import replace
from enum import Enum, auto

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.entry_writer import Saved
from rekindle.cache.policy import OVERDUE_SECONDS, CellTax, ExportPace, should_park
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_writer import SlotWriter
from rekindle.engine.sequence import DECODING, PREFILLING, Sequence
from rekindle.engine.slots import Slot, Slots
from rekindle.engine.step_time import StepTime
from rekindle.generation.request import Rank

UNKNOWN_SECONDS_PER_TOKEN = 1e-3  # of a prefill, before the first measurement; picked
SHORT_REPLY_TOKENS = 32  # a shorter reply is not exported yet: it may end soon; picked
EVICTION_SHARE = 0.1  # of a prefill's time, to export and later restore evicted slots; picked
EXPORT_FIRST_SHARE = 0.01  # the same to export one slot, while the request waits; picked
MIN_PREFILL_SECONDS = 0.05  # a shorter prefill evicts nothing; picked
# After the end of a reply. An agent's next request often follows at once, and would wait for the
# export. Picked.
REST_SECONDS = 0.030
MIN_FREED_CELLS = 64  # fewer freed cells do not speed a prefill up; picked


class Exported(Enum):
    ALL = auto()
    SOME = auto()  # the time of this step is over: retry in the next one
    BLOCKED = auto()  # memory has no room until a write or a restore ends


class Reclaimed(Enum):
    ONE = auto()
    NONE = auto()  # no idle slot is left, or none can be stored
    LATER = auto()  # a slot is being exported: retry in the next step


class SlotSaver:
    def __init__(
        self, backend: Backend, slots: Slots, cache: PrefixCache, step_time: StepTime
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._cache = cache
        self._time = step_time
        self._has_progressed = False  # since the last `save_some`
        self._rests_until: float | None = None  # the soonest export that `save_some` put off
        self._tax = CellTax()
        self._pace = ExportPace()
        self._writer = SlotWriter(backend, cache, self._compute_seconds)
        self.prefill_seconds_per_token: float | None = None

    def save_some(self, running: list[Sequence], *, is_idle: bool = False) -> bool:
        """Export whole blocks of running sequences and all rows of idle slots.

        Return whether this step exported anything. While sequences prefill, exports keep to their
        share of the time; while sequences decode, there is one export per step. While the engine
        `is_idle`, the export of a reply that has just ended may wait for REST_SECONDS.
        """
        self._rests_until = None
        if any(each.phase is PREFILLING and each.n_pending == 1 for each in running):
            return False  # its first token comes with the next step
        phases = {sequence.phase for sequence in running}
        others_decode = DECODING in phases
        others_compute = others_decode or PREFILLING in phases
        now = time.monotonic()
        # Idle slots first: a finished turn must not wait for running ones.
        for slot in sorted(self._slots.all, key=lambda slot: slot.sequence is not None):
            if _has_begun_to_reply(slot):
                slot.export_waits_since = None  # the rows of its ended replies are stored
                continue
            if is_idle and self._rests(slot, now):
                ends = slot.last_used_at + REST_SECONDS
                self._rests_until = min(ends, self._rests_until or ends)
                slot.export_waits_since = slot.export_waits_since or now
                continue
            saved: Saved | None = None
            while not self._time.is_over and (not others_compute or self._pace.may_export):
                saved = self._save_next(slot, is_last=slot.sequence is None, reason=None)
                if saved is None:
                    slot.export_waits_since = None
                    self._apply_pins(slot)
                    break
                if saved is Saved.LATER or (saved is Saved.STORED and others_decode):
                    break
            else:
                # Rows of a running request can wait: without them, only its prompt is lost.
                if slot.sequence is None and self._next_rows(slot, is_last=True) is not None:
                    slot.export_waits_since = slot.export_waits_since or now
            if saved is Saved.STORED and others_decode:
                break
        has_progressed, self._has_progressed = self._has_progressed, False
        return has_progressed

    def _rests(self, slot: Slot, now: float) -> bool:
        """Return whether the export of an idle slot should wait for the next request.

        Not on GPUs, where this was not measured, and not where no other slot can be taken: the
        request would have to store the rows first.
        """
        if not slot.is_idle or self._is_saved(slot) or now >= slot.last_used_at + REST_SECONDS:
            return False
        if self._backend.on_gpu or not self._backend.traits.is_dense or self._is_overdue(slot, now):
            return False
        others = (other for other in self._slots.all if other is not slot)
        return any(other.is_empty or self._is_saved(other) for other in others)

    def store_before_prefill(self, n_new: int) -> bool:
        """Store the rows of ended replies before a prefill in which they would become overdue.

        Return False if some remain: retry in the next step. On a GPU they are stored meanwhile.
        """
        if self._backend.on_gpu or self._compute_seconds(n_new) < OVERDUE_SECONDS:
            return True
        for slot in self._slots.idle():
            if not self._is_saved(slot):
                exported = self.save_all(slot, Reason.TURN_END, others_decode=False)
                if exported is Exported.SOME:
                    return False
        return True

    def _is_overdue(self, slot: Slot, now: float) -> bool:
        since = slot.export_waits_since
        return since is not None and now - since > OVERDUE_SECONDS

    @property
    def owes_rows(self) -> bool:
        """Whether rows of an ended reply are not stored yet."""
        return any(
            slot.sequence is None
            and slot.keys is not None
            and self._next_rows(slot, is_last=True) is not None
            for slot in self._slots.all
        )

    def seconds_to_export(self) -> float | None:
        """Return how long the export that the last `save_some` put off still waits, or None."""
        return None if self._rests_until is None else max(self._rests_until - time.monotonic(), 0.0)

    def earn(self, computed_seconds: float) -> None:
        """Add the exports' share of a batch's time to the time that exports may take."""
        now = time.monotonic()
        is_overdue = any(self._is_overdue(slot, now) for slot in self._slots.all)
        self._pace.earn(computed_seconds, is_overdue=is_overdue)

    def save_all(self, slot: Slot, reason: Reason, *, others_decode: bool) -> Exported:
        """Export the slot's remaining rows, as far as the time of this step lasts.

        While others decode, one block per call.
        """
        self._recheck_evicted(slot)
        while self._is_saved(slot) or not self._time.is_over:
            saved = self._save_next(slot, is_last=True, reason=reason)
            if saved is None:
                self._apply_pins(slot)
                return Exported.ALL
            if saved is Saved.LATER:
                return Exported.BLOCKED
            if saved is Saved.STORED and others_decode and not self._is_saved(slot):
                break
        return Exported.SOME

    def _apply_pins(self, slot: Slot) -> None:
        """Pin what was asked for, once it is stored: for earlier requests, and for an ended one."""
        if slot.keys is None:
            return
        if slot.n_saved >= slot.n_previous_turn_rows:
            for terms in slot.unpinned:
                self._cache.pin(slot.keys, terms)
            slot.unpinned = ()
        if slot.is_idle and slot.terms.pins:
            self._cache.pin(slot.keys, slot.terms)
            slot.terms = replace(slot.terms, pins=())

    def _recheck_evicted(self, slot: Slot) -> None:
        """Mark rows for export again whose entries were evicted from memory since.

        Models with both rows and checkpoints are excluded: the slot may lack the evicted rows.
        """
        traits = self._backend.traits
        if (
            slot.evicted_rows_rechecked
            or slot.keys is None
            or (traits.has_checkpoints and traits.has_rows)
        ):
            return
        slot.evicted_rows_rechecked = True
        n_stored = self._cache.match(slot.keys, slot.n_rows).n_tokens
        if n_stored < slot.n_saved:
            slot.n_saved = n_stored // BLOCK_TOKENS * BLOCK_TOKENS
        if n_stored < slot.n_checkpoint:
            slot.n_checkpoint = 0

    def clear(self, slot: Slot) -> None:
        if not slot.is_empty:
            self._backend.clear_slot(slot.id)
            self._slots.forget(slot)

    def reclaim_one(self, *, keep: Slot | None = None, must: bool) -> Reclaimed:
        """Evict the least recently used idle slot, once its rows are stored.

        With `must`, streams need the cells: a slot is evicted even if memory has no room for its
        rows, and a slot that is stored already before one that is not.
        """
        later = False
        for slot in self._slots.idle():
            if slot is keep:
                continue
            exported = self.save_all(slot, Reason.RECLAIM, others_decode=False)
            if exported is Exported.ALL or (must and exported is Exported.BLOCKED):
                self.clear(slot)
                return Reclaimed.ONE
            if exported is Exported.SOME:
                later = True
                if not must:
                    break
        return Reclaimed.LATER if later else Reclaimed.NONE

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Export the state at the last computed position; the next batch overwrites it."""
        if self._backend.traits.has_checkpoints and sequence.request.cache_prompt:
            began = time.perf_counter()
            self._writer.save_checkpoint(self._slots.all[sequence.slot], Reason.BOUNDARY)
            self._pace.spend(time.perf_counter() - began)

    def observe_step(self, n_sequences: int, n_cells: int, seconds: float) -> float:
        """Evict idle slots whose rows have slowed decoding down by more than a restore costs.

        `n_cells` is the number of cells attended to. Return the seconds that one more cell costs.
        """
        self._tax.observe(n_sequences, n_cells, seconds)
        seconds_per_cell = self._tax.seconds_per_cell(n_sequences)
        if not seconds_per_cell:
            return 0.0
        for slot in self._slots.all:
            if not slot.is_idle:
                continue
            slot.cost_seconds += seconds_per_cell * self._slots.own_cells(slot)
            if self._is_saved(slot) and should_park(slot.cost_seconds, self._reload_seconds(slot)):
                self.park(slot)
        return seconds_per_cell

    def evictable_for_prefill(
        self,
        n_new: int,
        rank: Rank,
        *,
        source: Slot | None,
        n_shared: int,
        target: Slot | None,
        others_decode: bool,
        arrived_at: float,
    ) -> list[Slot] | None:
        """Return idle slots that would slow down a prefill of `n_new` tokens.

        `target` is the slot that it will take. They are stored, cheap to restore compared with
        the prefill, and not of a lower `rank`: a side request evicts no conversation. The source
        may be among them: only its shared rows are needed. None: one is being exported, retry.
        """
        if (seconds := n_new * (self.prefill_seconds_per_token or 0.0)) < MIN_PREFILL_SECONDS:
            return []
        budget = EVICTION_SHARE * seconds
        others = [slot for slot in self._slots.all if slot is not target]
        evictable = [slot for slot in self._slots.idle() if slot in others and slot.rank >= rank]
        kept = [slot for slot in others if slot not in evictable]
        evicted: list[Slot] = []
        for slot in evictable:
            # Cells shared with a kept slot, or with the target's fork, are not freed.
            n_forked = 0
            if source is not None:
                n_own = 0 if slot is source else self._slots.own_cells(slot, beside=[source])
                n_forked = min(n_shared, slot.n_rows - n_own)
            n_freed = min(self._slots.own_cells(slot, beside=kept), slot.n_rows - n_forked)
            # A request that came after the slot's reply would wait for the export.
            waits = slot.last_used_at < arrived_at and not self._backend.on_gpu
            most = EXPORT_FIRST_SHARE * seconds if waits else budget
            may_export = self._may_export(slot, most, others_decode=others_decode)
            if n_freed < MIN_FREED_CELLS or not may_export:
                kept.append(slot)
                continue
            exported = self.save_all(slot, Reason.RECLAIM, others_decode=False)
            if exported is Exported.SOME:
                return None
            n_live = slot.n_rows - n_freed if self._backend.traits.is_dense else 0
            cost = self._restore_seconds(slot, n_live // BLOCK_TOKENS * BLOCK_TOKENS)
            if exported is Exported.BLOCKED or cost >= budget:
                kept.append(slot)
                continue
            budget -= cost
            evicted.append(slot)
        return evicted

    def park(self, slot: Slot) -> None:
        """Evict a stored slot that slows others down."""
        self._cache.counters.parked += 1
        self.clear(slot)

    def _may_export(self, slot: Slot, limit: float, *, others_decode: bool) -> bool:
        """Return whether the slot is stored, or nobody waits for an export shorter than `limit`."""
        if self._is_saved(slot):
            return True
        n_rows = slot.n_rows - slot.n_saved // BLOCK_TOKENS * BLOCK_TOKENS
        about = self._writer.speed.seconds(n_rows * self._backend.traits.row_bytes)
        return about is not None and about < limit and not others_decode

    def _is_saved(self, slot: Slot) -> bool:
        has_rows_left = self._next_rows(slot, is_last=True) is not None
        return not (has_rows_left or self._needs_checkpoint(slot) or slot.unsaved_end is not None)

    def _reload_seconds(self, slot: Slot) -> float:
        if slot.reload_seconds is None:
            slot.reload_seconds = self._restore_seconds(slot, n_live=0)
        return slot.reload_seconds

    def _restore_seconds(self, slot: Slot, n_live: int) -> float:
        """Return how long a restore behind `n_live` rows of other slots would take."""
        assert slot.keys is not None
        match = self._cache.match(slot.keys, slot.n_rows)
        load_seconds = self._cache.gate.load_seconds(match, n_live=n_live)
        if load_seconds is None:  # not measured yet: about as fast as the fastest export
            n_bytes = sum(node.payload_bytes for node in match.blocks_after(n_live))
            fastest = self._writer.fastest
            load_seconds = n_bytes / fastest if fastest else 0.0
        return load_seconds + self._compute_seconds(slot.n_rows - max(match.n_tokens, n_live))

    def _save_next(self, slot: Slot, *, is_last: bool, reason: Reason | None) -> Saved | None:
        """Do one export. Return None if the slot has nothing left to export."""
        if slot.keys is None or (slot.sequence and not slot.sequence.request.cache_prompt):
            return None
        stop = self._next_rows(slot, is_last=is_last)
        n_end = slot.unsaved_end if is_last else None
        if stop is None and n_end is None and not (is_last and self._needs_checkpoint(slot)):
            return None
        began = time.perf_counter()
        with self._time.spent():
            if stop is not None:
                saved = self._writer.save_rows(slot, stop, reason or _reason(slot, stop))
            elif n_end is not None:
                saved = self._writer.save_end(slot, n_end)
            else:
                saved = self._writer.save_checkpoint(slot, reason or Reason.TURN_END)
        if saved is Saved.STORED:
            self._pace.spend(time.perf_counter() - began)
        if saved is not Saved.LATER:
            self._has_progressed = True
            self._slots.n_changes += 1
        return saved

    def _next_rows(self, slot: Slot, *, is_last: bool) -> int | None:
        """Return where the next export of rows ends: at a block's end, or at a turn's."""
        block_end = (slot.n_saved // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        if block_end <= slot.n_rows:
            return block_end
        if not self._backend.traits.has_rows:
            return None  # without rows, a partial block leads to no checkpoint
        turn_end = slot.n_rows if is_last else slot.n_previous_turn_rows
        return turn_end if turn_end > slot.n_saved else None

    def _needs_checkpoint(self, slot: Slot) -> bool:
        return self._backend.traits.has_checkpoints and slot.n_checkpoint != slot.n_rows

    def _compute_seconds(self, n_tokens: int) -> float:
        return n_tokens * (self.prefill_seconds_per_token or UNKNOWN_SECONDS_PER_TOKEN)


def _reason(slot: Slot, stop: int) -> Reason:
    sequence = slot.sequence
    if sequence is None or stop == slot.n_previous_turn_rows:
        return Reason.TURN_END
    if sequence.phase is PREFILLING or stop <= len(sequence.request.prompt):
        return Reason.PREFILL
    return Reason.DECODE


def _has_begun_to_reply(slot: Slot) -> bool:
    """Return whether the slot's reply is so short that its export should wait.

    An export would delay the first tokens. Rows of previous turns do not wait.
    """
    sequence = slot.sequence
    if (
        sequence is None
        or sequence.phase is not DECODING
        or slot.n_saved < slot.n_previous_turn_rows
    ):
        return False
    return len(sequence.tokens) - len(sequence.request.prompt) < SHORT_REPLY_TOKENS
