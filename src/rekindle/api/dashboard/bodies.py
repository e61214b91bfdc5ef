"""What the feed of events sends, as types. OpenAPI is made from these."""

from typing import Literal

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Class, MissBody, TierProps, TierTokens

# In this form because `class` is a word of Python's.
SlotSeen = TypedDict(
    "SlotSeen",
    {
        "id": int,
        "request_id": str | None,  # null: it is idle
        "session": str,
        "class": Class,
        "phase": Literal["idle", "restoring", "prefilling", "decoding"],
        "n_prompt": int,  # of its request, or the last one
        "n_rows": int,  # tokens whose rows it holds
        "n_cached": int,  # of its request's prompt, not computed
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
    """Since the start."""

    evictions: int
    quarantined: int
    vanished: int
    writes: int
    writes_refused: int
    writes_failed: int


class SharedHealth(TypedDict):
    """Since the start."""

    probes: int  # prompts that were looked up there
    probes_failed: int  # of these, without an answer in time
    quarantined: int
    vanished: int
    writes: int
    writes_refused: int
    writes_failed: int


class CacheSeen(TypedDict):
    model_class: str
    off_because: str | None  # why nothing can be stored for this model
    tiers: list[TierProps]
    tokens: TokensBySource  # of all prompts since the start
    disk: DiskHealth
    shared: SharedHealth | None  # null: there is no shared store


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
    cache: CacheSeen | None  # null: it is not loaded, or still starting


class FirstToken(TypedDict):
    """In milliseconds; null: there was none."""

    p50: float | None
    p95: float | None


class Bucket(TypedDict):
    """What ended within ten seconds."""

    start: int  # seconds since the epoch
    requests: int
    live: int
    memory: int
    disk: int
    shared: int
    upstream: int
    prefilled: int
    twice: int  # of these, computed earlier by this process
    first_token_ms: FirstToken


class Snapshot(TypedDict):
    time: float  # seconds since the epoch
    models: list[ModelSeen]
    buckets: list[Bucket]  # the last two that anything ended in
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
    requests: list[RequestSeen]  # the reader's own, the last one last
