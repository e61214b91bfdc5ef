"""A request while it runs. Only the engine thread changes one."""

from dataclasses import dataclass, field
from enum import Enum, auto

from rekindle.engine.backend import Sampler
from rekindle.generation import GenerationRequest


class Phase(Enum):
    WAITING = auto()  # no slot yet, or it had to give it back
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
    tokens: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    slot: int = -1
    n_computed: int = 0
    sampler: Sampler | None = None
    admitted_at: float | None = None  # kept when it has to wait again

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def has_replied(self) -> bool:
        return len(self.tokens) > len(self.request.prompt)
