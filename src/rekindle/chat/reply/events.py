"""The events of a reply, as text. Every wire format turns them into its own frames."""

from dataclasses import dataclass, field
from enum import StrEnum

from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.conversation import StickyTools
from rekindle.chat.prompt.volatile import Neutralised
from rekindle.generation.events import NO_SPANS, Spans
from rekindle.generation.request import CacheTerms, Rank, Sampling
from rekindle.observe.request_record import RequestRecord


class ToolMode(StrEnum):
    NONE = "none"  # the definitions stay in the prompt, so its prefix stays the same
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()  # the tools that may be called; empty: all
    parallel: bool = True  # several calls in one reply


@dataclass(frozen=True, slots=True)
class OmittedMedia:
    """Media of a request that the model reads about, but does not see."""

    kind: str  # image, audio, video or file
    text: str  # such as `PNG, 1024x768`
    count: int


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Limits of a reply that end it at a line, for editors. 0: none."""

    n_indent: int = 0  # the least white space at the start of each line after the first
    seconds: float = 0.0  # after the first token; the line is still completed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    sampling: Sampling
    max_tokens: int | None = None  # None: until the context ends
    stop: tuple[str, ...] = ()
    line_limits: LineLimits = LineLimits()
    n_top_logprobs: int | None = None  # None: no log probabilities
    shows_tokens: bool = False  # the parts of a reply to raw text have their token ids
    cache_prompt: bool = True  # False: the cache is neither read nor written
    speculate: bool = True  # False: nothing is drafted
    tool_choice: ToolChoice = ToolChoice()
    reasoning_budget: int | None = None  # tokens; 0: none; None: no limit
    terms: CacheTerms = field(default_factory=CacheTerms)
    streams: bool = False  # the client reads the parts of calls before they are whole
    rank: Rank | None = None  # declared by the client; None: guessed
    explain: bool = False  # the reply reports why the prompt missed the cache
    reply_id: str | None = None  # a later request may name this reply by it
    compare_with: str | None = None  # a `reply_id`: report the miss as a change since then
    media_omitted: tuple[OmittedMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class TopToken:
    """One token as text. `data` are its exact bytes, possibly only a part of a character."""

    token: int
    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    chosen: TopToken
    top: tuple[TopToken, ...]
    text_offset: int  # where its text starts in the reply, in characters


@dataclass(frozen=True, slots=True)
class ReplyText:
    """Whole characters, never part of a stop string."""

    text: str
    scored: tuple[ScoredToken, ...] = ()
    tokens: tuple[int, ...] = ()  # if the client wants them


@dataclass(frozen=True, slots=True)
class ReplyReasoning:
    """Part of the model's reasoning before its answer."""

    text: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyCallBegan:
    """The beginning of a tool call. Its arguments and a `ReplyCall` follow, or the reply fails."""

    index: int  # among the calls of this reply
    id: str
    name: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyCallArguments:
    """The next piece of the arguments of the call that has begun."""

    index: int
    json: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """The end of a tool call, with the whole call. A call that never began is sent as text."""

    index: int  # among the calls of this reply
    id: str
    name: str
    arguments_json: str  # as sampled, if the model writes JSON
    scored: tuple[ScoredToken, ...] = ()
    is_cut: bool = False  # the engine ended it: the model wanted to write more


@dataclass(frozen=True, slots=True)
class ReplyProgress:
    n_done: int
    n_total: int
    n_cached: int
    elapsed_seconds: float
    spans: Spans = NO_SPANS  # the cached tokens by source
    diagnosis: Diagnosis | None = None  # None: the prompt is not evaluated yet


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStats(RequestRecord):
    """The record of a reply, with the details that only its client gets."""

    remembered: tuple[tuple[int, int], ...]  # token ranges of the spliced turns
    n_reasoning: int  # sampled tokens of reasoning, with its marks
    neutralised: tuple[Neutralised, ...]  # text that was replaced by a constant
    diagnosis: Diagnosis
    is_explained: bool  # the client asked for the diagnosis
    is_kept: bool  # False: the cache was not used
    media_omitted: tuple[OmittedMedia, ...]
    sticky: StickyTools | None  # the session's tools, in place of the client's

    @property
    def n_written(self) -> int:
        """Return the prompt tokens that were new to the cache."""
        return self.n_prefilled if self.is_kept else 0


@dataclass(frozen=True, slots=True)
class ReplyDone:
    finish: FinishReason
    stats: ReplyStats
    stop_sequence: str | None = None  # the stop string that ended the reply
    tokens: tuple[int, ...] = ()  # as sampled, for clients that keep them
    at_line: bool = False  # a limit on lines ended the reply


ReplyPart = ReplyText | ReplyReasoning | ReplyCallBegan | ReplyCallArguments | ReplyCall
ReplyEvent = ReplyPart | ReplyProgress | ReplyDone
