"""What a reply is made of, in text: the events that every wire format turns into its own frames."""

from dataclasses import dataclass
from enum import StrEnum

from rekindle.generation import CachedSpan, Sampling


class ToolMode(StrEnum):
    NONE = "none"  # the definitions stay in the prompt, which stays the same
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()  # the tools that may be called; none named: every one
    parallel: bool = True  # several calls in one reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    sampling: Sampling
    max_tokens: int | None = None  # None: until the context ends
    stop: tuple[str, ...] = ()
    n_top_logprobs: int | None = None  # None: no log probabilities
    cache_prompt: bool = True  # False: nothing is read from the cache, nothing is kept
    tool_choice: ToolChoice = ToolChoice()


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
class ReplyReasoning:
    """Part of what the model thought before it answered."""

    text: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A whole tool call: one that is cut off is text, and never comes as a call."""

    index: int  # among the calls of this reply
    id: str
    name: str
    arguments_json: str  # as it was sampled, where the model writes JSON
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
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStats:
    n_prompt: int
    n_cached: int
    n_generated: int
    spans: tuple[CachedSpan, ...]  # where the cached tokens came from
    remembered: tuple[tuple[int, int], ...] = ()  # where turns stand that kept their tokens
    n_dropped_messages: int = 0  # left out of the prompt because they do not fit
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def n_remembered_turns(self) -> int:
        return len(self.remembered)

    @property
    def n_prefilled(self) -> int:
        return self.n_prompt - self.n_cached


@dataclass(frozen=True, slots=True)
class ReplyDone:
    finish: FinishReason
    stats: ReplyStats
    stop_sequence: str | None = None  # the stop string that ended the reply


ReplyPart = ReplyText | ReplyReasoning | ReplyCall
ReplyEvent = ReplyPart | ReplyProgress | ReplyDone
