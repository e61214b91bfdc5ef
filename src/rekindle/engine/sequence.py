"""A request while it runs. Only the engine thread changes one."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Optional

from rekindle.cache.keys import PrefixKeys
from rekindle.cache.restore import Restore
from rekindle.cache.shared.residency import SharedLookup
from rekindle.engine.backend import Sampler
from rekindle.generation.events import CachedSpan
from rekindle.generation.request import GenerationRequest


class Phase(Enum):
    WAITING = auto()  # no slot yet, or it had to give it back
    RESTORING = auto()  # stored rows are on their way into its slot
    PREFILLING = auto()
    DECODING = auto()  # one new token per step
    DONE = auto()


# tokens   |------ prompt ------|-- generated --|
# slot     |== n_computed ==|                         the rest is still to be decoded
#
# While decoding exactly one token, the last one sampled, is not computed yet.
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
    admitted_at: float | None = None  # kept when it has to wait again
    is_resumed: bool = False  # it had to: what it finds now is its own work
    restore: Restore | None = None
    restore_began_at: float | None = None
    restore_moved_at: float = 0.0  # when the last piece came
    restore_seconds: float = 0.0
    spans: tuple[CachedSpan, ...] = ()  # what its prompt did not have to compute
    stops: list[int] = field(default_factory=list)  # where a chunk has to end, next one last
    probe: SharedLookup | None = None  # of the shared store; it waits for the answer, for a moment
    leader: Optional["Sequence"] = None  # computes what this one waits for
    n_awaited: int = 0  # positions of the leader that this one waits for
    n_refused: int = 0  # stored tokens that it computes, because that is faster
    n_missing_checkpoint_tokens: int = (
        0  # known tokens that it computes, because no state was kept at their end
    )

    def add_stop(self, position: int) -> None:
        if position > self.n_computed and position not in self.stops:
            self.stops = sorted([*self.stops, position], reverse=True)

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def is_sampled(self) -> bool:
        return self.request.max_tokens != 0

    @property
    def has_replied(self) -> bool:
        return len(self.tokens) > len(self.request.prompt)

    @property
    def n_cached(self) -> int:
        return self.spans[-1].stop if self.spans else 0
