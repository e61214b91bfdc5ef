"""Where a sequence starts: the longest prefix that is live or stored, brought into its slot.

Live rows first: an idle slot goes on or is cut back, any other one is forked and keeps what it
has. Then stored blocks behind them. What is left is computed.
"""

import logging
import time
from typing import NamedTuple

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.index import Match
from rekindle.cache.policy import TAIL_GRAIN, checkpoint_positions
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.restore import Restore, RestorePiece
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.divergence import MIN_SHARED_TOKENS, mark_parting
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import GROWTH_CELLS, Slot, Slots
from rekindle.errors import ContextFull, EngineError
from rekindle.generation.events import NO_SPANS, CacheSource
from rekindle.generation.model_state import ModelClass

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0  # with a disk that was asked for an entry; picked
MIN_PATIENCE_SECONDS = 1.0  # with the shared store, even where computing takes no time; picked


class Start(NamedTuple):
    """|-- n_live, in `source` --|-- up to n_stored, of `match` --|-- to be computed --|"""

    source: Slot | None
    n_live: int
    match: Match | None
    n_stored: int

    @property
    def n_tokens(self) -> int:
        return max(self.n_live, self.n_stored)

    @property
    def n_findable(self) -> int:
        """With what is stored and takes longer to load than to compute."""
        return max(self.n_tokens, self.match.n_tokens if self.match else 0)


COLD = Start(None, 0, None, 0)


class WarmStart:
    def __init__(
        self, backend: Backend, slots: Slots, cache: PrefixCache, saver: SlotSaver
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._cache = cache
        self._saver = saver
        traits = backend.traits
        self._has_states = traits.model_class is not ModelClass.DENSE
        # Of a model that cannot be stored nothing is sure but that a sequence can go on. An
        # opaque state would not be shared but doubled.
        self._is_opaque = traits.model_class is ModelClass.OPAQUE
        self._can_fork = traits.off_because is None and not self._is_opaque

    def find(self, sequence: Sequence) -> Start:
        if not sequence.request.cache_prompt:
            return COLD
        n_limit = len(sequence.tokens) - 1  # one token must be computed for its logits
        n_live_limit = n_limit if sequence.is_sampled else n_limit + 1
        source, n_live = None, 0
        for slot in self._slots.all:
            n_usable = self._n_usable(slot, sequence, n_live_limit)
            if n_usable > n_live or (n_usable == n_live > 0 and slot.is_idle):
                source, n_live = slot, n_usable
        match = self._cache.match(sequence.keys, n_limit)
        if match.n_tokens > n_live:
            # Stored rows go behind whole blocks only: a cut one would leave its cells out of
            # step with the tiles that attention works in. A state comes with all of its rows.
            n_whole = 0 if self._has_states else n_live // BLOCK_TOKENS * BLOCK_TOKENS
            n_stored = self._cache.gate.n_worth_loading(
                match,
                n_live=n_whole,
                n_gained=match.n_tokens - n_live,
                prefill_seconds_per_token=self._saver.prefill_seconds_per_token,
            )
            if n_stored > n_live:
                return Start(source if n_whole else None, n_whole, match, n_stored)
        return Start(source, n_live, match, 0)

    def ask_others(self, sequence: Sequence) -> None:
        """Whether the shared store has more of its prompt is asked as soon as it arrives.

        The disk, which answers soon, is asked before: it may not have told all that it has.
        """
        if not sequence.request.cache_prompt:
            return
        self._cache.look_up(sequence.keys, len(sequence.tokens) - 1)
        if not self._cache.has_others:
            return
        sequence.probe = self._cache.ask_others(
            sequence.keys,
            len(sequence.tokens) - 1,
            n_have=self.find(sequence).n_tokens,
            prefill_seconds_per_token=self._saver.prefill_seconds_per_token,
        )

    def is_asking(self, sequence: Sequence) -> bool:
        probe = sequence.probe
        if probe is not None and self._cache.is_asking(probe, time.monotonic()):
            return True
        sequence.probe = None
        return False

    def serve_without_slot(self, sequence: Sequence, start: Start) -> bool:
        """Whether all of a prompt that is only to be evaluated is live: it needs no slot."""
        if sequence.is_sampled or start.source is None or start.n_live < len(sequence.tokens):
            return False
        start.source.last_used_at = time.monotonic()
        _extend(sequence, CacheSource.LIVE, start.n_live)
        return True

    def find_leader(self, sequence: Sequence, start: Start, running: list[Sequence]) -> None:
        """Chooses whom to wait for: a sequence that is about to compute a shared prefix."""
        if not sequence.request.cache_prompt or not (self._can_fork or self._cache.is_on):
            return
        n_have = start.n_tokens
        n_limit = len(sequence.tokens) - 1
        for other in running:
            if not _is_leading(other) or not other.request.cache_prompt:
                continue
            if other.keys.root != sequence.keys.root:
                continue
            n_common = sequence.keys.n_common(other.keys, n_limit)
            if n_common > other.n_computed and n_common >= n_have + MIN_SHARED_TOKENS:
                sequence.leader, sequence.n_awaited, n_have = other, n_common, n_common
        if sequence.leader is not None and self._has_states:
            sequence.leader.add_stop(sequence.n_awaited)

    def is_following(self, sequence: Sequence) -> bool:
        leader = sequence.leader
        if leader and _is_leading(leader) and leader.n_computed < sequence.n_awaited:
            return True
        sequence.leader = None
        return False

    def place(
        self, sequence: Sequence, start: Start, running: list[Sequence], *, others_decode: bool
    ) -> bool:
        """Gives it a slot with as much of its prefix as there is; False: not yet."""
        n_promised = sum(other.n_pending for other in running)
        n_promised += len(sequence.tokens) - start.n_live + GROWTH_CELLS * (len(running) + 1)
        is_whole_prompt = sequence.is_sampled and start.n_live == len(sequence.tokens) - 1
        target = self._choose_target(sequence, start, n_promised, is_whole_prompt=is_whole_prompt)
        must = not sequence.request.background
        if target is None or not self._make_room(start, target, n_promised, must=must):
            return False
        if not self._flush_deferred_deletes(target, start, others_decode=others_decode):
            return False
        if self._has_states and self._keeps(sequence):
            mark_parting(sequence, start.n_findable, self._slots, self._cache)
        self._move_in(sequence, start, target)
        _extend(sequence, CacheSource.LIVE, sequence.n_computed)
        if start.match is not None:
            if start.match.n_tokens > start.n_tokens:
                sequence.n_refused = start.match.n_tokens - start.n_tokens
                self._cache.gate.note_refusal()
            self._cache.use(start.match, sequence.request.terms)
            if start.n_stored:
                self._begin_restore(sequence, start.match, start.n_stored)
        if not sequence.request.background:
            n_new = len(sequence.tokens) - start.n_tokens
            rank = sequence.request.terms.rank
            self._saver.evict_for_prefill(n_new, rank, others_decode=others_decode)
        self._begin_prefill_if_ready(sequence)
        return True

    def advance_restore(self, sequence: Sequence, *, others_decode: bool) -> bool:
        """Puts what has arrived into the slot, one piece if others wait. True: there was some."""
        did_put = False
        while sequence.restore is not None and not sequence.restore.is_complete:
            if sequence.restore.has_failed:
                self._look_again(sequence)
                continue
            piece = sequence.restore.next_piece()
            if piece is None and self._is_too_slow(sequence, sequence.restore):
                source = sequence.restore.awaited_source
                _log.warning(
                    "request=%s computes the rest: %s is too slow", sequence.request.id, source
                )
                if source is CacheSource.SHARED:
                    self._cache.note_slow_store()
                self._give_up(sequence)
                break
            if piece is None or (did_put and others_decode):
                break
            self._put(sequence, piece)
            sequence.restore_moved_at = time.monotonic()
            did_put = True
        self._begin_prefill_if_ready(sequence)
        return did_put

    def _is_too_slow(self, sequence: Sequence, restore: Restore) -> bool:
        now = time.monotonic()
        if now > sequence.restore_moved_at + PATIENCE_SECONDS:
            return True
        per_token, began_at = self._saver.prefill_seconds_per_token, sequence.restore_began_at
        if restore.awaited_source is not CacheSource.SHARED or per_token is None or not began_at:
            return False
        # Nobody knows how fast a network is before the first read from it.
        return now - began_at > max(MIN_PATIENCE_SECONDS, 2 * per_token * restore.n_tokens)

    def _n_usable(self, slot: Slot, sequence: Sequence, n_limit: int) -> int:
        if slot.keys is None or (slot.sequence and not _is_source(slot.sequence)):
            return 0
        if slot.keys.root != sequence.keys.root:
            return 0
        n_rows = slot.n_rows
        n_common = sequence.keys.n_common(slot.keys, min(n_limit, n_rows))
        if not self._can_fork:
            return n_common if slot.is_idle and n_common == n_rows else 0
        if n_common == n_rows or not self._has_states:
            return n_common
        # A fork has the state at the end of its source: only the slot itself can be cut back,
        # and not at the cost of a dearer conversation.
        may_cut = slot.is_idle and sequence.request.terms.rank <= slot.rank
        return n_common if may_cut and self._backend.can_trim(slot.id, n_common) else 0

    def _choose_target(
        self, sequence: Sequence, start: Start, n_promised: int, *, is_whole_prompt: bool
    ) -> Slot | None:
        """The source itself where nothing is lost or nothing else fits, else the least used.

        Nothing worth a slot is lost when it holds the whole prompt: its reply is made again.
        """
        source = start.source
        idle = self._slots.idle()
        target = self._slots.empty() or (idle[0] if idle else None)
        if source is None or not source.is_idle:
            return target
        if sequence.request.background and self._slots.empty() is None:
            return source  # it computes what its own source will be, and takes no one else's slot
        fits_beside = (
            self._slots.cells_of(self._staying(source)) + n_promised <= self._slots.n_cells
        )
        is_beside_free = target is not None and (target.is_empty or target.rank > source.rank)
        if sequence.request.terms.rank > source.rank and is_beside_free and fits_beside:
            return target  # a side request leaves the conversation that it starts from alone
        if self._has_states or is_whole_prompt:
            return source
        return target if source.n_rows > start.n_live and fits_beside else source

    def _staying(self, source: Slot | None) -> list[Slot]:
        return [slot for slot in self._slots.all if slot.sequence or slot is source]

    def _make_room(self, start: Start, target: Slot, n_promised: int, *, must: bool) -> bool:
        """Frees idle cells until everyone's prompt fits.

        Alone, a sequence is always let in, if it `must`.
        """
        if not self._slots.rows_take_cells:
            return True
        is_alone = must and not any(slot.sequence for slot in self._slots.all)
        n_staying = self._slots.cells_of(self._staying(start.source))
        if target is start.source:
            n_staying -= target.n_rows - start.n_live
        if n_staying + n_promised > self._slots.n_cells and not is_alone:
            return False
        while self._slots.n_cells_free + self._freed_by(target, start) < n_promised:
            if not self._saver.reclaim_one(keep=start.source, must=False):
                # What is left cannot be stored yet, or nothing is left.
                return is_alone
        return True

    def _freed_by(self, target: Slot, start: Start) -> int:
        """Cells that moving into the target sets free."""
        if target is start.source:
            return target.n_rows - start.n_live
        others = [slot for slot in self._slots.all if slot is not target]
        return self._slots.n_cells_used - self._slots.cells_of(others)

    def _flush_deferred_deletes(self, target: Slot, start: Start, *, others_decode: bool) -> bool:
        """Whatever the slot holds and is about to lose is stored first."""
        if target.is_empty:
            return True
        goes_on = target is start.source and target.n_rows == start.n_live
        if goes_on and not self._has_states:
            return True  # its rows stay, and there is no state at their end to be lost
        return self._saver.save_all(target, Reason.RECLAIM, others_decode=others_decode)

    def _move_in(self, sequence: Sequence, start: Start, target: Slot) -> None:
        source, n_live = start.source, start.n_live
        n_saved = min(source.n_saved, n_live) if source else 0
        n_checkpoint = source.n_checkpoint if source and source.n_checkpoint <= n_live else 0
        if source is target:
            if n_live < target.n_rows:
                self._backend.trim_slot(target.id, n_live)
                self._slots.cut(target, n_live)
        else:
            self._saver.clear(target)
            if source is not None and not self._fork(source, target, n_live):
                n_live = n_saved = n_checkpoint = 0
        terms = sequence.request.terms
        target.rank = min(target.rank, terms.rank) if source is target else terms.rank
        target.terms, target.n_prompt = terms, len(sequence.request.prompt)
        target.sequence, target.keys, target.n_kept_rows = sequence, sequence.keys, 0
        target.n_saved, target.n_checkpoint = n_saved, n_checkpoint
        # This turn may be long, and a crash in it must not take the end of the last one along.
        target.n_previous_turn_rows = n_live if source is target else 0
        target.was_reused = n_live >= MIN_SHARED_TOKENS
        sequence.slot, sequence.n_computed = target.id, n_live

    def _fork(self, source: Slot, target: Slot, n_tokens: int) -> bool:
        try:
            self._backend.copy_slot(source.id, target.id)
        except EngineError as error:
            _log.warning("slot %d cannot be forked: %s", source.id, error)
            return False
        self._slots.fork(source, target, n_tokens)
        if n_tokens < source.n_rows:
            self._backend.trim_slot(target.id, n_tokens)
        return True

    def _begin_restore(self, sequence: Sequence, match: Match, n_tokens: int) -> None:
        sequence.phase = Phase.RESTORING
        sequence.restore_moved_at = time.monotonic()
        sequence.restore_began_at = sequence.restore_began_at or sequence.restore_moved_at
        sequence.restore = self._cache.restore(match, n_live=sequence.n_computed, n_tokens=n_tokens)

    def _begin_prefill_if_ready(self, sequence: Sequence) -> None:
        if sequence.restore is not None:
            if not sequence.restore.is_complete:
                return
            slot = self._slots.all[sequence.slot]
            slot.n_saved = max(slot.n_saved, sequence.n_computed)
            if self._has_states:
                slot.n_checkpoint = sequence.n_computed
            slot.was_reused = sequence.n_computed >= MIN_SHARED_TOKENS
            sequence.restore = None
        if sequence.restore_began_at is not None:
            sequence.restore_seconds += time.monotonic() - sequence.restore_began_at
            sequence.restore_began_at = None
        sequence.phase = Phase.PREFILLING
        # Others may have asked for a stop on the way that was restored.
        sequence.stops = [stop for stop in sequence.stops if stop > sequence.n_computed]
        if not self._has_states:
            # Alone, as after a restore of all before it: the same prompt has the same logits
            # however much of it was stored.
            sequence.add_stop(len(sequence.tokens) - 1)
        elif self._keeps(sequence):
            n_start, n_prompt = sequence.n_computed, len(sequence.tokens)
            if 0 < n_prompt - TAIL_GRAIN <= n_start:
                # No more will be taken, and a fork starts where its source happens to be.
                self._saver.take_checkpoint(sequence)
            for position in checkpoint_positions(n_start, n_prompt, sequence.request.boundaries):
                sequence.add_stop(position)

    def _keeps(self, sequence: Sequence) -> bool:
        return sequence.request.cache_prompt and self._cache.is_on

    def _put(self, sequence: Sequence, piece: RestorePiece) -> None:
        if not self._has_cells_for(piece):
            _log.info("request=%s computes the rest: no cells to restore to", sequence.request.id)
            self._give_up(sequence)
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
            _log.warning("request=%s: a stored entry is refused: %s", sequence.request.id, error)
            self._cache.distrust(piece.node)
            self._look_again(sequence, is_slot_empty=True)
            return
        self._cache.note_put(len(piece.payload), time.perf_counter() - began)
        sequence.n_computed = piece.stop
        _extend(sequence, piece.source, piece.stop)
        assert sequence.restore is not None
        sequence.restore.piece_done()

    def _has_cells_for(self, piece: RestorePiece) -> bool:
        # A block passes through whole, also where only a part of it stays.
        n_cells = piece.node.n_tokens
        if piece.is_checkpoint:
            n_cells = piece.stop if self._is_opaque else 0
        while self._slots.n_cells_free < n_cells:
            if not self._saver.reclaim_one(must=True):
                return False
        return True

    def _look_again(self, sequence: Sequence, *, is_slot_empty: bool = False) -> None:
        """After a bad entry, which is out of the index by now: what else is there?"""
        assert sequence.restore is not None
        sequence.restore.give_up()
        sequence.restore = None
        if is_slot_empty or self._has_states:
            self._start_over(sequence)
        match = self._cache.match(sequence.keys, len(sequence.tokens) - 1)
        if match.n_tokens > sequence.n_computed:
            self._begin_restore(sequence, match, match.n_tokens)

    def _give_up(self, sequence: Sequence) -> None:
        assert sequence.restore is not None
        sequence.restore.give_up()
        if self._has_states:
            self._start_over(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        slot = self._slots.all[sequence.slot]
        self._backend.clear_slot(slot.id)
        self._slots.cut(slot, 0)
        slot.n_saved = slot.n_previous_turn_rows = slot.n_checkpoint = 0
        sequence.n_computed = 0
        if not sequence.is_resumed:
            sequence.spans = NO_SPANS


def _is_leading(sequence: Sequence) -> bool:
    return sequence.phase in (Phase.RESTORING, Phase.PREFILLING)


def _is_source(sequence: Sequence) -> bool:
    """Whose rows others may share: complete ones, of a request that keeps its rows."""
    return sequence.phase is not Phase.RESTORING and sequence.request.cache_prompt


def _extend(sequence: Sequence, source: CacheSource, stop: int) -> None:
    """Notes that the prompt is there up to `stop`; neighbours of one source become one span."""
    if not sequence.is_resumed:
        sequence.spans = sequence.spans.extended(source, stop)
