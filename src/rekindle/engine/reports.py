"""What is told of a prompt while it is computed and when it is, and of a slot to whoever looks."""

import time

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.outbox import Outbox
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import Slot
from rekindle.generation.events import PrefillProgress, PromptEvaluated
from rekindle.generation.status import SlotPhase, SlotStatus

_SHOWN = {
    Phase.RESTORING: SlotPhase.RESTORING,
    Phase.PREFILLING: SlotPhase.PREFILLING,
    Phase.DECODING: SlotPhase.DECODING,
}


class Reports:
    def __init__(self, cache: PrefixCache, outbox: Outbox) -> None:
        self._cache = cache
        self._outbox = outbox

    def prefilled(self, sequence: Sequence) -> None:
        """A chunk of its prompt, perhaps the last one."""
        n_prompt = len(sequence.request.prompt)
        if sequence.n_computed == n_prompt:
            self.evaluated(sequence)
            return
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        progress = PrefillProgress(sequence.n_computed, n_prompt, elapsed, sequence.spans)
        self._outbox.put(sequence.request.id, progress)

    def evaluated(self, sequence: Sequence) -> None:
        """All of its prompt: what it was made of is counted, and its name and pins hold."""
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        for span in sequence.spans:
            self._cache.counters.of(span.source).tokens += span.stop - span.start
        evaluated = PromptEvaluated(
            n_prompt=len(sequence.request.prompt),
            n_cached=sequence.n_cached,
            queue_seconds=sequence.admitted_at - sequence.arrived_at,
            prefill_seconds=elapsed - sequence.restore_seconds,
            restore_seconds=sequence.restore_seconds,
            spans=sequence.spans,
            n_refused=sequence.n_refused,
            n_missing_checkpoint_tokens=sequence.n_missing_checkpoint_tokens,
        )
        self._outbox.put(sequence.request.id, evaluated)
        if sequence.request.cache_prompt:
            terms = sequence.request.terms
            self._cache.give_name(sequence.keys, len(sequence.request.prompt), terms)
            self._cache.pin(sequence.keys, terms)


def slot_status(slot: Slot) -> SlotStatus:
    sequence = slot.sequence
    return SlotStatus(
        id=slot.id,
        request_id=sequence.request.id if sequence else None,
        session=slot.terms.session,
        rank=slot.rank,
        n_prompt=slot.n_prompt,
        n_rows=slot.n_rows,
        n_generated=max(len(sequence.tokens) - slot.n_prompt, 0) if sequence else 0,
        # It may have ended since it was looked at.
        phase=_SHOWN.get(sequence.phase, SlotPhase.IDLE) if sequence else SlotPhase.IDLE,
        n_cached=sequence.n_cached if sequence else 0,
    )
