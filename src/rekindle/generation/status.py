"""Status of an engine: slots, tiers, counters, and stored prefixes."""

from dataclasses import dataclass
from enum import StrEnum

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
    n_requests: int  # running and waiting


class SlotPhase(StrEnum):
    IDLE = "idle"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    id: int
    request_id: str | None  # None: the slot is idle
    session: str
    rank: Rank
    n_prompt: int  # of the running request, or the last one
    n_rows: int  # positions that the slot holds
    n_generated: int
    phase: SlotPhase = SlotPhase.IDLE
    n_cached: int = 0  # prompt tokens that were not computed


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
