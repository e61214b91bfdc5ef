"""What `chat` asks of an engine: a prompt, how to sample, how long to keep its rows."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Trigger:
    """Text that makes a grammar begin, at its own first character."""

    text: str
    at_start: bool = False  # only where the reply begins (white space and quiet spans apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStart:
    """When a grammar begins to hold. Control tokens count as the text they are written as."""

    triggers: tuple[Trigger, ...] = ()  # none: at once, or right behind the first quiet span
    quiet: tuple[str, str] | None = None  # what opens and closes spans without triggers
    quiet_anywhere: bool = True  # otherwise they open only where the reply begins
    begins_quiet: bool = False  # the prompt has opened one


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply, in the source form that the grammar engine compiles."""

    kind: GrammarKind
    source: str
    start: GrammarStart = GrammarStart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Defaults are llama.cpp's, so that a request without settings behaves as its users expect."""

    temperature: float = 0.8  # 0: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # -1: the whole context
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None  # None: a fresh one per request
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


class Rank(IntEnum):
    """How dear a request's rows are: where room is short, those of the highest number go first."""

    MAIN = 0  # a conversation that somebody comes back to
    BACKGROUND = 1  # a title, a summary
    EPHEMERAL = 2  # a sub-agent


@dataclass(frozen=True, slots=True)
class Pin:
    """A promise to keep the beginning of a prompt for a while."""

    n_tokens: int
    seconds: float


DEFAULT_SESSION = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTerms:
    """Who shares a request's rows, and how long they are kept."""

    namespace: str = ""  # rows and turns are shared within one only
    session: str = DEFAULT_SESSION
    rank: Rank = Rank.MAIN
    pins: tuple[Pin, ...] = ()
    name: str | None = None  # under which the prompt is listed
    persist: bool = False  # it ends only when its prompt is on disk, or says why it is not


USUAL_TERMS = CacheTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    id: str
    prompt: tuple[int, ...]
    boundaries: tuple[int, ...]  # positions worth a checkpoint, ascending
    sampling: Sampling
    max_tokens: int | None  # None: until the context ends; 0: evaluate the prompt, sample nothing
    n_top_logprobs: int | None = None  # None: no log probabilities at all
    cache_prompt: bool = True  # False: nothing is read from the cache, nothing is kept
    background: bool = False  # runs while nothing else does, and ends when anything arrives
    terms: CacheTerms = USUAL_TERMS


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    id: str
    inputs: tuple[tuple[int, ...], ...]  # none is empty, or longer than EmbedderStatus.n_ctx
