"""The sequences that run and those that wait, and how a sequence ends or is requeued.

Owned by the engine thread; other threads may read the two lists.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from rekindle.engine.backend import Backend
from rekindle.engine.export.persist_queue import PersistQueue
from rekindle.engine.orders import Outbox
from rekindle.engine.sequence import DECODING, PREFILLING, RESTORING, Phase, Sequence
from rekindle.engine.slots import Slots
from rekindle.errors import RekindleError
from rekindle.generation.drafts import Drafted
from rekindle.generation.events import Finished, StopCause

MIN_WAIT_SECONDS = 0.001  # picked


@dataclass(slots=True, eq=False)
class RunQueue:
    """Either all sequences are background requests, or none is."""

    _backend: Backend
    _slots: Slots
    _persisting: PersistQueue
    _outbox: Outbox
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # in order of arrival
    is_context_full: bool = False  # by llama.cpp's count, until a sequence ends

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.waiting

    @property
    def is_in_background(self) -> bool:
        return bool(self.running) and self.running[0].request.background

    @property
    def has_foreground(self) -> bool:
        return any(not sequence.request.background for sequence in self._all())

    @property
    def is_decoding(self) -> bool:
        return any(sequence.phase is DECODING for sequence in self.running)

    @property
    def is_prefilling(self) -> bool:
        """Whether every running sequence prefills."""
        return bool(self.running) and all(each.phase is PREFILLING for each in self.running)

    def seconds_to_wait(self, most: float) -> float:
        """Return the seconds until a lookup of a waiting sequence times out, at most `most`.

        Never 0: a sequence without a slot has nothing else to do.
        """
        now = time.monotonic()
        shared = [each.shared_lookup for each in self.waiting if each.shared_lookup is not None]
        on_disk = [each.disk_lookup for each in self.waiting if each.disk_lookup is not None]
        patience = [each.deadline - now for each in shared if not each.is_over]
        patience += [each.deadline - now for each in on_disk if not each.is_over(now)]
        return min(most, max(min(patience), MIN_WAIT_SECONDS)) if patience else most

    def admit(self, sequence: Sequence) -> None:
        """Move a sequence that has a slot to the running ones."""
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Take the sequence's slot away and let it wait in front of all others."""
        self._leave_slot(sequence)
        sequence.is_resumed = True
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)

    def finish(
        self,
        sequence: Sequence,
        cause: StopCause,
        token: int | None = None,
        drafted: Drafted | None = None,
    ) -> None:
        finished = Finished(cause, token, drafted)
        if sequence.request.terms.persist and cause is not StopCause.YIELDED:
            self._persisting.add(sequence, finished)
        else:
            self._outbox.put(sequence.request.id, finished)
        self._release(sequence)

    def fail(self, sequence: Sequence, error: RekindleError) -> None:
        self._outbox.put(sequence.request.id, error)
        self._release(sequence)

    def cancel(self, request_id: str) -> None:
        for sequence in self._all():
            if sequence.request.id == request_id:
                self._release(sequence)

    def yield_background(self) -> None:
        for sequence in self._all():
            if sequence.request.background:
                self.finish(sequence, StopCause.YIELDED)

    def fail_all(self, error: RekindleError) -> None:
        for sequence in self._all():
            self.fail(sequence, error)

    def _all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def _release(self, sequence: Sequence) -> None:
        self.is_context_full = False
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        if sequence.sampler is not None:
            sequence.sampler.close()
        sequence.phase = Phase.DONE

    def _leave_slot(self, sequence: Sequence) -> None:
        """Make the slot idle. Computed rows stay in it."""
        self.running.remove(sequence)
        slot = self._slots.all[sequence.slot]
        is_half_restored = sequence.phase is RESTORING and self._backend.traits.has_checkpoints
        if sequence.restore is not None:
            sequence.restore.give_up()
            sequence.restore = None
        slot.sequence, slot.n_kept_rows = None, sequence.n_computed
        slot.last_used_at = time.monotonic()
        slot.cost_seconds, slot.reload_seconds = 0.0, None
        slot.evicted_rows_rechecked = False
        self._slots.n_changes += 1
        sequence.slot, sequence.n_computed, sequence.stops = -1, 0, []
        if is_half_restored or not sequence.request.cache_prompt:
            self._backend.clear_slot(slot.id)
            self._slots.forget(slot)
