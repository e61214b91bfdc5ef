import asyncio
import re

import httpx

from rekindle.api.app import ApiSettings, create_app
from rekindle.cache.response_store import MemoryResponses
from rekindle.generation import CacheCounters, CacheSource, CacheStatus, TierStatus
from rekindle.telemetry import MAX_FIELD_NAMES, Telemetry
from tests.api.fakes import CARD, FakeResponder, FixedModels
from tests.api.http import USER, client_of


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
    app = create_app(models, ApiSettings(), telemetry, MemoryResponses())

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
        counters=CacheCounters(live_tokens=1, disk_tokens=3, disk_evictions=7, written_bytes=90),
    )
    assert samples(telemetry, "rekindle_prompt_tokens_reused_total") == {
        '{source="live"}': 1,
        '{source="memory"}': 0,
        '{source="disk"}': 3,
    }
    assert samples(telemetry, "rekindle_cache_evictions_total") == {
        '{tier="memory"}': 0,
        '{tier="disk"}': 7,
    }
    assert samples(telemetry, "rekindle_cache_written_bytes_total") == {"": 90}
    for name, value in (("entries", 5), ("bytes", 90), ("budget_bytes", 100)):
        assert samples(telemetry, f"rekindle_cache_{name}") == {'{tier="disk"}': value}
