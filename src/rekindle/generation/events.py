"""What an engine answers, token by token."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


class CacheSource(StrEnum):
    """Where reused rows came from, cheapest first."""

    LIVE = "live"  # they were in the context already
    MEMORY = "memory"
    DISK = "disk"
    SHARED = "shared"  # a store that several servers use
    UPSTREAM = "upstream"  # the engine behind us had them, wherever


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Positions [start, stop) of a prompt that were not computed again."""

    source: CacheSource
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    n_done: int
    n_total: int
    elapsed_seconds: float
    spans: tuple[CachedSpan, ...] = ()  # adjoining, from 0

    @property
    def n_cached(self) -> int:
        return self.spans[-1].stop if self.spans else 0


@dataclass(frozen=True, slots=True)
class PromptEvaluated:
    """The prompt is in the context. The first token follows at once; of an upstream that tells
    late what it had cached, it came before.
    """

    n_prompt: int
    n_cached: int  # of these, taken from the cache
    queue_seconds: float
    prefill_seconds: float
    restore_seconds: float = 0.0  # spent on bringing rows back, before the prefill
    spans: tuple[CachedSpan, ...] = ()  # adjoining, from 0 to n_cached
    n_refused: int = 0  # stored tokens that were computed again, because that is faster
    n_missing_checkpoint_tokens: int = (
        0  # the same, because no state was kept where the prompt leaves another
    )


@dataclass(frozen=True, slots=True)
class TokenSampled:
    token: int
    logprobs: TokenLogprobs | None = None


class StopCause(StrEnum):
    END_OF_TURN = "end_of_turn"  # the model sampled an end-of-generation token
    LENGTH = "length"  # max_tokens, or the end of the context
    YIELDED = "yielded"  # it ran in the background, and something arrived


@dataclass(frozen=True, slots=True)
class Finished:
    cause: StopCause
    token: int | None = None  # the one that ended the turn; it is not part of the reply


TokenEvent = PrefillProgress | PromptEvaluated | TokenSampled | Finished


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: tuple[bytes, ...]  # one per input: float32, little-endian, of length 1


class TokenStream(Protocol):
    """The events of one request, in order, ending with `Finished` or an exception."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    def cancel(self) -> None:
        """Frees the slot within one step. Harmless after the end, and when repeated."""
        ...
