"""Events of a request: progress, tokens and the end."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rekindle.generation.drafts import Drafted


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


class CacheSource(StrEnum):
    """The source of reused rows, cheapest first."""

    LIVE = "live"  # already in the context
    MEMORY = "memory"
    DISK = "disk"
    SHARED = "shared"  # a store used by several servers
    UPSTREAM = "upstream"  # cached by the upstream engine


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Positions [start, stop) of a prompt that were reused from one source."""

    source: CacheSource
    start: int
    stop: int


class Spans(tuple[CachedSpan, ...]):
    """Adjoining spans from position 0: the part of a prompt that was not computed."""

    __slots__ = ()

    @property
    def n_tokens(self) -> int:
        return self[-1].stop if self else 0

    def extended(self, source: CacheSource, stop: int) -> "Spans":
        """Return these spans continued up to `stop`; the last span grows if the source is the same.

        A `stop` that is already covered changes nothing.
        """
        start = self.n_tokens
        if stop <= start:
            return self
        if self and self[-1].source is source:
            return Spans((*self[:-1], CachedSpan(source, self[-1].start, stop)))
        return Spans((*self, CachedSpan(source, start, stop)))

    def cut(self, stop: int) -> "Spans":
        """Return these spans without what they have after `stop`."""
        before = (span for span in self if span.start < stop)
        return Spans(CachedSpan(span.source, span.start, min(span.stop, stop)) for span in before)

    def by_source(self) -> dict[CacheSource, int]:
        """Return the number of tokens per source, in order of first appearance."""
        counts: dict[CacheSource, int] = {}
        for span in self:
            counts[span.source] = counts.get(span.source, 0) + span.stop - span.start
        return counts


NO_SPANS = Spans()


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    n_done: int
    n_total: int
    elapsed_seconds: float
    spans: Spans = NO_SPANS

    @property
    def n_cached(self) -> int:
        return self.spans.n_tokens


@dataclass(frozen=True, slots=True)
class PromptEvaluated:
    """The prompt is in the context; the first token follows.

    An upstream may report only at the end what it had cached. Then the tokens precede this event.
    """

    n_prompt: int
    n_cached: int  # tokens of the prompt that were reused
    queue_seconds: float
    prefill_seconds: float
    restore_seconds: float = 0.0  # before the prefill
    spans: Spans = NO_SPANS  # up to n_cached
    n_refused: int = 0  # stored tokens computed again, because that is faster
    # Known tokens computed again, because there is no checkpoint where the prompt diverges.
    n_missing_checkpoint_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenSampled:
    token: int
    logprobs: TokenLogprobs | None = None
    lands: bool = False  # forced, so that a call ends before the reply is cut off
    drafted: Drafted | None = None  # the draft of this step, with the step's last event
    # What the sampler remembers of probabilities, for a sampler that continues the reply.
    sampler_state: tuple[float, ...] = ()


class StopCause(StrEnum):
    END_OF_TURN = "end_of_turn"  # the model sampled an end-of-generation token
    LENGTH = "length"  # max_tokens, or the end of the context; also if a call was ended for it
    YIELDED = "yielded"  # a background request made room for another request


@dataclass(frozen=True, slots=True)
class Finished:
    cause: StopCause
    token: int | None = None  # the end-of-turn token, if any, which is not part of the reply
    drafted: Drafted | None = None


TokenEvent = PrefillProgress | PromptEvaluated | TokenSampled | Finished


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: tuple[bytes, ...]  # one per input: float32, little-endian, of length 1


class TokenStream(Protocol):
    """The events of one request, in order, ending with `Finished` or an exception."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    def cancel(self) -> None:
        """Free the slot within one step. Harmless after the end, and when repeated."""
        ...
