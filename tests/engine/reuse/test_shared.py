"""Servers that share a store: what one has computed, the others do not compute again."""

import time
from collections.abc import Iterator
from itertools import count

import pytest

from rekindle.cache.entry import token_bytes
from rekindle.cache.index import Match, Node, Where
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.shared import residency as shared_residency
from rekindle.cache.stores.backlog import Backlog
from rekindle.cache.stores.load_gate import LoadGate
from rekindle.cache.stores.transfers import Lane
from rekindle.engine.reuse import restorer
from rekindle.generation.events import CachedSpan, CacheSource
from rekindle.generation.forgetting import Place
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import CacheTerms, Rank
from rekindle.generation.status import TierCounters
from tests.engine.reuse.test_reuse import ALL_CLASSES, least_reused
from tests.support.caches import ROOT, cache_opener
from tests.support.deletions import forget, n_deleted
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench
from tests.support.shared_caches import SharedHouse

_fresh = count(1_000_000, 100_000)

STORABLE = [each for each in ALL_CLASSES if each is not ModelClass.OPAQUE]


def text(length: int) -> list[int]:
    start = next(_fresh)
    return list(range(start, start + length))


@pytest.fixture
def house() -> Iterator[SharedHouse]:
    house = SharedHouse()
    yield house
    house.store.close()


def server(
    house: SharedHouse,
    *,
    model_class: ModelClass = ModelClass.DENSE,
    n_slots: int = 2,
    **cache: int,
) -> Bench:
    backend = FakeBackend(n_slots=n_slots, model_class=model_class, n_cells=20_000)
    return Bench(backend, cache_opener(shared=house.door, **cache))  # type: ignore[arg-type]


def settle(bench: Bench) -> None:
    """Idle steps, in which what is left of a turn is stored."""
    for _ in range(40):
        bench.step()


def counted(bench: Bench) -> TierCounters:
    cache = bench.loop.status().cache
    assert cache is not None
    return cache.counters.shared


@pytest.mark.parametrize("model_class", STORABLE)
def test_a_prefix_computed_by_one_server_is_restored_by_another(
    house: SharedHouse, model_class: ModelClass
) -> None:
    one, other = (server(house, model_class=model_class) for _ in range(2))
    prompt = text(1500)
    reply = one.ask("a", prompt, 30).tokens
    settle(one)
    longer = prompt + reply + text(40)
    asked = other.ask("b", longer)
    assert asked.evaluated.n_cached >= least_reused(model_class, 1529)
    assert {span.source for span in asked.evaluated.spans} == {CacheSource.SHARED}
    assert asked.tokens == expected_reply(longer, 8)
    assert counted(other).tokens == asked.evaluated.n_cached


@pytest.mark.parametrize("model_class", STORABLE)
def test_a_conversation_that_changes_servers_is_computed_once(
    house: SharedHouse, model_class: ModelClass
) -> None:
    servers = [server(house, model_class=model_class) for _ in range(3)]
    prompt = text(900)
    n_computed = n_new = 0
    new = len(prompt)
    for turn in range(8):
        bench = servers[turn % 3]
        asked = bench.ask(f"turn {turn}", prompt, 30)
        settle(bench)
        assert asked.tokens == expected_reply(prompt, 30)
        n_computed += asked.n_computed
        n_new += new + 29  # the last token of a reply is sampled and never computed
        more = text(120)
        prompt = prompt + asked.tokens + more
        new = 1 + len(more)
    step_back = 0 if model_class is ModelClass.DENSE else 64
    assert n_computed <= n_new + 8 * step_back


def test_the_shared_store_is_not_asked_for_local_rows(house: SharedHouse) -> None:
    bench = server(house)
    prompt = text(800)
    bench.ask("cold", prompt)
    n_lookups = counted(bench).lookups
    bench.ask("warm", prompt)
    bench.ask("short", text(shared_residency.MIN_LOOKUP_TOKENS))
    assert counted(bench).lookups == n_lookups


def test_a_late_answer_delays_no_request_and_is_used_later(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(house), server(house)
    prompt = text(1000)
    one.ask("a", prompt)
    settle(one)
    slow = house.pools[1]
    slow.hold(Lane.LOOKUP)
    monkeypatch.setattr(shared_residency, "LOOKUP_SECONDS", (0.0, 0.0))
    asked = other.ask("b", prompt, 1)
    assert asked.n_computed == 1000
    assert counted(other).lookups_failed == 1
    slow.work()
    settle(other)
    assert other.loop.status().n_running == 0


def test_other_requests_proceed_while_one_waits_for_the_store(house: SharedHouse) -> None:
    bench = server(house)
    house.pools[0].hold(Lane.LOOKUP)
    bench.submit("asks", text(600), 1)
    bench.step()
    assert bench.loop.status().n_waiting == 1
    bench.submit("has nothing to ask for", text(20), 1)
    for _ in range(5):
        bench.step()
    assert bench.tokens("has nothing to ask for")
    assert not bench.tokens("asks")
    house.pools[0].work()
    bench.run()
    assert bench.tokens("asks")


def test_an_unreachable_store_is_not_asked_and_nothing_fails(house: SharedHouse) -> None:
    bench = server(house)
    house.store.health.note_failure("nobody listens", is_final=True)
    prompt = text(700)
    assert bench.ask("a", prompt).tokens == expected_reply(prompt, 8)
    settle(bench)
    assert bench.ask("a again", prompt).evaluated.n_cached == 700
    status = bench.loop.status().cache
    assert status is not None
    assert [tier.trouble for tier in status.tiers if tier.name is CacheSource.SHARED] == [
        "nobody listens"
    ]
    assert counted(bench).lookups == counted(bench).writes == 0


def test_entries_that_could_not_be_written_are_written_when_the_store_returns(
    house: SharedHouse,
) -> None:
    one, other = server(house), server(house)
    house.objects.die()
    prompt = text(600)
    reply = one.ask("a", prompt).tokens
    settle(one)
    assert not house.store.health.is_well
    assert counted(one).writes == 0
    house.objects.recover()
    wait_until_well(house)
    settle(one)
    assert other.ask("b", [*prompt, *reply, 5]).evaluated.n_cached == 607


def wait_until_well(house: SharedHouse) -> None:
    deadline = time.monotonic() + 10
    while not house.store.health.is_well:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_entry_that_vanished_is_recomputed(house: SharedHouse) -> None:
    one, other = server(house), server(house)
    prompt = text(1000)
    one.ask("a", prompt)
    settle(one)
    reader = house.pools[1]
    reader.hold(Lane.READ)
    other.submit("b", prompt)
    for _ in range(5):
        other.step()
    house.objects.lose(*house.objects.objects)
    reader.let_go(Lane.READ)
    reader.work()
    other.run()
    assert other.tokens("b") == expected_reply(prompt, 8)
    assert counted(other).vanished > 0


def test_a_damaged_entry_is_a_miss_and_never_an_answer(house: SharedHouse) -> None:
    one, other = server(house), server(house)
    prompt = text(1000)
    one.ask("a", prompt)
    settle(one)
    for name, data in house.objects.objects.items():
        house.objects.flip_bit(name, len(data) - 1)
    assert other.ask("b", prompt).tokens == expected_reply(prompt, 8)
    assert counted(other).quarantined > 0


def test_namespaces_share_nothing(house: SharedHouse) -> None:
    one, other = server(house), server(house)
    prompt = text(800)
    one.ask("a", prompt, 1, terms=CacheTerms(namespace="x"))
    settle(one)
    longer = [*prompt, 5]
    assert other.ask("b", longer, terms=CacheTerms(namespace="y")).evaluated.n_cached == 0
    assert other.ask("c", longer, terms=CacheTerms(namespace="x")).evaluated.n_cached == 800


def test_a_sub_agents_rows_are_written_after_a_second_use(
    house: SharedHouse,
) -> None:
    bench = server(house)
    prompt = text(600)
    terms = CacheTerms(rank=Rank.EPHEMERAL)
    bench.ask("once", prompt, terms=terms)
    settle(bench)
    assert counted(bench).writes == 0
    bench.ask("twice", prompt + text(80), terms=terms)
    settle(bench)
    assert counted(bench).writes > 0


def test_pending_writes_are_bounded_and_retried_when_there_is_room(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, other = server(house), server(house)
    prompt = text(5000)
    writer = house.pools[0]
    writer.hold(Lane.WRITE)
    monkeypatch.setattr(shared_residency, "MAX_PENDING_BYTES", 4000)
    bench.ask("a", prompt, 1)
    settle(bench)
    assert counted(bench).writes == 0
    assert writer.n_held < 20
    writer.let_go(Lane.WRITE)
    writer.work()
    settle(bench)
    assert other.ask("b", [*prompt, 5]).evaluated.n_cached == 5000


def test_what_a_deletion_covers_is_not_found_in_the_shared_store(house: SharedHouse) -> None:
    one, other = server(house), server(house)
    prompt = text(800)
    one.ask("a", prompt)
    settle(one)
    assert n_deleted(one.question(forget()))
    assert other.ask("b", prompt).evaluated.n_cached == 0


def test_a_deletion_is_counted_where_its_entries_are_removed(house: SharedHouse) -> None:
    """The engine leaves the objects to the server: other sessions may follow them elsewhere."""
    bench = server(house)
    bench.ask("a", text(800), terms=CacheTerms(session="mine"))
    settle(bench)
    before = set(house.objects.objects)
    deleted = bench.question(forget(session="mine"))
    assert set(deleted.counts) <= {Place.LIVE, Place.MEMORY, Place.NAMES}
    settle(bench)
    assert set(house.objects.objects) == before
    status = bench.loop.status().cache
    assert status is not None
    [shared] = [tier for tier in status.tiers if tier.name is CacheSource.SHARED]
    assert shared.n_entries == 0


def test_writes_that_wait_during_a_deletion_never_reach_the_store(house: SharedHouse) -> None:
    bench = server(house)
    [writer] = house.pools
    writer.hold(Lane.WRITE)
    bench.ask("a", text(800))
    settle(bench)
    assert writer.n_held
    bench.question(forget())
    writer.let_go(Lane.WRITE)
    writer.work()
    settle(bench)
    assert not house.objects.objects
    bench.ask("b", text(800), terms=CacheTerms(asked_at=time.time()))
    settle(bench)
    assert house.objects.objects


def test_another_server_knows_whose_entries_it_found(house: SharedHouse) -> None:
    opened: list[PrefixCache] = []
    one = server(house)
    other = Bench(FakeBackend(n_cells=20_000), cache_opener(shared=house.door, opened=opened))
    prompt = text(800)
    one.ask("a", prompt, terms=CacheTerms(session="mine", asked_at=7.0))
    settle(one)
    other.ask("b", [*prompt, 5], terms=CacheTerms(session="yours", asked_at=9.0))
    found = opened[0]._index.match_blocks(ROOT, token_bytes(prompt))
    assert [(node.retention.session, node.retention.asked_at) for node in found] == [
        ("mine", 7.0)
    ] * 3


def test_entries_evicted_from_memory_are_restored_from_the_store(house: SharedHouse) -> None:
    bench = server(house, n_slots=1, memory_bytes=40_000)
    prompts = [text(900) for _ in range(6)]
    for n, prompt in enumerate(prompts):
        bench.ask(f"first {n}", prompt)
        settle(bench)
    for n, prompt in enumerate(prompts):
        asked = bench.ask(f"second {n}", prompt)
        assert asked.evaluated.n_cached == 899
        assert asked.tokens == expected_reply(prompt, 8)


def test_the_index_bounds_entries_held_by_the_store_alone(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(house), server(house)
    prompts = [text(600) for _ in range(4)]
    for n, prompt in enumerate(prompts):
        one.ask(f"a {n}", prompt, 1)
        settle(one)
    monkeypatch.setattr(shared_residency, "MAX_KNOWN", 3)
    for n, prompt in enumerate(prompts):
        assert other.ask(f"b {n}", [*prompt, 5]).evaluated.n_cached == 600
        settle(other)
    status = other.loop.status().cache
    assert status is not None
    [shared] = [tier for tier in status.tiers if tier.name is CacheSource.SHARED]
    assert shared.n_entries <= 3


def test_a_network_slower_than_computing_is_not_used() -> None:
    gate = LoadGate(Backlog(), may_recompute=True)
    block = Node(b"k")
    block.tokens, block.payload_bytes, block.where = bytes(1024), 1_000_000, Where.SHARED
    match = Match(256, (block,), None)
    gate.put_speed.observe(1e9, 0.1)

    def n_loaded() -> int:
        return gate.n_worth_loading(match, n_live=0, n_gained=256, prefill_seconds_per_token=0.001)

    gate.shared_speed.observe(1e6, 0.1)
    assert n_loaded() == 256
    gate.shared_speed.observe(1e6, 10.0)
    assert n_loaded() == 0
    block.where |= Where.DISK
    gate.read_speed.observe(1e9, 0.5)
    assert n_loaded() == 256


def test_spans_name_each_source(house: SharedHouse) -> None:
    one, other = server(house), server(house)
    prompt = text(1024)
    other.ask("b", prompt[:512], 1)
    settle(other)
    one.ask("a", prompt, 1)
    settle(one)
    asked = other.ask("c", [*prompt, 5])
    assert asked.evaluated.spans == (
        CachedSpan(CacheSource.LIVE, 0, 512),
        CachedSpan(CacheSource.SHARED, 512, 1024),
    )


def test_a_recomputed_prefix_is_stored_locally_although_the_store_has_it(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(house), server(house, n_slots=1)
    prompt = text(1000)
    one.ask("a", prompt)
    settle(one)
    late = house.pools[1]
    late.hold(Lane.LOOKUP)
    monkeypatch.setattr(shared_residency, "LOOKUP_SECONDS", (0.0, 0.0))
    other.ask("b", prompt)
    late.work()
    settle(other)
    house.store.health.note_failure("nobody listens", is_final=True)
    other.ask("something else", text(3000))
    asked = other.ask("b again", prompt)
    assert asked.evaluated.n_cached == 1000
    assert {span.source for span in asked.evaluated.spans} == {CacheSource.MEMORY}


def test_a_prompt_that_diverges_inside_a_local_block_is_looked_up(house: SharedHouse) -> None:
    bench = server(house)
    prompt = text(600)
    bench.ask("a", prompt)
    settle(bench)
    other = prompt[:300] + text(200)
    asked = bench.ask("b", other)
    assert asked.evaluated.n_cached == 300
    assert asked.tokens == expected_reply(other, 8)


def test_a_store_that_delivers_nothing_is_given_up(
    house: SharedHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(house), server(house)
    prompt = text(1000)
    one.ask("a", prompt)
    settle(one)
    reader = house.pools[1]
    reader.hold(Lane.READ)
    monkeypatch.setattr(restorer, "PATIENCE_SECONDS", 0.0)
    asked = other.ask("b", prompt)
    assert asked.evaluated.n_cached == 0
    assert asked.tokens == expected_reply(prompt, 8)
    reader.work()  # the reads were withdrawn
    assert counted(other).read_bytes == 0
