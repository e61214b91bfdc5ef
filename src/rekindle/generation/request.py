"""Requests to an engine: a prompt, how to sample, how long to keep its rows."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Trigger:
    """Text that starts a grammar, at the text's first character."""

    text: str
    at_start: bool = False  # only at the start of the reply, after white space and quiet spans


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStart:
    """The point from which a grammar applies. Control tokens count as their text."""

    triggers: tuple[Trigger, ...] = ()  # none: at once, or right after the first quiet span
    quiet: tuple[str, str] | None = None  # opening and closing text of spans without triggers
    quiet_anywhere: bool = True  # False: quiet spans open only at the start of the reply
    begins_quiet: bool = False  # the prompt has opened a quiet span


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply, in the source form that the grammar engine compiles."""

    kind: GrammarKind
    source: str
    start: GrammarStart = GrammarStart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings. The defaults are llama.cpp's, as its users expect."""

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
    """The value of a request's rows: the highest number is evicted first."""

    MAIN = 0  # a conversation that will continue
    BACKGROUND = 1  # a title, a summary
    EPHEMERAL = 2  # a sub-agent


@dataclass(frozen=True, slots=True)
class Pin:
    """Protects the first `n_tokens` of a prompt from eviction for a while."""

    n_tokens: int
    seconds: float


DEFAULT_SESSION = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTerms:
    """Terms for keeping and sharing a request's rows."""

    namespace: str = ""  # rows and turns are shared within a namespace only
    session: str = DEFAULT_SESSION
    rank: Rank = Rank.MAIN
    pins: tuple[Pin, ...] = ()
    name: str | None = None  # for the list of stored prompts
    persist: bool = False  # the request ends once its prompt is on disk, or fails


USUAL_TERMS = CacheTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    id: str
    prompt: tuple[int, ...]
    boundaries: tuple[int, ...]  # positions worth a checkpoint, ascending
    sampling: Sampling
    max_tokens: int | None  # None: until the context ends; 0: evaluate the prompt, sample nothing
    n_top_logprobs: int | None = None  # None: no log probabilities at all
    cache_prompt: bool = True  # False: the cache is neither read nor written
    background: bool = False  # runs while the engine is idle, and yields to any other request
    terms: CacheTerms = USUAL_TERMS


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    id: str
    inputs: tuple[tuple[int, ...], ...]  # none is empty, or longer than EmbedderStatus.n_ctx
