import asyncio
import re

import httpx

from rekindle.generation.events import CacheSource
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    TierCounters,
    TierStatus,
)
from rekindle.observe.telemetry import MAX_FIELD_NAMES, Telemetry, total
from tests.api.client import USER, app_on, client_of
from tests.api.fakes import CARD, FakeResponder, FixedModels


def samples(telemetry: Telemetry, metric: str) -> dict[str, float]:
    found = re.findall(rf"^{metric}(\{{.*\}})? (\S+)$", telemetry.render().decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_unknown_fields_are_counted_by_path_at_every_level() -> None:
    async def run() -> str:
        async with client_of(FakeResponder()) as client:
            call = {"id": "c", "index": 0, "function": {"name": "f", "arguments": "{}"}}
            body = {
                "frobnicate": 1,
                "messages": [
                    {**USER, "annotations": []},
                    {"role": "assistant", "tool_calls": [call], "annotations": []},
                ],
                "stream_options": {"verbose": True},
            }
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            return (await client.get("/metrics")).text

    counted = dict(re.findall(r'ignored_fields_total\{field="(.+)"\} (\S+)', asyncio.run(run())))
    assert counted == {
        "frobnicate": "1.0",
        "messages.annotations": "2.0",
        "messages.tool_calls.index": "1.0",
        "stream_options.verbose": "1.0",
    }


def test_field_names_cannot_grow_without_bound() -> None:
    telemetry = Telemetry()
    for i in range(MAX_FIELD_NAMES + 50):
        telemetry.count_ignored_field(f"field_{i}")
    telemetry.count_ignored_field("with space")
    telemetry.count_ignored_field("field_1")
    counted = samples(telemetry, "rekindle_ignored_fields_total")
    assert len(counted) == MAX_FIELD_NAMES + 1
    assert counted['{field="other"}'] == 51
    assert counted['{field="field_1"}'] == 2


def test_requests_and_tokens_are_counted() -> None:
    telemetry = Telemetry()
    models = FixedModels(FakeResponder(), CARD)
    app = app_on(models, telemetry=telemetry)

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for stream in (False, True):
                body = {"messages": [USER], "stream": stream}
                await client.post("/v1/chat/completions", json=body)
            await client.post("/v1/chat/completions", json={})
            await client.get("/a/path/nobody/serves")

    asyncio.run(run())
    assert samples(telemetry, "rekindle_http_requests_total") == {
        '{route="/v1/chat/completions",status="200"}': 2,
        '{route="/v1/chat/completions",status="400"}': 1,
        '{route="unmatched",status="404"}': 1,
    }
    assert samples(telemetry, "rekindle_prompt_tokens_total") == {"": 20}
    assert samples(telemetry, "rekindle_generated_tokens_total") == {"": 4}
    assert samples(telemetry, "rekindle_http_requests_in_flight") == {"": 0}


def test_the_cache_is_read_when_someone_looks_and_is_absent_before_it_exists() -> None:
    telemetry = Telemetry()
    responder = FakeResponder()
    telemetry.watch(responder.status)
    assert samples(telemetry, "rekindle_slots") == {"": 4}
    assert "rekindle_cache" not in telemetry.render().decode()

    responder.cache = CacheStatus(
        model_class="dense",
        off_because=None,
        tiers=(TierStatus(name=CacheSource.DISK, n_entries=5, n_bytes=90, budget_bytes=100),),
        counters=CacheCounters(
            live=TierCounters(tokens=1), disk=TierCounters(tokens=3, evictions=7, written_bytes=90)
        ),
    )
    assert samples(telemetry, "rekindle_prompt_tokens_reused_total") == {
        '{source="live"}': 1,
        '{source="memory"}': 0,
        '{source="disk"}': 3,
        '{source="shared"}': 0,
        '{source="upstream"}': 0,
    }
    assert samples(telemetry, "rekindle_cache_evictions_total") == {
        '{tier="memory"}': 0,
        '{tier="disk"}': 7,
    }
    assert samples(telemetry, "rekindle_cache_written_bytes_total") == {"": 90}
    for name, value in (("entries", 5), ("bytes", 90), ("budget_bytes", 100)):
        assert samples(telemetry, f"rekindle_cache_{name}") == {'{tier="disk"}': value}


def with_shared(trouble: str | None, counters: CacheCounters | None = None) -> CacheStatus:
    shared = TierStatus(
        name=CacheSource.SHARED,
        n_entries=4,
        n_bytes=0,
        budget_bytes=0,
        trouble=trouble,
        directory="redis://store:6379/0",
    )
    memory = TierStatus(name=CacheSource.MEMORY, n_entries=2, n_bytes=8, budget_bytes=9)
    return CacheStatus(
        model_class="dense",
        off_because=None,
        tiers=(memory, shared),
        counters=counters or CacheCounters(),
    )


def watching(cache: CacheStatus) -> Telemetry:
    telemetry = Telemetry()
    telemetry.watch(lambda: EngineStatus(1, 0, 0, 1, 1, 1, 0, cache))
    return telemetry


def test_a_shared_store_is_up_or_not_and_absent_where_there_is_none() -> None:
    up = "rekindle_shared_store_up"
    assert samples(watching(with_shared(None)), up) == {"": 1}
    assert samples(watching(with_shared("connection refused")), up) == {"": 0}
    alone = with_shared(None)
    alone = CacheStatus(
        model_class="dense", off_because=None, tiers=alone.tiers[:1], counters=alone.counters
    )
    assert up not in watching(alone).render().decode()


def test_entries_of_a_shared_store_are_counted_as_far_as_known_and_without_bytes() -> None:
    telemetry = watching(with_shared(None))
    entries = {'{tier="memory"}': 2, '{tier="shared"}': 4}
    assert samples(telemetry, "rekindle_cache_entries") == entries
    assert samples(telemetry, "rekindle_cache_bytes") == {'{tier="memory"}': 8}
    assert samples(telemetry, "rekindle_cache_budget_bytes") == {'{tier="memory"}': 9}


def test_what_a_shared_store_and_an_upstream_gave_is_counted_apart() -> None:
    counters = CacheCounters(
        shared=TierCounters(
            tokens=1,
            lookups=3,
            lookups_failed=4,
            writes=5,
            writes_refused=6,
            writes_failed=7,
            vanished=8,
            quarantined=9,
        ),
        upstream=TierCounters(tokens=2),
    )
    telemetry = watching(with_shared(None, counters))
    reused = samples(telemetry, "rekindle_prompt_tokens_reused_total")
    assert (reused['{source="shared"}'], reused['{source="upstream"}']) == (1, 2)
    for name, value in (
        ("probes", 3),
        ("probes_failed", 4),
        ("writes", 5),
        ("writes_refused", 6),
        ("writes_failed", 7),
        ("vanished", 8),
        ("quarantined", 9),
    ):
        assert samples(telemetry, f"rekindle_shared_{name}_total") == {"": value}


def test_the_trouble_of_one_model_with_the_store_is_the_trouble_of_all() -> None:
    caches = [with_shared(None), with_shared("connection refused")]
    engines = [EngineStatus(1, 0, 0, 1, 512, 512, 0, cache=cache) for cache in caches]
    summed = total(engines, CacheCounters(), {}).cache
    assert summed is not None
    memory, shared = summed.tiers
    assert (shared.n_entries, shared.n_bytes) == (8, 0)
    assert shared.trouble == "connection refused"
    assert shared.directory == "redis://store:6379/0"
    assert memory.trouble is None
