"""Speculative decoding of all running sequences: what to draft in the next step, and whether.

A step computes the last token of a sequence and its draft. Then each row is sampled in turn with
the sequence's own sampler, as long as the draft was right. The rows behind are removed.
"""

from dataclasses import dataclass, field
from functools import partial

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.scheduler.batch_planner import BatchItem, BatchLimits
from rekindle.engine.sequence import DECODING, Sequence
from rekindle.engine.slots import Slots
from rekindle.engine.speculation.acceptance import Rates, engine_rates, reply_rates
from rekindle.engine.speculation.drafter import Draft, Drafter, FindStored
from rekindle.engine.speculation.lengths import KEPT, Cost, draft_lengths
from rekindle.engine.speculation.step_costs import StepCosts
from rekindle.generation.drafts import Drafted
from rekindle.generation.model_state import ModelClass

MAX_DRAFT = 16  # tokens of one sequence in one step; picked
CAN_REMOVE_ROWS = frozenset({ModelClass.DENSE, ModelClass.SLIDING_WINDOW})


@dataclass(slots=True, eq=False)
class Speculation:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _rates: Rates = field(default_factory=engine_rates)
    _costs: StepCosts = field(default_factory=StepCosts)
    _n_deletions: int = 0

    @property
    def off_because(self) -> str | None:
        """Why nothing is ever drafted; None: drafts are on."""
        if not self._backend.n_draft_rows:
            return "It is switched off: --speculate off."
        model_class = self._backend.traits.model_class
        if model_class not in CAN_REMOVE_ROWS:
            return f"Rejected tokens cannot be removed from the state of a {model_class} model."
        return None

    def begin(self, sequence: Sequence) -> None:
        """Prepare a sequence that is about to get a slot. Its earlier reply may be in that slot."""
        request = sequence.request
        if not (request.speculate and sequence.is_sampled) or request.background:
            return
        if request.resumed is not None:
            return  # an engine has died with this request, and a draft may have been the cause
        if self.off_because is not None:
            return
        is_shared = request.cache_prompt and self._cache.is_on
        sequence.drafter = Drafter(
            sequence.tokens,
            self._earlier_reply(sequence) if request.cache_prompt else [],
            self._finder(sequence) if is_shared else None,
            reply_rates(self._rates),
            self._backend.eog_tokens,
        )

    def _finder(self, sequence: Sequence) -> FindStored:
        root, texts = sequence.keys.root, self._cache.texts
        return lambda tokens: texts.find(root, tokens)

    def _earlier_reply(self, sequence: Sequence) -> list[int]:
        """Return what followed the same tokens before: in a slot, or in the cache."""
        n_tokens = len(sequence.tokens)
        latest, found = 0.0, None
        for slot in self._slots.all:
            is_private = slot.sequence is not None and not slot.sequence.request.cache_prompt
            if slot.keys is None or is_private or slot.keys.root != sequence.keys.root:
                continue
            if slot.n_rows <= n_tokens or (found is not None and slot.last_used_at < latest):
                continue
            if sequence.keys.n_common(slot.keys, n_tokens) == n_tokens:
                latest, found = slot.last_used_at, slot
        if found is not None and found.keys is not None:
            return found.keys.tokens[n_tokens : found.n_rows]
        return self._cache.texts.after(sequence.keys.root, sequence.keys.between(0, n_tokens))

    def widen(self, plan: list[BatchItem], limits: BatchLimits) -> list[BatchItem]:
        """Add drafts to the sequences that decode, where that is expected to be faster."""
        if self._cache.texts.n_deletions != self._n_deletions:
            self._forget()
        drafts: list[Draft | None] = []
        n_prefill = 0
        for sequence, n_tokens in plan:
            sequence.draft = None
            if sequence.phase is not DECODING:
                n_prefill += n_tokens
            else:
                drafts.append(_draft_of(sequence))
        n_decoding = len(drafts)
        if not any(drafts):
            return plan
        n_room = min(
            self._backend.n_draft_rows,
            limits.max_tokens - n_prefill - n_decoding,
            limits.n_free_cells - n_prefill - n_decoding,
        )
        cost: Cost = partial(self._costs.ratio, n_decoding)
        if n_prefill:
            # Few enough beside the prefill that nobody notices.
            n_room, cost = min(n_room, int(n_prefill * (1 / KEPT - 1))), _nothing
        elif self._costs.is_stale(n_decoding):
            return plan  # so that it is measured
        elif not all(drafts) and cost(1, 0.0) * KEPT > 1:
            return plan  # some would pay for the drafts of the others
        if n_room <= 0:
            return plan
        # The replies that decode stand last in the plan.
        decoding = range(len(plan) - n_decoding, len(plan))
        chances = [
            _chances(plan[index].sequence, draft)
            for index, draft in zip(decoding, drafts, strict=True)
        ]
        lengths = draft_lengths(chances, n_room, cost)
        for index, draft, length in zip(decoding, drafts, lengths, strict=True):
            if draft is not None and length:
                sequence = plan[index].sequence
                sequence.draft = draft._replace(tokens=draft.tokens[:length])
                plan[index] = BatchItem(sequence, 1 + length)
        return plan

    def narrow(self, plan: list[BatchItem]) -> None:
        """Take the drafts back out of a plan."""
        for index, (sequence, _) in enumerate(plan):
            if sequence.draft is not None:
                sequence.draft = None
                plan[index] = BatchItem(sequence, 1)

    def observe_step(self, n_tokens: int, seconds: float) -> None:
        """Learn from a step without prefill."""
        self._costs.observe(n_tokens, seconds)

    def observe_sampling(self, n_tokens: int, seconds: float) -> None:
        self._costs.observe_sampling(n_tokens, seconds)

    def settle(self, sequence: Sequence, n_accepted: int) -> Drafted | None:
        """End the step of a sequence: remove the rows of rejected tokens, and count."""
        draft = sequence.draft
        if draft is None:
            return None
        sequence.draft = None
        if n_accepted < len(draft.tokens):
            self._backend.drop_draft(sequence.slot, sequence.n_computed)
        drafted = Drafted(draft.source, len(draft.tokens), n_accepted)
        self._cache.counters.drafts.note(drafted)
        return drafted

    def _forget(self) -> None:
        self._n_deletions = self._cache.texts.n_deletions
        for slot in self._slots.all:
            sequence = slot.sequence
            if sequence is not None and sequence.drafter is not None:
                sequence.drafter.forget(is_private=not sequence.request.cache_prompt)


def _draft_of(sequence: Sequence) -> Draft | None:
    n_most = min(MAX_DRAFT, sequence.max_length - len(sequence.tokens) - 1)
    if sequence.drafter is None or n_most <= 0:
        return None
    forced = sequence.sampler.forced_tokens() if sequence.sampler is not None else ()
    return sequence.drafter.draft(n_most, forced)


def _chances(sequence: Sequence, draft: Draft | None) -> list[float]:
    if sequence.drafter is None or draft is None:
        return []
    return sequence.drafter.chances(draft)


def _nothing(n_drafted: int, n_accepted: float) -> float:
    return 1.0
