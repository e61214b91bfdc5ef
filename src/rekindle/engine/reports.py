"""Progress of a prompt for its reader, and the status of a slot."""

import time
from dataclasses import dataclass

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.orders import Outbox
from rekindle.engine.sequence import Sequence
from rekindle.engine.slots import Slot
from rekindle.generation.events import PrefillProgress, PromptEvaluated
from rekindle.generation.status import SlotPhase, SlotStatus


@dataclass(slots=True, eq=False)
class Reports:
    _cache: PrefixCache
    _outbox: Outbox

    def prefilled(self, sequence: Sequence) -> None:
        """Report that a chunk of the prompt was computed, perhaps the last one."""
        if sequence.is_evaluated:
            return  # it was requeued before its first token
        n_prompt = len(sequence.request.prompt)
        if sequence.n_computed == n_prompt:
            self.evaluated(sequence)
            return
        assert sequence.admitted_at is not None
        elapsed = time.monotonic() - sequence.admitted_at
        progress = PrefillProgress(sequence.n_computed, n_prompt, elapsed, sequence.spans)
        self._outbox.put(sequence.request.id, progress)

    def evaluated(self, sequence: Sequence) -> None:
        """Report that the whole prompt is computed; count its sources, apply its name and pins."""
        assert sequence.admitted_at is not None
        sequence.is_evaluated = True
        elapsed = time.monotonic() - sequence.admitted_at
        for source, n_tokens in sequence.spans.by_source().items():
            self._cache.counters.of(source).tokens += n_tokens
        evaluated = PromptEvaluated(
            n_prompt=len(sequence.request.prompt),
            n_cached=sequence.spans.n_tokens,
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
        phase=_slot_phase(sequence) if sequence else SlotPhase.IDLE,
        n_cached=sequence.spans.n_tokens if sequence else 0,
        namespace=slot.terms.namespace,
    )


def _slot_phase(sequence: Sequence) -> SlotPhase:
    """Return IDLE for a sequence that has ended since another thread read it."""
    return SlotPhase.__members__.get(sequence.phase.name, SlotPhase.IDLE)
