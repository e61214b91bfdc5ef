"""Status of an engine: slots, tiers, counters, and stored prefixes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import CacheSource, Spans
from rekindle.generation.request import Rank


@dataclass(frozen=True, slots=True)
class Forecast:
    """The reuse and the times that a prompt could expect now."""

    n_prompt: int
    spans: Spans
    restore_seconds: float | None  # None: not measured yet
    prefill_seconds: float | None

    @property
    def n_cached(self) -> int:
        return self.spans.n_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """The end of a stored conversation, or of a named prompt."""

    key: str
    name: str | None
    session: str
    rank: Rank
    n_tokens: int
    n_bytes: int  # of all entries up to this end
    sources: tuple[CacheSource, ...]  # that hold all of its entries
    hits: int
    used_at: float  # seconds since the epoch
    pinned_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBranch:
    """A run of stored tokens without a fork: one branch of the tree of prefixes."""

    key: str  # of the branch's end
    parent: int | None  # index of the parent branch in the list, always a smaller one
    start: int  # positions
    stop: int
    n_bytes: int
    names: tuple[str, ...]  # of prompts that end in this branch
    sources: tuple[CacheSource, ...]  # that hold all of its entries
    session: str
    rank: Rank
    hits: int
    used_at: float
    pinned_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    name: CacheSource
    n_entries: int
    n_bytes: int
    budget_bytes: int
    trouble: str | None = None  # why nothing can be written to it at the moment
    directory: str | None = None  # path of the disk tier, or address of the shared store


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Events of one source since the start. A source counts only what can happen to it."""

    tokens: int = 0  # prompt tokens reused from here
    evictions: int = 0
    writes: int = 0
    written_bytes: int = 0  # into memory: exported from a slot
    write_microseconds: int = 0  # during which at least one write was under way
    writes_refused: int = 0  # by the admission policy, the write budget, or a full queue
    writes_failed: int = 0  # by the tier
    read_bytes: int = 0  # from memory: into a slot; from the others: into memory
    read_microseconds: int = 0
    vanished: int = 0  # entries expected here and not found
    quarantined: int = 0  # entries that failed a check and were removed
    lookups: int = 0  # prompts looked up here
    lookups_failed: int = 0  # lookups without an answer in time

    def __add__(self, other: "TierCounters") -> "TierCounters":
        return TierCounters(**_sums(self, other))

    def note_read(self, n_bytes: int, seconds: float) -> None:
        self.read_bytes += n_bytes
        self.read_microseconds += int(seconds * 1e6)

    def note_write(self, n_bytes: int, seconds: float) -> None:
        self.writes += 1
        self.written_bytes += n_bytes
        self.write_microseconds += int(seconds * 1e6)


@dataclass(slots=True)
class Stalls:
    """Times over 100 ms in which a thread did not serve those that wait for it."""

    count: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0

    def __add__(self, other: "Stalls") -> "Stalls":
        return Stalls(
            self.count + other.count,
            self.seconds + other.seconds,
            max(self.longest_seconds, other.longest_seconds),
        )

    def note(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Events since the start, by source and in all. One thread counts; others get copies.

    Each source has a field of its name.
    """

    live: TierCounters = field(default_factory=TierCounters)
    memory: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    shared: TierCounters = field(default_factory=TierCounters)
    upstream: TierCounters = field(default_factory=TierCounters)
    prefilled_tokens: int = 0  # prompt tokens computed
    covered: int = 0  # entries dropped because a longer one holds the same tokens
    thinned: int = 0  # checkpoints dropped because others are close enough
    deleted: int = 0  # entries dropped on request
    parked: int = 0  # idle slots freed because they slowed the others down
    steps: int = 0  # batches computed
    step_tokens: int = 0  # tokens in these batches, of prompts and of replies
    stalls: Stalls = field(default_factory=Stalls)  # of the engine thread
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def __add__(self, other: "CacheCounters") -> "CacheCounters":
        return CacheCounters(**_sums(self, other))

    def copy(self) -> "CacheCounters":
        return CacheCounters() + self

    def of(self, source: CacheSource) -> TierCounters:
        counters: TierCounters = getattr(self, source.value)
        return counters


def _sums(one: TierCounters | CacheCounters, other: TierCounters | CacheCounters) -> dict[str, Any]:
    names = [each.name for each in fields(one)]
    return {name: getattr(one, name) + getattr(other, name) for name in names}


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
    n_requests: int  # running and waiting
    ranks: bool = False  # the model scores texts, and makes no vectors


class SlotPhase(StrEnum):
    IDLE = "idle"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    id: int
    request_id: str | None  # None: the slot is idle; "": a request that is not shown
    session: str
    rank: Rank
    n_prompt: int  # of the running request, or the last one
    n_rows: int  # positions that the slot holds
    n_generated: int
    phase: SlotPhase = SlotPhase.IDLE
    n_cached: int = 0  # prompt tokens that were not computed
    namespace: str = ""

    def seen_from(self, namespace: str | None) -> "SlotStatus":
        """Return what a client of the namespace may know about the slot; None: everything."""
        if namespace in (None, self.namespace):
            return self
        request_id = None if self.request_id is None else ""
        return SlotStatus(
            id=self.id,
            request_id=request_id,
            session="",
            rank=Rank.MAIN,
            n_prompt=0,
            n_rows=0,
            n_generated=0,
            phase=self.phase,
        )


class DeathCause(StrEnum):
    """Why an engine process died."""

    SEGFAULT = "segfault"
    ABORT = "abort"  # such as GGML_ASSERT, or a CUDA error
    KILLED = "killed"  # by the kernel when memory runs out, or by a person
    HANG = "hang"  # no step within the bound: ended by the server
    EXIT = "exit"  # a Python exception, or an exit that nobody ordered
    SIGNAL = "signal"  # any other signal


class ProcessState(StrEnum):
    RUNNING = "running"
    RESTARTING = "restarting"  # requests wait
    FAILED = "failed"  # it died several times in a row: requests are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """The process that an engine runs in."""

    state: ProcessState
    pid: int | None  # None while there is none
    restarts: Mapping[str, int]  # by cause
    last_death: str | None = None  # one sentence


@dataclass(frozen=True, slots=True)
class EngineStatus:
    n_slots: int
    n_running: int
    n_waiting: int
    max_waiting: int
    n_ctx: int  # the most tokens of one sequence
    n_cells: int  # positions shared by all sequences
    n_cells_used: int
    cache: CacheStatus | None = None  # None: the engine is still starting
    n_background: int = 0  # counted neither in n_running nor in n_waiting
    embedder: EmbedderStatus | None = None  # None: the engine makes no embeddings
    slots: tuple[SlotStatus, ...] = ()
    no_drafts_because: str | None = None  # why nothing is ever drafted; None: it is
    process: ProcessStatus | None = None  # None: the engine has no process of its own here
