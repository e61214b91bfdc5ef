"""The measurements as values: one row for each request, workload and burst."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request. None: the server does not report it."""

    workload: str
    server: str
    round: int
    request: str  # its place in the workload: `window 2, turn 3`
    start_seconds: float  # since the workload began
    seconds: float
    first_token_seconds: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    prefilled_tokens: int | None
    floor_tokens: int | None
    reply_tokens: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow:
    """One workload on one server in one round. None: unknown; see `note`."""

    workload: str
    server: str
    round: int
    requests: int
    errors: int
    prompt_tokens: int | None
    prefilled_tokens: int | None  # work outside of requests included
    floor_tokens: int | None
    amplification: float | None
    first_token_p50_seconds: float | None
    first_token_p95_seconds: float | None
    total_seconds: float | None
    tokens_per_second: float | None  # of prompts and replies
    written_bytes: int | None  # to disk
    peak_memory_bytes: int | None
    note: str | None  # why values are missing or not comparable
    decode_tokens_per_second: float | None = None  # of workloads that measure it
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRow:
    """One speed of one burst of streams that share no prefix."""

    measure: str  # decode_tokens_per_second, prefill_tokens_per_second, first_token_ms, ...
    streams: int
    server: str
    round: int
    value: float


@dataclass(slots=True)
class Progress:
    """Callbacks for the terminal, and all rows so far: an interrupted run keeps them."""

    on_step: Callable[[str], None]  # what runs now
    on_done: Callable[[], None]
    on_trouble: Callable[[str], None]  # a burst failed; workloads have notes instead
    requests: list[RequestRow] = field(default_factory=list)
    workloads: list[WorkloadRow] = field(default_factory=list)
    bursts: list[BurstRow] = field(default_factory=list)

    def add(self, workload: WorkloadRow, requests: Sequence[RequestRow]) -> None:
        self.workloads.append(workload)
        self.requests += requests
        self.on_done()


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    name: str
    version: str
    is_variant: bool = False  # a contender with other draft settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All results of one run of the benchmark."""

    machine: str
    model: str
    commit: str  # of this program; empty: unknown
    command: str
    contenders: tuple[MeasuredServer, ...]  # this server first
    requests: tuple[RequestRow, ...]
    workloads: tuple[WorkloadRow, ...]
    bursts: tuple[BurstRow, ...]
