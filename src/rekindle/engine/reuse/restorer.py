"""Restores stored blocks into the slot of a sequence, piece by piece, until its prefill begins.

A restore that fails, stalls or finds no cells is given up; the rest of the prompt is computed.
"""

import logging
import time
from dataclasses import dataclass

from rekindle.cache.index import Match
from rekindle.cache.policy import TAIL_GRAIN, checkpoint_positions
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.restore import Restore, RestorePiece
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import Reclaimed, SlotSaver
from rekindle.engine.reuse.divergence import MIN_SHARED_TOKENS
from rekindle.engine.scheduler.batch_planner import first_chunk
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import PromptEnd, Slots
from rekindle.errors import ContextFull, EngineError
from rekindle.generation.events import NO_SPANS, CacheSource
from rekindle.generation.model_state import ModelClass
from rekindle.link.activity_page import Activity, ActivityPage

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0  # for one read, and for a queue of reads that stands still; picked
MIN_PATIENCE_SECONDS = 1.0  # for the shared store, however fast the prefill would be; picked


@dataclass(slots=True, eq=False)
class Restorer:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _saver: SlotSaver
    _activity: ActivityPage

    def stores_rows_of(self, sequence: Sequence) -> bool:
        return sequence.request.cache_prompt and self._cache.is_on

    def begin(self, sequence: Sequence, match: Match, n_tokens: int) -> None:
        sequence.phase = Phase.RESTORING
        sequence.restore_began_at = sequence.restore_began_at or time.monotonic()
        sequence.restore = self._cache.restore(match, n_live=sequence.n_computed, n_tokens=n_tokens)

    def advance(self, sequence: Sequence, *, others_decode: bool) -> bool:
        """Import the pieces that have arrived, one per call while others decode.

        Return whether a piece was imported.
        """
        did_import = False
        while sequence.restore is not None and not sequence.restore.is_complete:
            if sequence.restore.has_failed:
                self._retry(sequence)
                continue
            piece = sequence.restore.next_piece()
            if piece is None:
                self._give_up_if_too_slow(sequence, sequence.restore)
                break
            if did_import and others_decode:
                break
            reclaimed = self._make_room(piece)
            if reclaimed is Reclaimed.LATER:
                break
            self._import(sequence, piece, has_room=reclaimed is Reclaimed.ONE)
            did_import = True
        self.begin_prefill_if_restored(sequence)
        return did_import

    def begin_prefill_if_restored(self, sequence: Sequence) -> None:
        """Begin the prefill, unless a restore is still on its way."""
        if sequence.restore is not None:
            if not sequence.restore.is_complete:
                return
            slot = self._slots.all[sequence.slot]
            slot.n_saved = max(slot.n_saved, sequence.n_computed)
            if not self._backend.traits.is_dense:
                slot.n_checkpoint = sequence.n_computed
            slot.was_reused = sequence.n_computed >= MIN_SHARED_TOKENS
            sequence.restore = None
        if sequence.restore_began_at is not None:
            sequence.restore_seconds += time.monotonic() - sequence.restore_began_at
            sequence.restore_began_at = None
        sequence.phase = Phase.PREFILLING
        if sequence.n_pending == 0 and sequence.n_end not in self._slots.all[sequence.slot].ends:
            self._drop_last_row(sequence)
        # Followers may have added stops at positions that have been restored since.
        sequence.stops = [stop for stop in sequence.stops if stop > sequence.n_computed]
        if self._backend.traits.is_dense and not self._backend.on_gpu:
            n_start, n_end = sequence.n_computed, len(sequence.tokens)
            if sequence.has_replied:
                # Alone, as it would have been: how many are computed together changes the logits.
                n_end -= 1
                sequence.add_stop(n_end)
            sequence.add_stop(n_start + first_chunk(n_start, n_end, self._backend.n_ubatch))
        elif not self._backend.traits.is_dense and self.stores_rows_of(sequence):
            n_start, n_prompt = sequence.n_computed, len(sequence.tokens)
            if 0 < n_prompt - TAIL_GRAIN <= n_start:
                # No later stop will take a checkpoint, and a fork may start anywhere.
                self._saver.take_checkpoint(sequence)
            for position in checkpoint_positions(n_start, n_prompt, sequence.request.boundaries):
                sequence.add_stop(position)

    def _give_up_if_too_slow(self, sequence: Sequence, restore: Restore) -> None:
        patience = PATIENCE_SECONDS
        per_token = self._saver.prefill_seconds_per_token
        is_shared = restore.awaited_source is CacheSource.SHARED
        if is_shared and per_token is not None:
            # The speed of a network is unknown before the first read from it.
            compute_seconds = per_token * restore.n_tokens
            patience = min(patience, max(MIN_PATIENCE_SECONDS, 2 * compute_seconds))
        is_stalled = restore.stalled_seconds > patience
        if not is_stalled and not self._is_slower_than_computing(sequence, restore, patience):
            return
        _log.warning(
            "engine: restore too slow, computing the rest request=%s source=%s",
            sequence.request.id,
            restore.awaited_source,
        )
        if not is_stalled:
            sequence.n_refused = restore.n_tokens - self._n_kept(sequence)
        elif is_shared:
            self._cache.note_slow_store()
        self._give_up(sequence)

    def _is_slower_than_computing(
        self, sequence: Sequence, restore: Restore, patience: float
    ) -> bool:
        """Return whether to compute the rest of a restore that has taken longer than `patience`."""
        assert sequence.restore_began_at is not None
        if time.monotonic() - sequence.restore_began_at <= patience:
            return False
        return not self._cache.gate.is_rest_worth_loading(
            restore.nodes_left,
            restore.n_tokens - self._n_kept(sequence),
            prefill_seconds_per_token=self._saver.prefill_seconds_per_token,
        )

    def _n_kept(self, sequence: Sequence) -> int:
        """Return how many restored rows remain if the restore is given up."""
        return sequence.n_computed if self._backend.traits.is_dense else 0

    def _import(self, sequence: Sequence, piece: RestorePiece, *, has_room: bool) -> None:
        if not has_room:
            _log.info(
                "engine: no cells for a restore, computing the rest request=%s", sequence.request.id
            )
            self._give_up(sequence)
            return
        self._activity.note(Activity.RESTORE, [sequence.request.number])
        if piece.is_checkpoint and self._backend.traits.is_dense:
            self._keep_end(sequence, piece)
            return
        began = time.perf_counter()
        try:
            if piece.is_checkpoint:
                self._backend.import_checkpoint(sequence.slot, piece.payload)
            else:
                self._backend.import_rows(sequence.slot, piece.start, piece.stop, piece.payload)
        except ContextFull:
            self._give_up(sequence)
            self._start_over(sequence)
            return
        except EngineError as error:
            _log.warning("engine: stored entry refused request=%s: %s", sequence.request.id, error)
            self._cache.distrust(piece.node, "the backend refused it")
            self._start_over(sequence)
            self._retry(sequence)
            return
        self._cache.note_put(len(piece.payload), time.perf_counter() - began)
        self._end_piece(sequence, piece)

    def _end_piece(self, sequence: Sequence, piece: RestorePiece) -> None:
        sequence.n_computed = piece.stop
        sequence.note_cached(piece.source, piece.stop)
        assert sequence.restore is not None
        sequence.restore.piece_done()

    def _keep_end(self, sequence: Sequence, piece: RestorePiece) -> None:
        """Keep the logits after a prompt. Those of the wrong size are dropped; the rows stay."""
        if len(piece.payload) != self._backend.logits_bytes:
            self._cache.distrust(piece.node, f"its logits have {len(piece.payload)} bytes")
            self._give_up(sequence)
            return
        end = PromptEnd(bytes(piece.payload), is_saved=True)
        self._slots.all[sequence.slot].keep_end(piece.stop, end)
        self._end_piece(sequence, piece)

    def _drop_last_row(self, sequence: Sequence) -> None:
        """Compute the last token after all: its row was there, and its logits were not."""
        slot, n_keep = self._slots.all[sequence.slot], sequence.n_computed - 1
        self._backend.trim_slot(slot.id, n_keep)
        self._slots.cut(slot, n_keep)
        slot.n_saved = min(slot.n_saved, n_keep)
        slot.n_previous_turn_rows = min(slot.n_previous_turn_rows, n_keep)
        sequence.n_computed = n_keep
        sequence.spans = sequence.spans.cut(n_keep)

    def _make_room(self, piece: RestorePiece) -> Reclaimed:
        # An import writes the whole block, even if only a part of it is kept.
        n_cells = piece.node.n_tokens
        if piece.is_checkpoint:
            n_cells = piece.stop if self._backend.traits.model_class is ModelClass.OPAQUE else 0
        while self._slots.n_cells_free < n_cells:
            if (reclaimed := self._saver.reclaim_one(must=True)) is not Reclaimed.ONE:
                return reclaimed
        return Reclaimed.ONE

    def _retry(self, sequence: Sequence) -> None:
        """Restore from the entries that are left, after a bad one was dropped from the index."""
        self._give_up(sequence)
        sequence.restore = None
        match = self._cache.match(sequence.keys, len(sequence.tokens) - 1)
        if match.n_tokens > sequence.n_computed:
            self.begin(sequence, match, match.n_tokens)

    def _give_up(self, sequence: Sequence) -> None:
        assert sequence.restore is not None
        sequence.restore.give_up()
        if not self._backend.traits.is_dense:
            self._start_over(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        slot = self._slots.all[sequence.slot]
        self._backend.clear_slot(slot.id)
        self._slots.cut(slot, 0)
        slot.n_saved = slot.n_previous_turn_rows = slot.n_checkpoint = 0
        slot.ends = {}
        sequence.n_computed = 0
        if not sequence.is_resumed:
            sequence.spans = NO_SPANS
