"""Gives a sequence its slot, with as much of its prefix as is live.

The slot is the one that holds the prefix (continued or trimmed), a fork of it, or another slot.
Rows that the slot loses by this are stored first.
"""

import logging
import time
from dataclasses import dataclass

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import Exported, Reclaimed, SlotSaver
from rekindle.engine.reuse.divergence import MIN_SHARED_TOKENS, stop_at_divergence
from rekindle.engine.reuse.prefix_finder import Start
from rekindle.engine.reuse.restorer import Restorer
from rekindle.engine.sequence import Sequence
from rekindle.engine.slots import GROWTH_CELLS, Slot, Slots
from rekindle.errors import EngineError
from rekindle.generation.events import CacheSource

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Placement:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _saver: SlotSaver
    _restorer: Restorer

    def serve_without_slot(self, sequence: Sequence, start: Start) -> bool:
        """Return True if the request only evaluates its prompt and all of the prompt is live."""
        if sequence.is_sampled or start.source is None or start.n_live < len(sequence.tokens):
            return False
        start.source.last_used_at = time.monotonic()
        sequence.note_cached(CacheSource.LIVE, start.n_live)
        return True

    def place(
        self, sequence: Sequence, start: Start, running: list[Sequence], *, others_decode: bool
    ) -> bool:
        """Give the sequence a slot and begin its restore or prefill. Return False to wait."""
        n_needed = sum(other.n_pending for other in running)
        n_needed += len(sequence.tokens) - start.n_live + GROWTH_CELLS * (len(running) + 1)
        target = self._choose_target(sequence, start, n_needed)
        must = not sequence.request.background
        if target is None or not self._make_room(start, target, n_needed, must=must):
            return False
        if not self._save_before_overwrite(sequence, target, start, others_decode=others_decode):
            return False
        n_new = len(sequence.tokens) - start.n_tokens
        if not (running or self._saver.store_before_prefill(n_new)):
            return False
        evicted: list[Slot] | None = []
        if not sequence.request.background:
            evicted = self._saver.evictable_for_prefill(
                n_new,
                sequence.request.terms.rank,
                source=start.source,
                n_shared=start.n_live,
                target=target,
                others_decode=others_decode,
                arrived_at=sequence.arrived_at,
            )
        if evicted is None:
            return False
        if not self._backend.traits.is_dense and self._restorer.stores_rows_of(sequence):
            stop_at_divergence(sequence, start.n_findable, self._slots, self._cache)
        self._occupy(sequence, start, target)
        self._park(evicted, [sequence])
        sequence.note_cached(CacheSource.LIVE, sequence.n_computed)
        if start.match is not None:
            if start.match.n_tokens > start.n_tokens:
                sequence.n_refused = start.match.n_tokens - start.n_tokens
                self._cache.gate.note_refusal()
            self._cache.use(start.match, sequence.request.terms)
            if start.n_stored:
                self._restorer.begin(sequence, start.match, start.n_stored)
        self._restorer.begin_prefill_if_restored(sequence)
        return True

    def clear_way(self, prefilling: list[Sequence], *, others_decode: bool) -> bool:
        """Evict slots that have become idle beside prefills. Return False to call it again.

        In a burst of prompts, attention would read the rows of those that have ended.
        """
        n_new = sum(sequence.n_pending for sequence in prefilling)
        evicted = self._saver.evictable_for_prefill(
            n_new,
            min(sequence.request.terms.rank for sequence in prefilling),
            source=None,
            n_shared=0,
            target=None,
            others_decode=others_decode,
            arrived_at=min(sequence.arrived_at for sequence in prefilling),
        )
        if evicted is None:
            return False
        self._park(evicted, prefilling)
        return True

    def _choose_target(self, sequence: Sequence, start: Start, n_needed: int) -> Slot | None:
        """Return the source itself if no rows are lost or nothing else fits, else another slot.

        A source that holds the whole prompt loses only a reply, which is computed again.
        """
        source = start.source
        idle = self._slots.idle()
        target = self._slots.empty() or (idle[0] if idle else None)
        if source is None or not source.is_idle:
            return target
        if sequence.request.background and self._slots.empty() is None:
            return source  # a background request evicts no other slot
        fits_beside = self._slots.cells_of(self._kept_slots(source)) + n_needed <= (
            self._slots.n_cells
        )
        is_beside_free = target is not None and (target.is_empty or target.rank > source.rank)
        if sequence.request.terms.rank > source.rank and is_beside_free and fits_beside:
            return target  # a side request must not overwrite the conversation it starts from
        is_whole_prompt = sequence.is_sampled and start.n_live >= len(sequence.tokens) - 1
        if not self._backend.traits.is_dense or is_whole_prompt:
            return source
        if self._is_reply_replaced(source, start):
            return source
        return target if source.n_rows > start.n_live and fits_beside else source

    def _is_reply_replaced(self, source: Slot, start: Start) -> bool:
        """Return whether the prompt continues the last one without its reply, a short one.

        The client has changed the reply, or dropped it. In a fork, its rows would stay between
        those of the prompt, and attention would read more tiles. They are stored first.
        """
        n_lost = source.n_rows - start.n_live
        return self._cache.is_on and start.n_live >= source.n_prompt and n_lost <= BLOCK_TOKENS

    def _kept_slots(self, source: Slot | None) -> list[Slot]:
        return [slot for slot in self._slots.all if slot.sequence or slot is source]

    def _make_room(self, start: Start, target: Slot, n_needed: int, *, must: bool) -> bool:
        """Evict idle slots until every prompt fits. Return False if they do not.

        With `must`, a sequence that would run alone is always admitted.
        """
        if not self._slots.rows_take_cells:
            return True
        is_alone = must and not any(slot.sequence for slot in self._slots.all)
        n_kept = self._slots.cells_of(self._kept_slots(start.source))
        if target is start.source:
            n_kept -= target.n_rows - start.n_live
        if n_kept + n_needed > self._slots.n_cells and not is_alone:
            return False
        while self._slots.n_cells_free + self._n_freed(target, start) < n_needed:
            reclaimed = self._saver.reclaim_one(keep=start.source, must=False)
            if reclaimed is not Reclaimed.ONE:
                return is_alone and reclaimed is Reclaimed.NONE
        return True

    def _n_freed(self, target: Slot, start: Start) -> int:
        """Return how many cells are freed when the sequence takes over the target."""
        if target is start.source:
            return target.n_rows - start.n_live
        others = [slot for slot in self._slots.all if slot is not target]
        return self._slots.n_cells_used - self._slots.cells_of(others)

    def _save_before_overwrite(
        self, sequence: Sequence, target: Slot, start: Start, *, others_decode: bool
    ) -> bool:
        """Store the rows that the slot is about to lose. Return False if some remain: retry.

        Rows of another session are stored under its name first, and those of a conversation before
        a side request continues them: they would be evicted sooner.
        """
        if target.is_empty:
            return True
        continues = target is start.source and target.n_rows == start.n_live
        before, terms = target.terms, sequence.request.terms
        may_inherit = before.session == terms.session and before.rank >= terms.rank
        if continues and may_inherit and self._backend.traits.is_dense:
            return True  # the rows stay, and a dense model has no state at their end
        exported = self._saver.save_all(target, Reason.RECLAIM, others_decode=others_decode)
        return exported is Exported.ALL

    def _occupy(self, sequence: Sequence, start: Start, target: Slot) -> None:
        source, n_live = start.source, start.n_live
        n_saved = min(source.n_saved, n_live) if source else 0
        n_checkpoint = source.n_checkpoint if source and source.n_checkpoint <= n_live else 0
        ends = source.ends_within(n_live) if source else {}
        if source is target:
            if n_live < target.n_rows:
                self._backend.trim_slot(target.id, n_live)
                self._slots.cut(target, n_live)
        else:
            self._saver.clear(target)
            if source is not None and not self._fork(source, target, n_live):
                n_live = n_saved = n_checkpoint = 0
                ends = {}
        terms = sequence.request.terms
        if target.terms.pins and source is target:
            target.unpinned = (*target.unpinned, target.terms)
        target.rank = min(target.rank, terms.rank) if source is target else terms.rank
        target.terms, target.n_prompt = terms, len(sequence.request.prompt)
        target.sequence, target.keys, target.n_kept_rows = sequence, sequence.keys, 0
        target.n_saved, target.n_checkpoint, target.ends = n_saved, n_checkpoint, ends
        # A crash during a long turn must not lose the end of the previous turn.
        target.n_previous_turn_rows = n_live if source is target else 0
        target.was_reused = n_live >= MIN_SHARED_TOKENS
        sequence.slot, sequence.n_computed = target.id, n_live

    def _park(self, evicted: list[Slot], prefilling: list[Sequence]) -> None:
        """Evict the slots and move the rows behind them down, so that prefills continue there.

        Otherwise they fill the gap first, and all their tokens read the tiles behind the gap too.
        To move a row takes a hundredth of the time to compute one.
        """
        if not evicted:
            return
        targets = [self._slots.all[sequence.slot] for sequence in prefilling]
        own = [self._slots.own_cells(target) for target in targets]
        for slot in evicted:
            self._saver.park(slot)
        if not (self._backend.traits.is_dense and self._backend.has_room_to_move):
            return
        n_new = sum(sequence.n_pending for sequence in prefilling)
        for target, n_own in zip(targets, own, strict=True):
            if 0 < n_own <= n_new:
                self._backend.move_down(target.id, target.n_rows - n_own)

    def _fork(self, source: Slot, target: Slot, n_tokens: int) -> bool:
        try:
            self._backend.copy_slot(source.id, target.id)
        except EngineError as error:
            _log.warning("engine: slot fork failed slot=%d: %s", source.id, error)
            return False
        self._slots.fork(source, target, n_tokens)
        if n_tokens < source.n_rows:
            self._backend.trim_slot(target.id, n_tokens)
        return True
