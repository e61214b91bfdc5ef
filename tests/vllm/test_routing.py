"""Several upstreams: routing of requests, and failover."""

import asyncio

import pytest

from rekindle.errors import UpstreamFailed
from rekindle.vllm.prefix_table import CHUNK_TOKENS, PrefixTable, chunk_keys
from tests.support.fake_vllm import FakeVllm, fake_vllm
from tests.vllm.engines import (
    engine_on,
    events_of,
    request,
    tokens_before_failure,
    tokens_in,
    until,
)


def n_asked(*fakes: FakeVllm) -> list[int]:
    return [len(fake.asked) for fake in fakes]


def test_a_conversation_stays_where_its_prefix_is() -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two) as engine:
            one.gate.clear()
            held = engine.submit(request("a", range(100, 164)))  # the first one is busy
            await until(lambda: n_asked(one, two) == [1, 0])
            await events_of(engine.submit(request("b", range(500, 628))))
            assert n_asked(one, two) == [1, 1]
            one.gate.set()
            await events_of(held)
            # Now both are idle: only the prefix tells them apart.
            for turn in range(3):
                await events_of(engine.submit(request(f"b{turn}", range(500, 640 + turn))))
            assert n_asked(one, two) == [1, 4]
            await events_of(engine.submit(request("a2", range(100, 180))))
            assert n_asked(one, two) == [2, 4]

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


def test_without_a_known_prefix_the_least_busy_gets_it_and_none_gets_too_many() -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two, n_each=2) as engine:
            one.gate.clear()
            two.gate.clear()
            prompts = [range(start, start + 70) for start in range(100, 600, 100)]
            streams = [engine.submit(request(f"r{p.start}", p)) for p in prompts]
            await until(lambda: n_asked(one, two) == [2, 2])
            assert engine.status().n_waiting == 1
            two.gate.set()
            await until(lambda: n_asked(one, two) == [2, 3])
            one.gate.set()
            await asyncio.gather(*map(events_of, streams))

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"answers_garbage": True}, {"dies_after": 0}], ids=str
)
def test_before_the_first_token_another_upstream_takes_over(fault: dict[str, object]) -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two) as engine:
            for name, value in fault.items():
                setattr(one, name, value)
            events = await events_of(engine.submit(request("a")))
            assert tokens_in(events) == two.reply_to(list(range(100, 140)))[:-1]
            assert n_asked(one, two) == [1, 1]

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


def test_after_the_first_token_no_other_upstream_takes_over() -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two) as engine:
            one.dies_after = 2
            tokens: list[int] = []
            with pytest.raises(UpstreamFailed):
                await tokens_before_failure(engine.submit(request("a")), tokens)
            assert len(tokens) == 2
            assert n_asked(one, two) == [1, 0]

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


def test_an_upstream_that_failed_rests_and_comes_back_by_itself() -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two) as engine:
            one.dies_after = 0
            await events_of(engine.submit(request("a")))
            status = engine.status()
            assert status.n_slots == 4
            assert status.cache is not None
            assert one.url in str(status.cache.tiers[0].trouble)
            n_probes = one.n_probes
            await until(lambda: one.n_probes > n_probes)
            assert engine.status().n_slots == 4
            one.dies_after = None
            await until(lambda: engine.status().n_slots == 8)
            two.status = 500
            await events_of(engine.submit(request("b")))
            assert n_asked(one, two)[0] == 2

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


def test_when_all_fail_the_error_names_the_last_and_later_requests_fail_at_once() -> None:
    async def play(one: FakeVllm, two: FakeVllm) -> None:
        async with engine_on(one, two) as engine:
            one.dies_after = two.dies_after = 0
            with pytest.raises(UpstreamFailed, match=two.url):
                await events_of(engine.submit(request("a")))
            with pytest.raises(UpstreamFailed, match="No upstream"):
                engine.submit(request("b"))
            one.dies_after = None
            await until(lambda: engine.status().n_slots == 4)
            assert len(tokens_in(await events_of(engine.submit(request("c"))))) == 6

    with fake_vllm() as one, fake_vllm() as two:
        asyncio.run(play(one, two))


def test_an_upstream_that_lies_in_health_is_not_used_until_it_generates() -> None:
    async def play(liar: FakeVllm, honest: FakeVllm) -> None:
        async with engine_on(liar, honest) as engine:
            assert engine.status().n_slots == 4
            await events_of(engine.submit(request("a")))
            assert n_asked(liar, honest) == [0, 1]
            liar.samples_nonsense = False
            await until(lambda: engine.status().n_slots == 8)

    with fake_vllm(samples_nonsense=True) as liar, fake_vllm() as honest:
        asyncio.run(play(liar, honest))


def test_one_that_comes_with_another_model_is_not_used() -> None:
    async def play(one: FakeVllm, other: FakeVllm) -> None:
        async with engine_on(one, other) as engine:
            other.dies_after = one.dies_after = 0
            with pytest.raises(UpstreamFailed):
                await events_of(engine.submit(request("a")))
            one.dies_after = other.dies_after = None
            other.model = "fake/Other"
            await until(lambda: engine.status().n_slots == 4)
            cache = engine.status().cache
            assert cache is not None
            assert "fake/Other" in str(cache.tiers[0].trouble)

    with fake_vllm() as one, fake_vllm() as other:
        asyncio.run(play(one, other))


def test_a_cancelled_request_that_waits_leaves_its_place() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake, n_each=1) as engine:
            fake.gate.clear()
            held = engine.submit(request("a"))
            waiting = engine.submit(request("b"))
            last = engine.submit(request("c"))
            await until(lambda: len(fake.asked) == 1)
            waiting.cancel()
            fake.gate.set()
            await asyncio.gather(events_of(held), events_of(last))
            assert len(fake.asked) == 2

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_a_prefix_table_knows_chunks_in_order_and_forgets_the_oldest_ends_first() -> None:
    table = PrefixTable(max_chunks=4)
    long = chunk_keys("", range(5 * CHUNK_TOKENS))
    table.learn(long[:3])
    assert table.n_tokens_known(long) == 3 * CHUNK_TOKENS
    assert table.n_tokens_known(long[1:]) == 2 * CHUNK_TOKENS
    table.learn(chunk_keys("", range(7, 7 + 2 * CHUNK_TOKENS)))
    assert table.n_tokens_known(long) == 2 * CHUNK_TOKENS
    assert len(table) == 4


def test_chunks_of_other_namespaces_and_other_beginnings_have_other_keys() -> None:
    tokens = range(2 * CHUNK_TOKENS)
    assert len(chunk_keys("", range(CHUNK_TOKENS - 1))) == 0
    assert set(chunk_keys("", tokens)).isdisjoint(chunk_keys("a", tokens))
    assert chunk_keys("", [9, *tokens[1:]])[1] != chunk_keys("", tokens)[1]
