"""Deletes the rows of slots, and keeps requests that still run from storing theirs."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.cache.keys import PrefixKeys
from rekindle.engine.export.persist_queue import PersistQueue
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.slots import Slots
from rekindle.generation.request import CacheTerms

IsDeleted = Callable[[PrefixKeys, int, CacheTerms], bool]  # keys, tokens that count, terms


@dataclass(slots=True, eq=False)
class LiveRows:
    _slots: Slots
    _saver: SlotSaver
    _run_queue: RunQueue
    _persisting: PersistQueue

    def forget(self, is_deleted: IsDeleted) -> int:
        """Empty idle slots, and make the rows of running and waiting requests private.

        Such a request continues for its client. Nothing of it is stored or shared, and its slot is
        emptied at its end. Return the number of slots.
        """
        n_slots = 0
        for slot in self._slots.idle():
            assert slot.keys is not None
            if is_deleted(slot.keys, slot.n_rows, slot.terms):
                self._saver.clear(slot)
                n_slots += 1
        for sequence in (*self._run_queue.running, *self._run_queue.waiting):
            request = sequence.request
            if request.cache_prompt and is_deleted(
                sequence.keys, len(sequence.tokens), request.terms
            ):
                sequence.make_private()
                n_slots += sequence.slot >= 0
        self._persisting.forget(is_deleted)
        return n_slots
