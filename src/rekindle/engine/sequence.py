"""A request while it runs or waits for a slot. Only the engine thread changes it."""

import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Optional

from rekindle.cache.disk.residency import DiskLookup
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.restore import Restore
from rekindle.cache.shared.transfers import SharedLookup
from rekindle.engine.backend import Sampler
from rekindle.engine.speculation.drafter import Draft, Drafter
from rekindle.generation.events import NO_SPANS, CacheSource, Spans
from rekindle.generation.request import GenerationRequest


class Phase(Enum):
    WAITING = auto()  # no slot yet, or requeued
    RESTORING = auto()  # stored rows are being imported into the slot
    PREFILLING = auto()
    DECODING = auto()  # one new token per step
    DONE = auto()


# For hot code: looking up a member of an Enum is slow.
RESTORING, PREFILLING, DECODING = Phase.RESTORING, Phase.PREFILLING, Phase.DECODING


# tokens   |------ prompt ------|-- generated --|
# slot     |== n_computed ==|                         the rest is not computed yet
#
# While decoding exactly one token, the last one sampled, is not computed yet. Between a decode and
# the end of its step, the slot also has the rows of the draft.
@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerationRequest
    arrived_at: float
    max_length: int  # prompt and reply together
    tokens: list[int]
    keys: PrefixKeys  # of `tokens`
    phase: Phase = Phase.WAITING
    slot: int = -1
    n_computed: int = 0
    sampler: Sampler | None = None
    admitted_at: float | None = None  # first admission: a requeue does not change it
    # Requeued, or from before a restart: it may have computed cached rows itself.
    is_resumed: bool = False
    restore: Restore | None = None
    restore_began_at: float | None = None
    restore_seconds: float = 0.0
    spans: Spans = NO_SPANS  # parts of the prompt that were not computed
    stops: list[int] = field(default_factory=list)  # positions where a chunk must end, descending
    disk_lookup: DiskLookup | None = None  # the sequence waits for its answer
    shared_lookup: SharedLookup | None = None  # the same, after the disk's
    leader: Optional["Sequence"] = None  # sequence whose prefill this one waits for
    n_awaited: int = 0  # rows of the leader that this one waits for
    n_refused: int = 0  # stored tokens that are computed again, because that is faster
    # Known tokens that are computed again, because there is no checkpoint at their end.
    n_missing_checkpoint_tokens: int = 0
    drafter: Drafter | None = None  # None: nothing is drafted
    is_evaluated: bool = False  # its reader knows that the prompt is computed
    draft: Draft | None = None  # in the batch of this step

    def make_private(self) -> None:
        """Keep the rows from every cache: what the request has sent was deleted."""
        self.request = replace(self.request, cache_prompt=False)
        self.leader = None

    def add_stop(self, position: int) -> None:
        if position > self.n_computed and position not in self.stops:
            self.stops = sorted([*self.stops, position], reverse=True)

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def n_to_compute(self) -> int:
        """Like `n_pending`, without tokens that are on their way from a store."""
        n_restored = self.restore.n_tokens if self.restore is not None else 0
        return len(self.tokens) - max(self.n_computed, n_restored)

    @property
    def is_sampled(self) -> bool:
        return self.request.max_tokens != 0

    @property
    def has_replied(self) -> bool:
        return len(self.tokens) > len(self.request.prompt)

    @property
    def n_end(self) -> int | None:
        """The length at which stored logits are as good as computed ones; None: at none.

        A reply that goes on is not sampled from the logits of a prompt.
        """
        return None if self.has_replied or not self.is_sampled else len(self.tokens)

    def note_cached(self, source: CacheSource, stop: int) -> None:
        """Note that the prompt up to `stop` was not computed.

        Rows that a requeued sequence computed itself do not count as cached.
        """
        if not self.is_resumed:
            self.spans = self.spans.extended(source, stop)


def new_sequence(request: GenerationRequest, cache: PrefixCache, *, n_ctx: int) -> Sequence:
    max_length = n_ctx
    if request.max_tokens is not None:
        max_length = min(n_ctx, len(request.prompt) + request.max_tokens)
    tokens = list(request.prompt)
    sequence = Sequence(
        request=request,
        arrived_at=time.monotonic(),
        max_length=max_length,
        tokens=tokens,
        keys=cache.keys(tokens, request.terms.namespace),
    )
    if (before := request.resumed) is not None:
        sequence.tokens += before.reply
        sequence.arrived_at -= before.seconds
        if before.spans is not None:
            sequence.spans, sequence.is_resumed = before.spans, True
    return sequence
