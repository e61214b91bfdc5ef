"""Engine status and finished requests as events of the feed."""

import time

from rekindle.api.cache.bodies import CLASSES
from rekindle.api.cache.views import miss_body, tier_props, tokens_by_tier
from rekindle.api.dashboard.bodies import (
    CacheSeen,
    DiskHealth,
    ModelSeen,
    ProcessSeen,
    RequestSeen,
    SharedHealth,
    SlotSeen,
    Snapshot,
    TokensBySource,
)
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.json import body_from
from rekindle.api.models import Models
from rekindle.generation.events import CacheSource
from rekindle.generation.status import CacheStatus, EngineStatus, ProcessStatus, SlotStatus
from rekindle.models.card import ListedModel, ModelState
from rekindle.observe.request_record import RequestRecord


def snapshot_of(models: Models, history: HourHistory, namespace: str | None) -> Snapshot:
    """Describe the server now, as a client of the namespace may see it; None: all of it."""
    return Snapshot(
        time=round(time.time(), 3),
        models=[_model_seen(listed, models, namespace) for listed in models.listed()],
        buckets=history.last_buckets(namespace),
        first_token_ms=history.first_token_ms(namespace),
    )


def request_seen(record: RequestRecord) -> RequestSeen:
    """Describe a finished request, with the prompt's text only where the cache missed."""
    first = record.first_token_seconds
    speed = record.tokens_per_second
    # A literal, because `class` is a keyword.
    return {
        "id": record.id,
        "model": record.model,
        "session": record.session,
        "class": CLASSES[record.rank],
        "ended_at": round(record.started_at + record.total_seconds, 3),
        "prompt_tokens": record.n_prompt,
        "cached": tokens_by_tier(record.spans),
        "prefilled": record.n_prefilled,
        "prefilled_twice": record.n_recomputed,
        "generated": record.n_generated,
        "drafted": record.drafts.n_tokens,
        "accepted": record.drafts.n_accepted,
        "queue_ms": _ms(record.queue_seconds),
        "restore_ms": _ms(record.restore_seconds),
        "prefill_ms": _ms(record.prefill_seconds),
        "first_token_ms": None if first is None else _ms(first),
        "total_ms": _ms(record.total_seconds),
        "tokens_per_second": None if speed is None else round(speed, 1),
        "finish": record.finish,
        "miss": miss_body(record.miss),
    }


def _model_seen(listed: ListedModel, models: Models, namespace: str | None) -> ModelSeen:
    status = models.status(listed.id) if listed.state is ModelState.LOADED else None
    seen = status or EngineStatus(0, 0, 0, 0, 0, 0, 0)
    return ModelSeen(
        id=listed.id,
        state=listed.state.value,
        n_ctx=seen.n_ctx,
        cells=seen.n_cells,
        cells_used=seen.n_cells_used,
        running=seen.n_running,
        waiting=seen.n_waiting,
        max_waiting=seen.max_waiting,
        slots=[_slot_seen(slot.seen_from(namespace)) for slot in seen.slots],
        cache=_cache_seen(seen.cache) if seen.cache is not None else None,
        no_drafts_because=seen.no_drafts_because,
        process=_process_seen(seen.process) if seen.process is not None else None,
    )


def _slot_seen(slot: SlotStatus) -> SlotSeen:
    return body_from(SlotSeen, slot, **{"class": CLASSES[slot.rank]})


def _process_seen(process: ProcessStatus) -> ProcessSeen:
    return ProcessSeen(
        state=process.state.value,
        restarts=sum(process.restarts.values()),
        last_death=process.last_death,
    )


def _cache_seen(cache: CacheStatus) -> CacheSeen:
    counted = cache.counters
    has_shared = any(tier.name is CacheSource.SHARED for tier in cache.tiers)
    probes = {"probes": counted.shared.lookups, "probes_failed": counted.shared.lookups_failed}
    return CacheSeen(
        model_class=cache.model_class,
        off_because=cache.off_because,
        tiers=[tier_props(tier) for tier in cache.tiers],
        tokens=TokensBySource(
            live=counted.live.tokens,
            memory=counted.memory.tokens,
            disk=counted.disk.tokens,
            shared=counted.shared.tokens,
            upstream=counted.upstream.tokens,
            prefilled=counted.prefilled_tokens,
        ),
        disk=body_from(DiskHealth, counted.disk),
        shared=body_from(SharedHealth, counted.shared, **probes) if has_shared else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
