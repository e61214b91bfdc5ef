"""What a reply is made of, in text: the events that every wire format turns into its own frames."""

from dataclasses import dataclass
from enum import StrEnum

from rekindle.generation import CachedSpan, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    sampling: Sampling
    max_tokens: int | None = None  # None: until the context ends
    stop: tuple[str, ...] = ()
    n_top_logprobs: int | None = None  # None: no log probabilities
    cache_prompt: bool = True  # False: nothing is read from the cache, nothing is kept


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token as text. `data` are its exact bytes, which may be part of a character only."""

    token: int
    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    chosen: Candidate
    top: tuple[Candidate, ...]
    text_offset: int  # where its text starts in the reply, in characters


@dataclass(frozen=True, slots=True)
class ReplyText:
    """Whole characters, never part of a stop string."""

    text: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyProgress:
    n_done: int
    n_total: int
    n_cached: int
    elapsed_seconds: float


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStats:
    n_prompt: int
    n_cached: int
    n_generated: int
    spans: tuple[CachedSpan, ...]  # where the cached tokens came from
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def n_prefilled(self) -> int:
        return self.n_prompt - self.n_cached


@dataclass(frozen=True, slots=True)
class ReplyDone:
    finish: FinishReason
    stats: ReplyStats


ReplyEvent = ReplyText | ReplyProgress | ReplyDone
