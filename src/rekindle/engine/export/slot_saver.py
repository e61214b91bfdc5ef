"""What a slot leaves behind: its rows go to the cache in blocks before anyone takes it over.

Exports run on the engine thread and hold up whoever computes, so they keep to a share of the
time, and to one in a step that others decode in. Only a slot that must go is saved all at once.
"""

import logging
import time
from dataclasses import replace

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.entry_writer import Saved
from rekindle.cache.policy import OVERDUE_SECONDS, CellTax, ExportPace, Speed, should_park
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import Slot, Slots
from rekindle.errors import EngineError
from rekindle.generation.model_state import Payload
from rekindle.generation.request import Rank

_log = logging.getLogger(__name__)

# What a token costs to compute before anything was measured; picked.
UNKNOWN_SECONDS_PER_TOKEN = 1e-3

SHORT_REPLY_TOKENS = 32  # until then nothing of a stream is exported: it may end soon; picked
WAY_SHARE = 0.1  # of a prefill: it may go into storing and bringing back who makes way; picked
MIN_PREFILL_SECONDS = 0.05  # picked: nobody notices less
MIN_FREED_CELLS = 64  # picked: fewer slow nobody down


class SlotSaver:
    def __init__(self, backend: Backend, slots: Slots, cache: PrefixCache) -> None:
        self._backend = backend
        self._slots = slots
        self._cache = cache
        self._tax = CellTax()
        self._pace = ExportPace()
        self._export_speed = Speed()
        self._fastest_export = 0.0  # bytes per second
        self.prefill_seconds_per_token: float | None = None

    def save_some(self, *, others_decode: bool, others_compute: bool) -> bool:
        """Whole blocks of running sequences, everything of idle slots. True: something was done.

        Where others compute, exports keep to their share of the time; where they decode, there
        is one in a step.
        """
        n_saved = 0
        now = time.monotonic()
        # Idle slots first: what has ended must not wait for what is still being computed.
        for slot in sorted(self._slots.all, key=lambda slot: slot.sequence is not None):
            if _has_begun_to_reply(slot):
                continue
            while not others_compute or self._pace.may_export:
                saved = self._save_next(slot, is_last=slot.sequence is None, reason=None)
                if saved is None:
                    slot.owes_since = None
                    self._keep_promises(slot)
                    break
                if saved is Saved.LATER:
                    break
                n_saved += saved is Saved.STORED
                if n_saved and others_decode:
                    return True
            else:
                if self._next_rows(slot, is_last=slot.sequence is None) is not None:
                    slot.owes_since = slot.owes_since or now
        return n_saved > 0

    def earn(self, computed_seconds: float) -> None:
        oldest = min((slot.owes_since for slot in self._slots.all if slot.owes_since), default=None)
        is_overdue = oldest is not None and time.monotonic() - oldest > OVERDUE_SECONDS
        self._pace.earn(computed_seconds, is_overdue=is_overdue)

    def save_all(self, slot: Slot, reason: Reason, *, others_decode: bool) -> bool:
        """Whether everything worth it is stored; with others decoding that may take some steps."""
        self._look_after_evicted(slot)
        while True:
            saved = self._save_next(slot, is_last=True, reason=reason)
            if saved is None:
                self._keep_promises(slot)
                return True
            if saved is Saved.LATER:
                return False
            if saved is Saved.STORED and others_decode:
                return self._is_saved(slot)

    def _keep_promises(self, slot: Slot) -> None:
        """Once, when all of an idle slot is stored that will be."""
        if slot.is_idle and slot.keys is not None and slot.terms.pins:
            self._cache.pin(slot.keys, slot.terms)
            slot.terms = replace(slot.terms, pins=())

    def _look_after_evicted(self, slot: Slot) -> None:
        """What was stored once may have left memory since; this is the last chance to keep it.

        With rows and checkpoints, rows may be gone that would have to be exported again.
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

    def reclaim_one(self, *, keep: Slot | None = None, must: bool) -> bool:
        """Empties an idle slot, least recently used first, once all of it is stored.

        It `must` when streams would stop without its cells: then it goes in any case.
        """
        for slot in self._slots.idle():
            if slot is keep:
                continue
            if self.save_all(slot, Reason.RECLAIM, others_decode=False) or must:
                self.clear(slot)
                return True
        return False

    def take_checkpoint(self, sequence: Sequence) -> None:
        """The state at the position that was computed last; a moment later it is gone."""
        if self._backend.traits.has_checkpoints:
            began = time.perf_counter()
            self._save_checkpoint(self._slots.all[sequence.slot], Reason.BOUNDARY)
            self._pace.spend(time.perf_counter() - began)

    def observe_step(self, n_sequences: int, n_cells: int, seconds: float) -> float:
        """Idle rows slow down every token of the others: they leave when that costs too much.

        `n_cells` is how many were attended to. What one more would have cost.
        """
        self._tax.observe(n_sequences, n_cells, seconds)
        seconds_per_cell = self._tax.seconds_per_cell(n_sequences)
        if not seconds_per_cell:
            return 0.0
        for slot in self._slots.all:
            if not slot.is_idle:
                continue
            slot.tax_seconds += seconds_per_cell * self._slots.own_cells(slot)
            if self._is_saved(slot) and should_park(
                slot.tax_seconds, self._seconds_to_bring_back(slot)
            ):
                self._cache.counters.parked += 1
                self.clear(slot)
        return seconds_per_cell

    def evict_for_prefill(self, n_new: int, rank: Rank, *, others_decode: bool) -> None:
        """`n_new` tokens are about to be computed, and idle rows slow that down as well.

        Those leave that take hardly any time to bring back, beside what the newcomer takes. No
        conversation does for a side request.
        """
        seconds = n_new * (self.prefill_seconds_per_token or 0.0)
        if seconds < MIN_PREFILL_SECONDS:
            return
        left = WAY_SHARE * seconds
        may_go = [slot for slot in self._slots.idle() if slot.rank >= rank]
        staying = [slot for slot in self._slots.all if slot not in may_go]
        for slot in may_go:
            # Those that share a beginning free it only together, and not while one stays.
            price = None
            if self._slots.own_cells(slot, beside=staying) >= MIN_FREED_CELLS:
                price = self._price_of_leaving(slot, left, others_decode=others_decode)
            if price is None:
                staying.append(slot)
                continue
            left -= price
            self._cache.counters.parked += 1
            self.clear(slot)

    def _price_of_leaving(self, slot: Slot, limit: float, *, others_decode: bool) -> float | None:
        """Seconds to bring it back, once it is stored; None: more than `limit`."""
        if not self._is_saved(slot):
            about = self._export_speed.seconds(slot.n_rows * self._backend.traits.row_bytes)
            if about is None or about >= limit or others_decode:
                return None
        if not self.save_all(slot, Reason.RECLAIM, others_decode=False):
            return None
        slot.seconds_to_bring_back = None  # what it was based on may be gone
        price = self._seconds_to_bring_back(slot)
        return price if price < limit else None

    def _is_saved(self, slot: Slot) -> bool:
        return self._next_rows(slot, is_last=True) is None and not self._owes_checkpoint(slot)

    def _seconds_to_bring_back(self, slot: Slot) -> float:
        if slot.seconds_to_bring_back is None:
            assert slot.keys is not None
            match = self._cache.match(slot.keys, slot.n_rows)
            n_lost = slot.n_rows - match.n_tokens
            per_token = self.prefill_seconds_per_token or UNKNOWN_SECONDS_PER_TOKEN
            load_seconds = self._cache.gate.load_seconds(match)
            if load_seconds is None:  # about as long as taking, but for memory that is new
                n_bytes = sum(node.payload_bytes for node in match.blocks)
                load_seconds = n_bytes / self._fastest_export if self._fastest_export else 0.0
            slot.seconds_to_bring_back = load_seconds + n_lost * per_token
        return slot.seconds_to_bring_back

    def _save_next(self, slot: Slot, *, is_last: bool, reason: Reason | None) -> Saved | None:
        """One export; None: there is nothing left to do for this slot."""
        began = time.perf_counter()
        saved = self._try_save_next(slot, is_last=is_last, reason=reason)
        if saved is Saved.STORED:
            self._pace.spend(time.perf_counter() - began)
        return saved

    def _try_save_next(self, slot: Slot, *, is_last: bool, reason: Reason | None) -> Saved | None:
        if slot.keys is None or (slot.sequence and not slot.sequence.request.cache_prompt):
            return None
        if (stop := self._next_rows(slot, is_last=is_last)) is not None:
            return self._save_rows(slot, stop, reason or _reason(slot, stop))
        if is_last and self._owes_checkpoint(slot):
            return self._save_checkpoint(slot, reason or Reason.TURN_END)
        return None

    def _next_rows(self, slot: Slot, *, is_last: bool) -> int | None:
        """Where the next export of rows ends: at a block's end, or at a turn's."""
        block_end = (slot.n_saved // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        if block_end <= slot.n_rows:
            return block_end
        if not self._backend.traits.has_rows:
            return None  # a part of a block without rows leads nowhere
        turn_end = slot.n_rows if is_last else slot.n_previous_turn_rows
        return turn_end if turn_end > slot.n_saved else None

    def _owes_checkpoint(self, slot: Slot) -> bool:
        return self._backend.traits.has_checkpoints and slot.n_checkpoint != slot.n_rows

    def _save_rows(self, slot: Slot, stop: int, reason: Reason) -> Saved:
        assert slot.keys is not None
        start = slot.n_saved // BLOCK_TOKENS * BLOCK_TOKENS
        try:
            saved = self._cache.writer.save_rows(
                slot.keys,
                start,
                stop,
                reason=reason,
                was_reused=slot.was_reused,
                compute_seconds=self._compute_seconds(stop - start),
                export=lambda: self._export_rows(slot, start, stop),
                terms=slot.terms,
            )
        except EngineError as error:
            saved = _not_exported(error)
        if saved is not Saved.LATER:
            slot.n_saved = stop
        return saved

    def _export_rows(self, slot: Slot, start: int, stop: int) -> Payload:
        """Without rows a block holds nothing, but it leads to the checkpoints behind it."""
        if not self._backend.traits.has_rows:
            return b""
        began = time.perf_counter()
        rows = self._backend.export_rows(slot.id, start, stop)
        seconds = time.perf_counter() - began
        self._export_speed.observe(len(rows), seconds)
        self._fastest_export = max(self._fastest_export, len(rows) / seconds)
        return rows

    def _save_checkpoint(self, slot: Slot, reason: Reason) -> Saved:
        assert slot.keys is not None
        try:
            saved = self._cache.writer.save_checkpoint(
                slot.keys,
                slot.n_rows,
                reason=reason,
                was_reused=slot.was_reused,
                compute_seconds=self._compute_seconds(max(slot.n_rows - slot.n_checkpoint, 1)),
                export=lambda: self._backend.export_checkpoint(slot.id),
                terms=slot.terms,
            )
        except EngineError as error:
            saved = _not_exported(error)
        if saved is not Saved.LATER:
            slot.n_checkpoint = slot.n_rows
        return saved

    def _compute_seconds(self, n_tokens: int) -> float:
        return n_tokens * (self.prefill_seconds_per_token or UNKNOWN_SECONDS_PER_TOKEN)


def _not_exported(error: EngineError) -> Saved:
    """Not stored, and that is all: the rows in the slot are as good as before."""
    _log.warning("a slot could not be exported: %s", error.message)
    return Saved.REFUSED


def _reason(slot: Slot, stop: int) -> Reason:
    sequence = slot.sequence
    if sequence is None or stop == slot.n_previous_turn_rows:
        return Reason.TURN_END
    if sequence.phase is Phase.PREFILLING or stop <= len(sequence.request.prompt):
        return Reason.PREFILL
    return Reason.DECODE


def _has_begun_to_reply(slot: Slot) -> bool:
    """An export would hold up the first tokens; when the reply has ended, it costs nobody.

    What is owed of the turns before does not wait.
    """
    sequence = slot.sequence
    if (
        sequence is None
        or sequence.phase is not Phase.DECODING
        or slot.n_saved < slot.n_previous_turn_rows
    ):
        return False
    return len(sequence.tokens) - len(sequence.request.prompt) < SHORT_REPLY_TOKENS
