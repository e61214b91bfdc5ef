"""Event types of the feed. OpenAPI is made from these."""

from typing import Literal

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Class, MissBody, TierProps, TierTokens

# The functional form, because `class` is a keyword.
SlotSeen = TypedDict(
    "SlotSeen",
    {
        "id": int,
        "request_id": str | None,  # null: the slot is idle; "": another namespace's request
        "session": str,
        "class": Class,
        "phase": Literal["idle", "restoring", "prefilling", "decoding"],
        "n_prompt": int,  # of the current or last request
        "n_rows": int,  # tokens whose rows the slot holds
        "n_cached": int,  # prompt tokens that were not computed
        "n_generated": int,
    },
)


class TokensBySource(TypedDict):
    live: int
    memory: int
    disk: int
    shared: int
    upstream: int
    prefilled: int


class DiskHealth(TypedDict):
    """Counts since the server started."""

    evictions: int
    quarantined: int
    vanished: int
    writes: int
    writes_refused: int
    writes_failed: int


class SharedHealth(TypedDict):
    """Counts since the server started."""

    probes: int  # prompts looked up in the store
    probes_failed: int  # of these, not answered in time
    quarantined: int
    vanished: int
    writes: int
    writes_refused: int
    writes_failed: int


class CacheSeen(TypedDict):
    model_class: str
    off_because: str | None  # why nothing can be stored for this model
    tiers: list[TierProps]
    tokens: TokensBySource  # of all prompts since the server started
    disk: DiskHealth
    shared: SharedHealth | None  # null: there is no shared store


class ProcessSeen(TypedDict):
    state: Literal["running", "restarting", "failed"]
    restarts: int
    last_death: str | None  # one sentence


class ModelSeen(TypedDict):
    id: str
    state: Literal["loaded", "loading", "unloaded"]
    n_ctx: int
    cells: int
    cells_used: int
    running: int
    waiting: int
    max_waiting: int
    slots: list[SlotSeen]
    cache: CacheSeen | None  # null: the model is not loaded, or still starting
    no_drafts_because: str | None  # null: tokens are drafted
    process: ProcessSeen | None  # null: the model is not loaded, or has no process here


class FirstToken(TypedDict):
    """Times in milliseconds. Null: no sample."""

    p50: float | None
    p95: float | None


class Bucket(TypedDict):
    """Requests that ended within ten seconds."""

    start: int  # seconds since the epoch
    requests: int
    live: int
    memory: int
    disk: int
    shared: int
    upstream: int
    prefilled: int
    twice: int  # of these, computed earlier by this process
    drafted: int  # tokens of drafts
    accepted: int  # of these, sampled by the model, too
    first_token_ms: FirstToken


class Snapshot(TypedDict):
    time: float  # seconds since the epoch
    models: list[ModelSeen]
    buckets: list[Bucket]  # the last two that are not empty
    first_token_ms: FirstToken  # of the last hour


RequestSeen = TypedDict(
    "RequestSeen",
    {
        "id": str,
        "model": str,
        "session": str,
        "class": Class,
        "ended_at": float,  # seconds since the epoch
        "prompt_tokens": int,
        "cached": list[TierTokens],
        "prefilled": int,
        "prefilled_twice": int,
        "generated": int,
        "drafted": int,
        "accepted": int,
        "queue_ms": float,
        "restore_ms": float,
        "prefill_ms": float,
        "first_token_ms": float | None,
        "total_ms": float,
        "tokens_per_second": float | None,
        "finish": str,
        "miss": MissBody | None,
    },
)


class Hour(TypedDict):
    bucket_seconds: int
    buckets: list[Bucket]
    requests: list[RequestSeen]  # of the reader's namespace, oldest first
