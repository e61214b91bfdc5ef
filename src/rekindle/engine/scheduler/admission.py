"""Admits waiting sequences to slots, in order of arrival, and advances their restores."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.reports import Reports
from rekindle.engine.reuse.placement import Placement
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.engine.reuse.restorer import Restorer
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import PREFILLING, RESTORING, Sequence
from rekindle.engine.slots import Slots
from rekindle.engine.speculation.speculation import Speculation
from rekindle.engine.step_time import STEP_SECONDS
from rekindle.generation.events import StopCause
from rekindle.link.activity_page import Activity, ActivityPage

# An ended prompt that is shorter is not evicted for the others of its burst: on a GPU, storing it
# between their batches costs more than its rows. Picked; 512 lose there, and 4,096 gain.
SLOW_ROWS, SLOW_ROWS_ON_GPU = 64, 2048
LOOK_AGAIN_SECONDS = 1.0  # for a sequence without room, if nothing is seen to change; picked


class _NoRoom(NamedTuple):
    """The state in which a sequence could not be placed. Until it changes, it cannot be either."""

    sequence: Sequence
    n_slot_changes: int
    n_cache_events: int
    until: float


@dataclass(slots=True, eq=False)
class Admission:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _run_queue: RunQueue
    _finder: PrefixFinder
    _placement: Placement
    _restorer: Restorer
    _reports: Reports
    _activity: ActivityPage
    _speculation: Speculation
    _no_room: _NoRoom | None = None
    _idle_seen: frozenset[int] = frozenset()  # slots that were idle when the way was cleared

    def admit_waiting(self) -> bool:
        """Admit sequences in order of arrival. Return whether one was admitted.

        A sequence that waits for a lookup, or for another's prefill, is skipped.
        """
        queue = self._run_queue
        if not queue.waiting:
            return False
        others_decode = queue.is_decoding
        n_admitted = 0
        for sequence in list(queue.waiting):
            if len(queue.running) == self._backend.n_slots or queue.is_context_full:
                break
            if self._finder.awaits_lookup(sequence) or self._finder.awaits_leader(sequence):
                continue
            if sequence.request.background and queue.running:
                break  # background requests run one at a time
            if self._still_has_no_room(sequence):
                break
            # Taken before the attempt: rows that it exports are a change, too.
            no_room = _NoRoom(
                sequence,
                self._slots.n_changes,
                self._cache.n_events,
                time.monotonic() + LOOK_AGAIN_SECONDS,
            )
            self._activity.note(Activity.ADMIT, [sequence.request.number])
            start = self._finder.find(sequence)
            if self._placement.serve_without_slot(sequence, start):
                n_admitted += 1
                sequence.admitted_at = sequence.admitted_at or time.monotonic()
                self._reports.evaluated(sequence)
                queue.finish(sequence, StopCause.LENGTH)
                continue
            self._finder.find_leader(sequence, start, queue.running)
            if sequence.leader is not None:
                continue
            self._speculation.begin(sequence)
            if not self._placement.place(
                sequence, start, queue.running, others_decode=others_decode
            ):
                is_exporting = self._slots.n_changes > no_room.n_slot_changes
                if sequence.request.background and not is_exporting:
                    queue.finish(sequence, StopCause.YIELDED)  # it never evicts other rows
                    continue
                self._no_room = no_room
                break
            queue.admit(sequence)
            self._idle_seen = self._idle_slots()
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            n_admitted += 1
        return n_admitted > 0

    def _still_has_no_room(self, sequence: Sequence) -> bool:
        """Return whether nothing has changed since the sequence could not be placed.

        A look at a long prompt takes milliseconds, which running streams would pay in each step.
        """
        if self._no_room is None or self._no_room.sequence is not sequence:
            return False
        seen = (self._no_room.n_slot_changes, self._no_room.n_cache_events)
        now_seen = (self._slots.n_changes, self._cache.n_events)
        if seen == now_seen and time.monotonic() < self._no_room.until:
            return True
        self._no_room = None
        return False

    @property
    def may_clear_way(self) -> bool:
        """Whether a slot has become idle while prompts are prefilled."""
        queue = self._run_queue
        return (
            any(each.phase is PREFILLING for each in queue.running)
            and not queue.is_in_background
            and not self._idle_slots() <= self._idle_seen
        )

    def clear_way(self) -> None:
        """Evict slots that slow the running prefills down. No batch may run meanwhile."""
        prefilling = [each for each in self._run_queue.running if each.phase is PREFILLING]
        if self._placement.clear_way(prefilling, others_decode=self._run_queue.is_decoding):
            self._idle_seen = self._idle_slots()

    def _idle_slots(self) -> frozenset[int]:
        n_least = SLOW_ROWS_ON_GPU if self._backend.on_gpu else SLOW_ROWS
        return frozenset(
            slot.id for slot in self._slots.all if slot.is_idle and slot.n_rows >= n_least
        )

    def advance_restores(self) -> bool:
        """Import restored pieces. Return whether there was one.

        While others decode, one piece per step: each import delays their next token. Otherwise
        for 20 ms: a new request waits for the step to end. In the background, one piece.
        """
        restoring = [each for each in self._run_queue.running if each.phase is RESTORING]
        if not restoring:
            return False
        one_per_step = self._run_queue.is_decoding or self._run_queue.is_in_background
        deadline = time.monotonic() + STEP_SECONDS
        did_import = False
        for sequence in restoring:
            while sequence.phase is RESTORING and self._restorer.advance(
                sequence, others_decode=True
            ):
                did_import = True
                if one_per_step or time.monotonic() >= deadline:
                    return True
        return did_import
