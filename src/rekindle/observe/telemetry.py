"""The server's own counters, in a Prometheus registry that belongs to one server.

Only the event loop writes to them. The engine's counters are read on each scrape. Every label has
a bounded set of values.
"""

import re
from collections import Counter as Counting
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rekindle.generation.drafts import DraftCounts, DraftSource
from rekindle.generation.events import CacheSource
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    DeathCause,
    EngineStatus,
    ProcessState,
    ProcessStatus,
    Stalls,
    TierCounters,
    TierStatus,
)
from rekindle.observe.request_record import MissReason, RequestRecord
from rekindle.observe.watchdog import STALL_SECONDS

MAX_FIELD_NAMES = 100  # picked: real clients send a few dozen between them
OTHER = "other"
UNMATCHED = "unmatched"  # the route of a request that no route serves
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,79}")

MEDIA_KINDS = ("image", "audio", "video", "file")
FINISHES = ("stop", "length", "tool_calls", "cancelled", "failed")
# Seconds, from unnoticeable to far too long. Picked.
WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
MOVED_BETWEEN = (CacheSource.MEMORY, CacheSource.DISK, CacheSource.SHARED)
PACES = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2)


_COUNTERS = {  # by name: the help text and the labels
    "rekindle_http_requests": ("Requests answered, by route and status.", "route", "status"),
    "rekindle_prompt_tokens": ("Prompt tokens of all complete replies.",),
    "rekindle_generated_tokens": ("Tokens of all complete replies.",),
    "rekindle_remembered_turns": ("Remembered turns that were spliced into prompts.",),
    "rekindle_ignored_fields": ("Request fields that this server does not know, by name.", "field"),
    "rekindle_sticky_tools_saved_tokens": (
        "Prompt tokens not prefilled because dropped or reordered tools were rendered.",
    ),
    "rekindle_responses_damaged": ("Stored responses that could not be read.",),
    "rekindle_media_omitted": ("Media that the model did not see, by kind.", "kind"),
    "rekindle_replies": ("Finished replies, by finish reason.", "finish"),
    "rekindle_prompt_tokens_prefilled_twice": (
        "Prompt tokens prefilled although this process had computed them before.",
    ),
    "rekindle_misses": (
        "Prompts that missed the cache, by reason.",
        "reason",
    ),
    "rekindle_miss_tokens": ("Prompt tokens lost to misses.", "reason"),
    "rekindle_decode_tokens": ("Tokens sampled after the first token of each reply.",),
    "rekindle_decode_seconds": ("Time from each reply's first token to its last.",),
}


class Telemetry:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._in_flight = Gauge(
            "rekindle_http_requests_in_flight",
            "Requests being answered now.",
            registry=self._registry,
        )
        self._counters = {
            name: Counter(name, text, labels, registry=self._registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        for finish in FINISHES:
            self._counters["rekindle_replies"].labels(finish=finish)
        for kind in MEDIA_KINDS:
            self._counters["rekindle_media_omitted"].labels(kind=kind)
        for reason in MissReason:
            self._counters["rekindle_misses"].labels(reason=reason.value)
            self._counters["rekindle_miss_tokens"].labels(reason=reason.value)
        histogram = partial(Histogram, registry=self._registry)
        waits = partial(histogram, buckets=WAITS)
        self._build = waits("rekindle_render_seconds", "Time to render and tokenise the prompt.")
        self._queue = waits("rekindle_queue_seconds", "Time spent waiting for a slot.")
        self._restore = waits("rekindle_restore_seconds", "Time to restore stored rows.")
        self._prefill = waits("rekindle_prefill_seconds", "Time to prefill the prompt.")
        self._first_token = waits("rekindle_first_token_seconds", "Time to the first token.")
        self._total = waits("rekindle_reply_seconds", "Time to the end of the reply.")
        text = "Mean time between two tokens of a reply."
        self._pace = histogram("rekindle_inter_token_seconds", text, buckets=PACES)
        self._field_names: set[str] = set()

    def watch_trace(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Add the trace's counts of written and dropped lines."""
        self._registry.register(_Scraped(lambda: _trace_metrics(*counts())))

    def watch_event_loop(self, stalls: Stalls) -> None:
        """Add the stalls of the event loop, which the watchdog counts."""
        self._registry.register(_Scraped(lambda: _stall_metrics("event_loop", stalls)))

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Add the engines' numbers."""
        self._registry.register(_Scraped(lambda: _engine_metrics(status())))

    def request_began(self) -> None:
        self._in_flight.inc()

    def request_ended(self, *, route: str, status: int) -> None:
        self._in_flight.dec()
        self._count_answer(route, status)

    def count_refused(self, status: int) -> None:
        """Count a request that was refused before its route was known."""
        self._count_answer(UNMATCHED, status)

    def _count_answer(self, route: str, status: int) -> None:
        self._counters["rekindle_http_requests"].labels(route=route, status=str(status)).inc()

    def count_reply(self, record: RequestRecord) -> None:
        """Count the tokens of a complete reply."""
        self._counters["rekindle_prompt_tokens"].inc(record.n_prompt)
        self._counters["rekindle_generated_tokens"].inc(record.n_generated)
        self._counters["rekindle_remembered_turns"].inc(record.n_remembered_turns)
        self._counters["rekindle_sticky_tools_saved_tokens"].inc(record.n_sticky_saved)

    def count_ignored_field(self, name: str, count: int = 1) -> None:
        self._counters["rekindle_ignored_fields"].labels(field=self._bounded(name)).inc(count)

    def count_damaged_response(self) -> None:
        """Count a stored response that cannot be read. Any thread may call this."""
        self._counters["rekindle_responses_damaged"].inc()

    def count_media_omitted(self, kind: str, count: int) -> None:
        self._counters["rekindle_media_omitted"].labels(kind=kind).inc(count)

    def observe(self, record: RequestRecord) -> None:
        """Count a reply that has ended."""
        finish = record.finish.partition(":")[0]
        known_finish = finish if finish in FINISHES else OTHER
        self._counters["rekindle_replies"].labels(finish=known_finish).inc()
        self._total.observe(record.total_seconds)
        self._build.observe(record.build_seconds)
        if record.is_evaluated:
            self._counters["rekindle_prompt_tokens_prefilled_twice"].inc(record.n_recomputed)
            self._queue.observe(record.queue_seconds)
            self._prefill.observe(record.prefill_seconds)
            if record.restore_seconds > 0:
                self._restore.observe(record.restore_seconds)
        if (miss := record.miss) is not None:
            self._counters["rekindle_misses"].labels(reason=miss.reason.value).inc()
            lost = self._counters["rekindle_miss_tokens"]
            lost.labels(reason=miss.reason.value).inc(miss.tokens_lost)
        if record.first_token_seconds is not None:
            self._first_token.observe(record.first_token_seconds)
        if record.n_generated > 1:
            self._counters["rekindle_decode_tokens"].inc(record.n_generated - 1)
            self._counters["rekindle_decode_seconds"].inc(record.decode_seconds)
            self._pace.observe(record.decode_seconds / (record.n_generated - 1))

    def render(self) -> bytes:
        """Return the text exposition format that `GET /metrics` serves."""
        return generate_latest(self._registry)

    def _bounded(self, name: str) -> str:
        if name in self._field_names:
            return name
        if len(self._field_names) == MAX_FIELD_NAMES or not FIELD_NAME.fullmatch(name):
            return OTHER
        self._field_names.add(name)
        return name


def total(
    engines: Sequence[EngineStatus], past: CacheCounters, past_restarts: Mapping[str, int]
) -> EngineStatus:
    """Sum the status of all models. `past` and `past_restarts` are of unloaded ones."""
    caches = [each.cache for each in engines if each.cache is not None]
    return EngineStatus(
        n_slots=sum(each.n_slots for each in engines),
        n_running=sum(each.n_running for each in engines),
        n_waiting=sum(each.n_waiting for each in engines),
        max_waiting=sum(each.max_waiting for each in engines),
        n_ctx=max((each.n_ctx for each in engines), default=0),
        n_cells=sum(each.n_cells for each in engines),
        n_cells_used=sum(each.n_cells_used for each in engines),
        cache=_total_cache(caches, past) if caches or past != CacheCounters() else None,
        process=_total_process(engines, past_restarts),
    )


def _total_process(
    engines: Sequence[EngineStatus], past_restarts: Mapping[str, int]
) -> ProcessStatus:
    restarts = Counting(past_restarts)
    for engine in engines:
        if engine.process is not None:
            restarts.update(engine.process.restarts)
    return ProcessStatus(state=ProcessState.RUNNING, pid=None, restarts=restarts)


def _total_cache(caches: Sequence[CacheStatus], past: CacheCounters) -> CacheStatus:
    tiers: dict[CacheSource, list[TierStatus]] = {}
    for cache in caches:
        for tier in cache.tiers:
            tiers.setdefault(tier.name, []).append(tier)
    return CacheStatus(
        model_class="",
        off_because=None,
        tiers=tuple(_total_tier(name, parts) for name, parts in tiers.items()),
        counters=sum((cache.counters for cache in caches), past),
    )


def _total_tier(name: CacheSource, parts: Sequence[TierStatus]) -> TierStatus:
    # Memory is divided among the models. On disk, each model reports the bytes of all models.
    joined = max if name is CacheSource.DISK else sum
    return TierStatus(
        name=name,
        n_entries=sum(part.n_entries for part in parts),
        n_bytes=joined([part.n_bytes for part in parts]),
        budget_bytes=joined([part.budget_bytes for part in parts]),
        trouble=next((part.trouble for part in parts if part.trouble is not None), None),
        directory=parts[0].directory,
    )


class _Scraped(Collector):
    """Metrics that are read together on each scrape."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()


def _engine_metrics(status: EngineStatus) -> Iterator[Metric]:
    gauge = GaugeMetricFamily
    yield gauge("rekindle_slots", "Requests that can run at once.", status.n_slots)
    yield gauge("rekindle_slots_busy", "Requests that run now.", status.n_running)
    yield gauge("rekindle_requests_waiting", "Requests that wait for a slot.", status.n_waiting)
    yield gauge("rekindle_cells", "Positions that the context holds.", status.n_cells)
    yield gauge("rekindle_cells_used", "Context positions in use now.", status.n_cells_used)
    restarts = status.process.restarts if status.process is not None else {}
    yield _family(
        "rekindle_engine_restarts",
        "Engine processes that died and were started again, by cause.",
        "cause",
        {cause.value: restarts.get(cause, 0) for cause in DeathCause},
    )
    if status.cache is not None:
        yield from _tier_metrics(status.cache.tiers)
        yield from _cache_counters(status.cache.counters)
        yield from _draft_counters(status.cache.counters.drafts)
        yield from _shared_counters(status.cache.counters.shared)
        yield from _stall_metrics("engine", status.cache.counters.stalls)


def _trace_metrics(n_written: int, n_dropped: int) -> Iterator[Metric]:
    yield CounterMetricFamily("rekindle_trace_lines", "Trace lines written.", n_written)
    yield CounterMetricFamily("rekindle_trace_dropped", "Trace lines dropped.", n_dropped)


def _stall_metrics(who: str, stalls: Stalls) -> Iterator[Metric]:
    over = f"Times over {STALL_SECONDS:g} s in which"
    waited = {
        "event_loop": f"{over} the event loop answered nothing.",
        "engine": f"{over} the engine thread computed nothing and did not wait.",
    }[who]
    yield CounterMetricFamily(f"rekindle_{who}_stalls", waited, stalls.count)
    yield CounterMetricFamily(f"rekindle_{who}_stall_seconds", "Their sum.", stalls.seconds)
    longest = stalls.longest_seconds
    yield GaugeMetricFamily(f"rekindle_{who}_longest_stall_seconds", "The longest one.", longest)


def _tier_metrics(tiers: Sequence[TierStatus]) -> Iterator[Metric]:
    entries = GaugeMetricFamily("rekindle_cache_entries", "Stored entries.", labels=["tier"])
    used = GaugeMetricFamily("rekindle_cache_bytes", "Bytes in use, by tier.", labels=["tier"])
    budget = GaugeMetricFamily(
        "rekindle_cache_budget_bytes", "Budget in bytes, by tier.", labels=["tier"]
    )
    for tier in tiers:
        entries.add_metric([tier.name], tier.n_entries)
        if tier.name is CacheSource.SHARED:
            # Other servers write there, too: its bytes are not known here.
            is_up = int(tier.trouble is None)
            yield GaugeMetricFamily("rekindle_shared_store_up", "Whether the store answers.", is_up)
        else:
            used.add_metric([tier.name], tier.n_bytes)
            budget.add_metric([tier.name], tier.budget_bytes)
    yield from (entries, used, budget)


def _cache_counters(counted: CacheCounters) -> Iterator[Metric]:
    disk = counted.disk
    yield _family(
        "rekindle_prompt_tokens_reused",
        "Prompt tokens reused from the cache, by source.",
        "source",
        {source: counted.of(source).tokens for source in CacheSource},
    )
    yield _family(
        "rekindle_cache_evictions",
        "Entries dropped to make room.",
        "tier",
        {CacheSource.MEMORY: counted.memory.evictions, CacheSource.DISK: disk.evictions},
    )
    yield _family(
        "rekindle_cache_drops",
        "Entries dropped for reasons other than room.",
        "reason",
        {"covered": counted.covered, "thinned": counted.thinned, "deleted": counted.deleted},
    )
    yield from _moved_bytes(counted)
    for name, about, value in (
        ("rekindle_prompt_tokens_prefilled", "Prompt tokens computed.", counted.prefilled_tokens),
        ("rekindle_cache_quarantined", "Entries that failed a check.", disk.quarantined),
        ("rekindle_cache_vanished", "Entries not found on disk.", disk.vanished),
        ("rekindle_cache_writes", "Entries written to disk.", disk.writes),
        ("rekindle_cache_written_bytes", "Bytes written to disk.", disk.written_bytes),
        ("rekindle_cache_read_bytes", "Bytes read from disk.", disk.read_bytes),
        ("rekindle_cache_writes_refused", "Disk writes refused by settings.", disk.writes_refused),
        ("rekindle_cache_writes_failed", "Disk writes that failed.", disk.writes_failed),
        ("rekindle_cache_parked", "Idle slots freed to speed up the others.", counted.parked),
        ("rekindle_steps", "Batches computed.", counted.steps),
        ("rekindle_step_tokens", "Tokens in all computed batches.", counted.step_tokens),
    ):
        yield CounterMetricFamily(name, about, value)


def _draft_counters(drafts: DraftCounts) -> Iterator[Metric]:
    counts = {source.value: drafts.of(source) for source in DraftSource}
    tokens: dict[str, float] = {source: each.n_tokens for source, each in counts.items()}
    accepted: dict[str, float] = {source: each.n_accepted for source, each in counts.items()}
    yield _family("rekindle_draft_tokens", "Tokens drafted, by source.", "source", tokens)
    yield _family(
        "rekindle_draft_accepted_tokens", "Drafted tokens accepted, by source.", "source", accepted
    )


def _moved_bytes(counted: CacheCounters) -> Iterator[Metric]:
    tiers = [counted.of(source) for source in MOVED_BETWEEN]
    restored = "Bytes restored: from disk or the shared store to memory, from memory to a slot."
    saved = "Bytes stored: from a slot to memory, from memory to disk or the shared store."
    restoring, saving = "Time to restore these bytes.", "Time to store these bytes."
    for name, text, values in (
        ("restored_bytes", restored, [tier.read_bytes for tier in tiers]),
        ("restore_seconds", restoring, [tier.read_microseconds / 1e6 for tier in tiers]),
        ("saved_bytes", saved, [tier.written_bytes for tier in tiers]),
        ("save_seconds", saving, [tier.write_microseconds / 1e6 for tier in tiers]),
    ):
        by_tier: dict[str, float] = dict(zip(MOVED_BETWEEN, values, strict=True))
        yield _family(f"rekindle_cache_{name}", text, "tier", by_tier)


def _family(name: str, about: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, about, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


def _shared_counters(counted: TierCounters) -> Iterator[Metric]:
    for name, about, value in (
        ("probes", "Prompts looked up in the shared store.", counted.lookups),
        ("probes_failed", "Lookups that failed or timed out.", counted.lookups_failed),
        ("writes", "Entries written to the shared store.", counted.writes),
        ("writes_refused", "Writes refused by policy or by a full queue.", counted.writes_refused),
        ("writes_failed", "Writes to the shared store that failed.", counted.writes_failed),
        ("vanished", "Entries not found in the shared store.", counted.vanished),
        ("quarantined", "Entries that failed a check.", counted.quarantined),
    ):
        yield CounterMetricFamily(f"rekindle_shared_{name}", about, value)
