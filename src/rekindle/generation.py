"""The seam between text and tokens: what `chat` asks of the engine and what comes back.

`chat` and `engine` meet here and nowhere else. Everything that crosses is a frozen
value of plain fields; text stays on one side, llama.cpp on the other.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol


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
    n_stateless: int = 0  # the same, because no state was kept where the prompt leaves another


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    id: str
    inputs: tuple[tuple[int, ...], ...]  # none is empty, or longer than EmbedderStatus.n_ctx


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: tuple[bytes, ...]  # one per input: float32, little-endian, of length 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a prompt would find, if it were sent now."""

    n_prompt: int
    spans: tuple[CachedSpan, ...]
    restore_seconds: float | None  # None: nothing was measured yet
    prefill_seconds: float | None

    @property
    def n_cached(self) -> int:
        return self.spans[-1].stop if self.spans else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """The end of something that is stored: a conversation's, or a prompt's that has a name."""

    key: str
    name: str | None
    session: str
    rank: Rank
    n_tokens: int
    n_bytes: int  # of all that leads to it, too
    sources: tuple[CacheSource, ...]  # that hold all of it
    hits: int
    used_at: float  # seconds since the epoch
    pinned_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBranch:
    """Stored tokens without a fork among them: one branch of the tree that prefixes form."""

    key: str  # of its end
    parent: int | None  # where the branch that it follows stands in the list; always before it
    start: int  # positions
    stop: int
    n_bytes: int
    names: tuple[str, ...]  # of prompts that end here
    sources: tuple[CacheSource, ...]  # that hold all of it
    session: str
    rank: Rank
    hits: int
    used_at: float
    pinned_until: float | None


class TokenStream(Protocol):
    """The events of one request, in order, ending with `Finished` or an exception."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    def cancel(self) -> None:
        """Frees the slot within one step. Harmless after the end, and when repeated."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    name: CacheSource
    n_entries: int
    n_bytes: int
    budget_bytes: int
    trouble: str | None = None  # why it takes nothing in at the moment
    directory: str | None = None  # of the disk tier; where the shared store is


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounters:
    """Everything that happened since the start; only ever grows."""

    live_tokens: int = 0  # prompt tokens reused, by where they were found
    memory_tokens: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    upstream_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens computed
    memory_evictions: int = 0
    disk_evictions: int = 0
    covered: int = 0  # entries dropped because a longer one holds what they held
    thinned: int = 0  # checkpoints dropped because others stand close enough
    deleted: int = 0  # entries that somebody asked to drop
    quarantined: int = 0  # stored entries that failed a check and were moved aside
    vanished: int = 0  # entries that were expected on disk and were not there
    writes: int = 0
    written_bytes: int = 0
    writes_refused: int = 0  # by the admission policy or the write budget
    writes_failed: int = 0  # by the disk
    read_bytes: int = 0
    parked: int = 0  # idle slots that were freed because they slowed the others down
    steps: int = 0  # batches that were computed
    step_tokens: int = 0  # and what was in them: of prompts and of replies
    read_microseconds: int = 0  # from disk into memory
    put_bytes: int = 0  # from memory into a slot
    put_microseconds: int = 0
    saved_bytes: int = 0  # from a slot into memory
    save_microseconds: int = 0
    write_microseconds: int = 0  # during which something was on its way to disk
    shared_probes: int = 0  # prompts that were looked up in the shared store
    shared_probes_failed: int = 0  # of these, without an answer in time
    shared_writes: int = 0
    shared_written_bytes: int = 0
    shared_writes_refused: int = 0  # by the admission policy, or too many were on their way
    shared_writes_failed: int = 0
    shared_read_bytes: int = 0
    shared_read_microseconds: int = 0
    shared_write_microseconds: int = 0
    shared_vanished: int = 0  # entries that were expected there and were not
    shared_quarantined: int = 0  # entries that failed a check and were deleted there


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatus:
    model_class: str  # dense, sliding_window, hybrid, recurrent, opaque
    off_because: str | None  # why nothing can be stored for this model; None: it can
    tiers: tuple[TierStatus, ...]
    counters: CacheCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderStatus:
    n_ctx: int  # the longest input
    n_dimensions: int
    n_requests: int  # that run or wait


class SlotPhase(StrEnum):
    IDLE = "idle"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    id: int
    request_id: str | None  # None: it is idle
    session: str
    rank: Rank
    n_prompt: int  # of its request, or the last one
    n_rows: int  # tokens whose rows it holds
    n_generated: int
    phase: SlotPhase = SlotPhase.IDLE
    n_cached: int = 0  # of its request's prompt, not computed


@dataclass(frozen=True, slots=True)
class EngineStatus:
    n_slots: int
    n_running: int
    n_waiting: int
    max_waiting: int
    n_ctx: int  # the longest a single sequence may grow
    n_cells: int  # positions shared by all sequences
    n_cells_used: int
    cache: CacheStatus | None = None  # None: the engine is still starting
    n_background: int = 0  # neither in n_running nor in n_waiting
    embedder: EmbedderStatus | None = None  # None: there is none
    slots: tuple[SlotStatus, ...] = ()


class PrefixStore(Protocol):
    """What is stored, for whoever looks at it."""

    async def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        """What a request with this prompt would find. Nothing changes, and nothing is computed."""
        ...

    async def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        """Names first, then conversations, the last used first."""
        ...

    async def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        """What is stored, as a tree of shared prefixes; parents first, of many the last used."""
        ...

    async def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        """All tokens up to the end of an entry; None: it is not there."""
        ...

    async def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        """Keeps what is stored for a while; 0: no longer. Whether it is there."""
        ...

    async def forget(self, key: str | None, *, namespace: str) -> int:
        """Drops what only this one needs, from every tier; None: everything. How many went.

        A key is one of `StoredPrefix`, or a name.
        """
        ...


class Engine(PrefixStore, Protocol):
    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queues the request. Raises PromptTooLong, Overloaded or ShuttingDown at once."""
        ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Raises Overloaded or ShuttingDown at once. Whoever stops waiting cancels the request."""
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Compiles (and keeps) the grammar; blocking. Raises InvalidRequest if it is not valid."""
        ...

    def status(self) -> EngineStatus: ...


class Tokenizer(Protocol):
    """The model's vocabulary. Safe to use from any thread."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def special_strings(self) -> tuple[str, ...]:
        """The text of every control token."""
        ...

    @property
    def end_strings(self) -> tuple[str, ...]:
        """The text of every token that ends a turn."""
        ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    @property
    def bos_token(self) -> int | None:
        """The token that starts every prompt, or None if this model wants none."""
        ...

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """No token is added at either end. Without `parse_special`, control strings are text."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to visible text: nothing for control tokens."""
        ...

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes: ...
