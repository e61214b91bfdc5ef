"""What the records of replies and the engine's counters add up to in /metrics."""

import json
import re
from pathlib import Path

from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.generation.events import CacheSource
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    TierCounters,
    TierStatus,
)
from rekindle.observe.request_record import Miss, MissReason
from rekindle.observe.telemetry import FINISHES, OTHER, Telemetry
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import Bench
from tests.support.records import CLOCK, a_record

PATIENTLY = 1_000_000  # steps of the engine, while the disk is read
GRAFANA = Path(__file__).parents[2] / "contrib" / "grafana" / "rekindle.json"


def samples(telemetry: Telemetry, metric: str) -> dict[str, float]:
    found = re.findall(rf"^{metric}(\{{.*\}})? (\S+)$", telemetry.render().decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def watching(counters: CacheCounters) -> Telemetry:
    telemetry = Telemetry()
    tier = TierStatus(name=CacheSource.DISK, n_entries=0, n_bytes=0, budget_bytes=1)
    cache = CacheStatus(model_class="dense", off_because=None, tiers=(tier,), counters=counters)
    telemetry.watch(lambda: EngineStatus(1, 0, 0, 1, 1, 1, 0, cache))
    return telemetry


def test_tokens_prefilled_twice_and_misses_add_up_by_reason() -> None:
    telemetry = Telemetry()
    evicted = Miss(reason=MissReason.EVICTED, tokens_lost=20)
    for miss in (CLOCK, CLOCK, evicted, None):
        telemetry.observe(a_record(miss=miss))
    assert samples(telemetry, "rekindle_prompt_tokens_prefilled_twice_total") == {"": 80}
    misses = samples(telemetry, "rekindle_misses_total")
    assert misses['{reason="system_changed"}'] == 2
    assert misses['{reason="evicted"}'] == 1
    lost = samples(telemetry, "rekindle_miss_tokens_total")
    assert lost['{reason="system_changed"}'] == 1280
    assert lost['{reason="evicted"}'] == 20
    assert len(misses) == len(lost) == len(MissReason)


def test_the_ways_a_reply_ends_are_a_closed_list() -> None:
    telemetry = Telemetry()
    for finish in (*FINISHES, "failed: the disk burns", "failed: another reason", "new"):
        telemetry.observe(a_record(finish=finish))
    ended = samples(telemetry, "rekindle_replies_total")
    assert ended.pop(f'{{finish="{OTHER}"}}') == 1
    assert ended.pop('{finish="failed"}') == 3
    assert set(ended.values()) == {1}
    assert len(ended) == len(FINISHES) - 1


def test_the_times_of_a_reply_are_observed_where_it_came_that_far() -> None:
    telemetry = Telemetry()
    telemetry.observe(a_record())
    telemetry.observe(a_record(restore_seconds=0.0, n_generated=1, decode_seconds=0.0))
    telemetry.observe(
        a_record(is_evaluated=False, first_token_seconds=None, n_generated=0, finish="cancelled")
    )
    counts = {"reply": 3, "render": 3, "queue": 2, "prefill": 2, "restore": 1, "first_token": 2}
    for name, n_times in {**counts, "inter_token": 1}.items():
        assert samples(telemetry, f"rekindle_{name}_seconds_count") == {"": n_times}, name
    assert samples(telemetry, "rekindle_restore_seconds_sum") == {"": 2.0}
    assert samples(telemetry, "rekindle_inter_token_seconds_sum") == {"": 1.0}
    assert samples(telemetry, "rekindle_decode_tokens_total") == {"": 10}
    assert samples(telemetry, "rekindle_decode_seconds_total") == {"": 10.0}


def test_bytes_that_move_are_shown_by_tier_and_way() -> None:
    telemetry = watching(
        CacheCounters(
            memory=TierCounters(
                read_bytes=1,
                read_microseconds=2_000_000,
                written_bytes=5,
                write_microseconds=6_000_000,
            ),
            disk=TierCounters(
                read_bytes=3,
                read_microseconds=4_000_000,
                written_bytes=7,
                write_microseconds=8_000_000,
            ),
            shared=TierCounters(
                read_bytes=9,
                read_microseconds=10_000_000,
                written_bytes=11,
                write_microseconds=12_000_000,
            ),
        )
    )
    expected = {
        "restored_bytes": (1, 3, 9),
        "restore_seconds": (2, 4, 10),
        "saved_bytes": (5, 7, 11),
        "save_seconds": (6, 8, 12),
    }
    for name, (memory, disk, shared) in expected.items():
        assert samples(telemetry, f"rekindle_cache_{name}_total") == {
            '{tier="memory"}': memory,
            '{tier="disk"}': disk,
            '{tier="shared"}': shared,
        }


def test_drafted_and_accepted_tokens_are_shown_by_source() -> None:
    drafts = DraftCounts(reply=DraftCount(9, 8), context=DraftCount(7, 4))
    telemetry = watching(CacheCounters(drafts=drafts))
    for name, (reply, context) in {"draft": (9, 7), "draft_accepted": (8, 4)}.items():
        assert samples(telemetry, f"rekindle_{name}_tokens_total") == {
            '{source="grammar"}': 0,
            '{source="reply"}': reply,
            '{source="context"}': context,
            '{source="store"}': 0,
        }


def test_batches_and_what_is_in_them_are_counted() -> None:
    bench = Bench(FakeBackend())
    bench.ask("a", range(1, 101), 5)
    cache = bench.loop.status().cache
    assert cache is not None
    # The last token of a reply is sampled, and never computed.
    assert cache.counters.step_tokens == 100 + 4
    assert cache.counters.steps == len(bench.backend.batches)


def test_what_is_saved_written_and_read_is_measured(tmp_path: Path) -> None:
    prompt = list(range(1, 601))
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("a", prompt, 1)
    first.loop.stop()
    cache = first.loop.status().cache
    assert cache is not None
    assert cache.counters.memory.written_bytes == cache.counters.disk.written_bytes > 0
    assert cache.counters.memory.write_microseconds > 0
    assert cache.counters.disk.write_microseconds > 0

    again = Bench(FakeBackend(), cache_opener(tmp_path))
    asked = again.ask("a", prompt, 1, n_steps=PATIENTLY)
    assert asked.evaluated.n_cached > 0
    cache = again.loop.status().cache
    assert cache is not None
    assert cache.counters.disk.read_bytes > 0
    assert cache.counters.disk.read_microseconds > 0
    again.loop.stop()


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    telemetry = watching(CacheCounters())
    telemetry.watch_trace(lambda: (0, 0))
    telemetry.request_began()
    telemetry.request_ended(route="/health", status=200)
    served = set(re.findall(r"^(rekindle_\w+)", telemetry.render().decode(), re.MULTILINE))
    panels = json.loads(GRAFANA.read_text("utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {name for each in expressions for name in re.findall(r"rekindle_\w+", each)}
    assert len(named) > 30
    assert named - served == set()
