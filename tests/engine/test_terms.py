"""Cache terms of requests: namespaces, ranks, pins, names, persistence, and questions."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle.cache.disk.tier import DiskTier
from rekindle.errors import EngineError, TierFailed
from rekindle.generation.events import CachedSpan, CacheSource, Finished
from rekindle.generation.forgetting import Place
from rekindle.generation.model_state import ModelClass
from rekindle.generation.questions import (
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    ReadTokens,
)
from rekindle.generation.request import CacheTerms, Pin, Rank
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix
from tests.engine.reuse.test_reuse import ALL_CLASSES, MAX_STEP_BACK, text
from tests.support.caches import cache_opener
from tests.support.deletions import forget, forget_key, n_deleted
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench

PATIENTLY = 50_000  # steps, which take no time while the disk is read
BLOCK_BYTES = 3700  # in memory, of a block that is full; a little more than it is
SIDE = CacheTerms(rank=Rank.BACKGROUND)
SUB_AGENT = CacheTerms(rank=Rank.EPHEMERAL)


def listed(bench: Bench, namespace: str = "") -> Sequence[StoredPrefix]:
    return bench.question(ListStored(namespace=namespace, limit=100))


def forecast(bench: Bench, prompt: list[int], namespace: str = "") -> Forecast:
    return bench.question(LookUp(tokens=tuple(prompt), namespace=namespace))


def forest(bench: Bench, namespace: str = "") -> Sequence[StoredBranch]:
    return bench.question(ListBranches(namespace=namespace, limit=100))


def finish(bench: Bench, name: str, patience_seconds: float = 60.0) -> object:
    """The last event of a request that waits for the disk."""
    deadline = time.monotonic() + patience_seconds
    while not any(isinstance(event, Finished | EngineError) for event in bench.events(name)):
        assert time.monotonic() < deadline
        bench.step()
        time.sleep(0.001)
    return bench.events(name)[-1]


@pytest.mark.parametrize("model_class", ALL_CLASSES)
@pytest.mark.parametrize("holder", ["live", "stored"])
def test_rows_are_shared_within_a_namespace_only(model_class: ModelClass, holder: str) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=1))
    prompt = text(600)
    bench.ask("a", prompt, 1, terms=CacheTerms(namespace="one"))
    if holder == "stored":
        bench.ask("stranger", text(300), 1)
    for namespace in ("", "two"):
        asked = bench.ask(f"b{namespace}", prompt, 1, terms=CacheTerms(namespace=namespace))
        assert asked.evaluated.n_cached == 0
        assert asked.n_computed == len(prompt)
    again = bench.ask("again", prompt, 1, terms=CacheTerms(namespace="one"))
    assert again.evaluated.n_cached >= len(prompt) - MAX_STEP_BACK
    assert again.tokens == expected_reply(prompt, 1)


def test_no_sequence_waits_for_a_prefill_of_another_namespace() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    prompt = text(2000)
    bench.submit("a", prompt, 1, terms=CacheTerms(namespace="one"))
    bench.submit("b", prompt, 1, terms=CacheTerms(namespace="two"))
    bench.run()
    assert bench.backend.n_computed == 2 * len(prompt)


def test_namespaces_survive_on_disk(tmp_path: Path) -> None:
    prompt = text(600)
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("a", prompt, 1, terms=CacheTerms(namespace="one"))
    first.close()
    second = Bench(FakeBackend(), cache_opener(tmp_path))
    assert second.ask("b", prompt, 1).evaluated.n_cached == 0
    theirs = second.ask(
        "c", prompt, 1, terms=CacheTerms(namespace="one"), n_steps=PATIENTLY
    ).evaluated
    assert theirs.spans == (CachedSpan(CacheSource.DISK, 0, len(prompt)),)
    second.close()


@pytest.mark.parametrize("model_class", [ModelClass.DENSE, ModelClass.HYBRID])
def test_a_side_request_takes_a_free_slot_before_a_conversations(
    model_class: ModelClass,
) -> None:
    """Not even that of the conversation whose prompt it begins with."""
    bench = Bench(FakeBackend(model_class=model_class, n_slots=3))
    conversation = text(600)
    reply = bench.ask("main", conversation, 20).tokens
    title = conversation + text(10)
    bench.ask("title", title, 5, terms=SIDE)
    bench.ask("sub-agent", text(300), 5, terms=SUB_AGENT)
    bench.ask("another", text(300), 5, terms=SUB_AGENT)
    going_on = bench.ask("main again", conversation + reply + text(5), 1)
    assert [span.source for span in going_on.evaluated.spans] == [CacheSource.LIVE]
    assert going_on.evaluated.n_cached == len(conversation) + len(reply) - 1


def test_main_conversations_keep_their_slots_when_side_requests_come_and_go() -> None:
    bench = Bench(FakeBackend(n_slots=3))
    mains = [text(300), text(300)]
    for index, prompt in enumerate(mains):
        bench.ask(f"main {index}", prompt, 1)
    for index in range(5):
        bench.ask(f"side {index}", text(300), 1, terms=SIDE)
    for index, prompt in enumerate(mains):
        spans = bench.ask(f"back {index}", prompt, 1).evaluated.spans
        assert spans == (CachedSpan(CacheSource.LIVE, 0, 300),)


def test_memory_evicts_sub_agents_first_then_side_requests() -> None:
    bench = Bench(FakeBackend(n_slots=1), cache_opener(memory_bytes=5 * BLOCK_BYTES))
    kept = {name: text(256) for name in ("main", "side", "sub-agent")}
    terms = {"main": CacheTerms(), "side": SIDE, "sub-agent": SUB_AGENT}
    for name, prompt in kept.items():
        bench.ask(name, prompt, 1, terms=terms[name])

    def held() -> list[str]:
        return [name for name, prompt in kept.items() if forecast(bench, prompt).n_cached >= 255]

    held_after = []
    for index in range(6):
        bench.ask(f"more {index}", text(256), 1)
        held_after.append(held())
    assert held_after[0] == ["main", "side", "sub-agent"]
    assert ["main", "side"] in held_after
    assert ["main"] in held_after


def test_an_entry_used_by_a_conversation_is_promoted_to_its_class() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    bench.ask("sub-agent", prompt, 1, terms=SUB_AGENT)
    assert {each.rank for each in listed(bench)} == {Rank.EPHEMERAL}
    bench.ask("stranger", text(300), 1)
    bench.ask("main", prompt, 1)
    assert {each.rank for each in listed(bench)} == {Rank.MAIN}


def test_a_pinned_prompt_outlives_more_recently_used_ones() -> None:
    bench = Bench(FakeBackend(n_slots=1), cache_opener(memory_bytes=64 * BLOCK_BYTES))
    pinned, plain = text(1024), text(1024)
    bench.ask("pinned", pinned, 1, terms=CacheTerms(pins=(Pin(1024, 3600.0),)))
    bench.ask("plain", plain, 1)
    for index in range(120):
        bench.ask(f"other {index}", text(1024), 1)
        if index % 8 == 0:
            bench.ask(f"used {index}", plain, 1)
    assert forecast(bench, pinned).n_cached == 1023
    [stored] = [each for each in listed(bench) if each.pinned_until is not None]
    assert stored.n_tokens == 1024


def test_a_session_cannot_pin_the_store_full() -> None:
    bench = Bench(FakeBackend(n_slots=1), cache_opener(memory_bytes=64 * BLOCK_BYTES))
    for index in range(30):
        prompt = text(1024)
        bench.ask(f"greedy {index}", prompt, 1, terms=CacheTerms(pins=(Pin(1024, 3600.0),)))
    pinned = [each for each in listed(bench) if each.pinned_until is not None]
    assert sum(each.n_bytes for each in pinned) <= 64 * BLOCK_BYTES / 8
    modest = text(600)
    bench.ask("modest", modest, 1)
    assert forecast(bench, modest).n_cached == 600


def test_a_pin_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeBackend(n_slots=1), cache_opener(memory_bytes=6 * 300_000))
    prompt = text(256)
    bench.ask("pinned", prompt, 1, terms=CacheTerms(pins=(Pin(256, 300.0),)))
    assert [each.pinned_until is None for each in listed(bench)] == [False]
    later = time.time() + 301
    monkeypatch.setattr(time, "time", lambda: later)
    assert [each.pinned_until is None for each in listed(bench)] == [True]


def test_pins_survive_a_restart(tmp_path: Path) -> None:
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    terms = CacheTerms(session="s", pins=(Pin(512, 3600.0),))
    first.ask("pinned", text(600), 1, terms=terms)
    first.close()
    second = Bench(FakeBackend(), cache_opener(tmp_path))
    assert {(each.session, each.pinned_until is None) for each in listed(second)} == {("s", True)}
    nodes = second.loop._cache._index.nodes()
    assert sum(node.retention.pinned_until > time.time() for node in nodes) == 2
    second.close()


def test_persist_ends_when_the_prompt_is_on_disk(tmp_path: Path) -> None:
    bench = Bench(FakeBackend(), cache_opener(tmp_path, min_tokens=64))
    prompt = text(40)  # shorter than what is written unasked
    bench.submit("primed", prompt, 0, terms=CacheTerms(persist=True, name="p"))
    assert isinstance(finish(bench, "primed"), Finished)
    files = list(tmp_path.glob("entries/*/*.kv"))
    assert [file.stat().st_size > 0 for file in files] == [True]
    bench.close()


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_persisted_prompt_of_any_model_is_found_by_the_next_process(
    tmp_path: Path, model_class: ModelClass
) -> None:
    first = Bench(FakeBackend(model_class=model_class), cache_opener(tmp_path))
    prompt = text(700)
    first.submit("primed", prompt, 0, terms=CacheTerms(persist=True))
    assert isinstance(finish(first, "primed"), Finished)
    second = Bench(FakeBackend(model_class=model_class), cache_opener(tmp_path))
    asked = second.ask("b", prompt + text(10), 1, n_steps=PATIENTLY)
    assert asked.evaluated.n_cached >= len(prompt) - MAX_STEP_BACK
    first.close()
    second.close()


def test_persist_without_a_working_disk_is_an_error(tmp_path: Path) -> None:
    """Without a disk, and with a budget that is used up."""
    without = Bench(FakeBackend())
    without.submit("a", text(300), 0, terms=CacheTerms(persist=True))
    failed = finish(without, "a")
    assert isinstance(failed, EngineError)
    assert "no disk tier" in failed.message
    poor = Bench(FakeBackend(), cache_opener(tmp_path, write_bytes_per_hour=1))
    poor.submit("b", text(300), 0, terms=CacheTerms(persist=True))
    failed = finish(poor, "b")
    assert isinstance(failed, EngineError)
    assert "budget" in failed.message
    poor.close()


def test_names_are_listed_found_after_a_restart_and_deleted(tmp_path: Path) -> None:
    prompts = {"one": text(600), "two": text(600)}
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    for name, prompt in prompts.items():
        first.submit(name, prompt, 0, terms=CacheTerms(name=name, session="s", persist=True))
        finish(first, name)
    assert [(each.name, each.n_tokens) for each in listed(first)][:2] == [
        ("two", 600),
        ("one", 600),
    ]
    first.close()
    second = Bench(FakeBackend(), cache_opener(tmp_path))
    one = next(each for each in listed(second) if each.name == "one")
    assert (one.session, one.sources, one.n_tokens) == ("s", (CacheSource.DISK,), 600)
    assert not n_deleted(second.question(forget_key("one", "another namespace")))
    assert n_deleted(second.question(forget_key("one"))) == 1 + 3
    assert {each.name for each in listed(second)} == {"two", None}
    assert forecast(second, prompts["one"]).n_cached == 0
    assert forecast(second, prompts["two"]).n_cached == 599
    second.close()
    third = Bench(FakeBackend(), cache_opener(tmp_path))
    assert "one" not in {each.name for each in listed(third)}
    assert forecast(third, prompts["one"]).n_cached == 0
    third.close()


def test_deleting_a_prompt_removes_its_continuations_and_keeps_shared_parts() -> None:
    bench = Bench(FakeBackend(n_slots=4))
    shared = text(512)
    one, other = shared + text(300), shared + text(300)
    bench.submit("one", one, 0, terms=CacheTerms(name="one"))
    bench.run()
    bench.ask("goes on", one + text(400), 1)
    bench.ask("other", other, 1)
    n_gone = bench.question(forget_key("one")).counts[Place.MEMORY]
    assert n_gone > 1
    assert forecast(bench, one + text(1)).n_cached == 512
    assert forecast(bench, other).n_cached == 812
    bench.question(forget())
    assert listed(bench) == []
    status = bench.loop.status().cache
    assert status is not None
    assert (status.counters.deleted > n_gone - 1, status.counters.covered > 0) == (True, True)
    assert forecast(bench, other).n_cached == 0
    again = bench.ask("again", other, 1)
    assert again.n_computed == len(other)
    assert again.tokens == expected_reply(other, 1)


def test_a_forecast_is_what_the_request_finds_and_changes_nothing(tmp_path: Path) -> None:
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    prompt = text(700)
    first.ask("a", prompt, 1)
    first.close()
    bench = Bench(FakeBackend(n_slots=2), cache_opener(tmp_path))
    bench.ask("b", text(300), 1)
    longer = prompt + text(50)
    before = bench.backend.n_computed
    expected = forecast(bench, longer)
    assert expected == forecast(bench, longer)
    assert (bench.backend.n_computed, expected.n_prompt) == (before, len(longer))
    assert expected.spans == bench.ask("c", longer, 1, n_steps=PATIENTLY).evaluated.spans
    assert [span.source for span in expected.spans] == [CacheSource.DISK]
    assert expected.prefill_seconds is not None
    live = forecast(bench, longer + text(1))
    assert live.spans == (CachedSpan(CacheSource.LIVE, 0, len(longer)),)
    assert live.restore_seconds == 0.0
    bench.close()


def test_slot_status_names_session_and_class() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    bench.submit("r", text(300), 50, terms=CacheTerms(session="s", rank=Rank.EPHEMERAL))
    for _ in range(4):
        bench.step()
    busy, idle = bench.loop.status().slots
    assert (busy.request_id, busy.session, busy.rank, busy.n_prompt) == ("r", "s", 2, 300)
    assert busy.n_generated > 0
    assert (idle.request_id, idle.n_rows) == (None, 0)


def test_the_forest_shows_shared_prefixes_and_where_they_diverge() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    shared = text(1024)
    one, two = shared + text(600), shared + text(300)
    bench.ask("one", one, 1, terms=CacheTerms(session="a"))
    bench.ask("two", two, 1, terms=CacheTerms(session="b"))
    bench.submit("named", shared, 0, terms=CacheTerms(name="head"))
    bench.run()
    trunk, *limbs = forest(bench)
    assert (trunk.start, trunk.stop, trunk.parent, trunk.names) == (0, 1024, None, ("head",))
    assert {(limb.start, limb.stop, limb.parent) for limb in limbs} == {
        (1024, len(one), 0),
        (1024, len(two), 0),
    }
    assert bench.question(ReadTokens(key=limbs[0].key, namespace="")) in (
        tuple(one),
        tuple(two),
    )
    assert bench.question(ReadTokens(key="head", namespace="")) == tuple(shared)
    assert bench.question(ReadTokens(key=trunk.key, namespace="another")) is None
    assert forest(bench, "another") == []


def test_a_branch_can_be_pinned_and_unpinned() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("one", text(600), 1)
    [branch] = forest(bench)
    assert bench.question(PinStored(key=branch.key, seconds=60.0, namespace="")) is True
    [pinned] = forest(bench)
    assert pinned.pinned_until is not None
    assert bench.question(PinStored(key=branch.key, seconds=0.0, namespace="")) is True
    assert forest(bench) == [branch]
    assert bench.question(PinStored(key="00", seconds=60.0, namespace="")) is False


def test_expired_pins_free_the_budget_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk, too, where nothing in memory has to wait for a pin to end."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    bench = Bench(FakeBackend(n_slots=1), cache_opener(tmp_path))
    pins = bench.loop._cache._holdings._pins
    promised = []
    for index in range(4):
        terms = CacheTerms(session="s", pins=(Pin(512, 300.0),))
        bench.ask(f"pinned {index}", text(512), 1, terms=terms)
        assert sum(each.pinned_until is not None for each in listed(bench)) == 1
        promised.append((pins.n_bytes, len(pins._ends), len(pins._held)))
        now[0] += 1000.0
    assert promised == [promised[0]] * 4
    assert promised[0][1:] == (2, 2)
    bench.close()


def test_a_refused_write_fails_the_request_at_once_and_costs_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: object) -> None:
        raise TierFailed("the disk is on fire")

    monkeypatch.setattr(DiskTier, "put", refuse)
    bench = Bench(FakeBackend(), cache_opener(tmp_path, write_bytes_per_hour=50_000_000))
    bench.submit("primed", text(600), 0, terms=CacheTerms(persist=True))
    failed = finish(bench, "primed")
    assert isinstance(failed, EngineError)
    assert "on fire" in failed.message
    status = bench.loop.status().cache
    assert status is not None
    assert status.counters.disk.writes_failed <= 8
    disk = bench.loop._cache._disk
    assert disk is not None
    assert disk._writable.left_share(time.monotonic()) > 0.9
    bench.close()


def test_a_prompt_deleted_while_the_disk_refuses_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(FakeBackend(), cache_opener(tmp_path))
    bench.submit("primed", text(600), 0, terms=CacheTerms(persist=True, name="p"))
    assert isinstance(finish(bench, "primed"), Finished)

    def refuse(*_: object) -> None:
        raise TierFailed("the disk is away")

    with monkeypatch.context() as away:
        away.setattr(DiskTier, "drop", refuse)
        away.setattr(DiskTier, "drop_names", refuse)
        away.setattr(DiskTier, "forget_after", refuse)
        deleted = bench.question(forget_key("p"))
        assert (deleted.counts[Place.NAMES], deleted.counts[Place.DISK]) == (1, 3)
        assert "the disk is away" in str(deleted.unreached)
    bench.close()
    again = Bench(FakeBackend(), cache_opener(tmp_path))
    assert listed(again) == []
    assert list(tmp_path.glob("entries/*/*.kv")) == []
    again.close()


def test_a_pinned_system_prompt_survives_deleting_its_conversation() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    head = text(512)
    bench.ask("one", head + text(300), 1, terms=CacheTerms(pins=(Pin(512, 3600.0),)))
    [tip] = [each for each in listed(bench) if each.n_tokens > 512]
    bench.question(forget_key(tip.key))
    assert forecast(bench, head + text(5)).n_cached == 512
