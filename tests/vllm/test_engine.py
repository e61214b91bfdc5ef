"""VllmEngine against a fake of vLLM's API: one upstream."""

import asyncio
import logging
from dataclasses import replace

import pytest

from rekindle.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    ShuttingDown,
    UpstreamFailed,
    UpstreamTimedOut,
)
from rekindle.generation.events import (
    CachedSpan,
    CacheSource,
    Finished,
    PrefillProgress,
    StopCause,
    TokenLogprobs,
    TokenSampled,
)
from rekindle.generation.questions import LookUp
from rekindle.generation.request import (
    CacheTerms,
    EmbeddingRequest,
    GenerationRequest,
    ReasoningLimit,
    Sampling,
)
from tests.support.fake_vllm import FakeVllm, fake_vllm
from tests.vllm.engines import (
    engine_on,
    evaluated_in,
    events_of,
    request,
    tokens_before_failure,
    tokens_in,
    until,
)

WAYS = {
    "generate": {},
    "token_ids": {"has_generate": False},
    "logprobs": {"has_generate": False, "has_token_ids": False},
}


@pytest.mark.parametrize("switches", WAYS.values(), ids=WAYS)
def test_a_reply_is_the_ids_that_vllm_samples_whichever_way_it_has(
    switches: dict[str, bool],
) -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            events = await events_of(engine.submit(request("a")))
        expected = fake.reply_to(list(range(100, 140)))
        assert tokens_in(events) == expected[:-1]
        assert events[-1] == Finished(StopCause.END_OF_TURN, 2)
        assert fake.prompts == [list(range(100, 140))]

    with fake_vllm(**switches) as fake:
        asyncio.run(play(fake))


@pytest.mark.parametrize("switches", WAYS.values(), ids=WAYS)
def test_the_next_turn_finds_in_vllm_what_the_last_one_left(switches: dict[str, bool]) -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            first = await events_of(engine.submit(request("a", range(100, 164))))
            assert evaluated_in(first).spans == ()
            said = tokens_in(first)
            follow_up = [*range(100, 164), *said, 2, *range(300, 330)]
            second = evaluated_in(await events_of(engine.submit(request("b", follow_up))))
            forecast = await engine.ask(LookUp(tokens=tuple(follow_up), namespace=""))
            cache = engine.status().cache
        # 64 tokens of the prompt and 5 of 6 of the reply were computed: four blocks of 16.
        assert second.spans == (CachedSpan(CacheSource.UPSTREAM, 0, 64),)
        assert second.n_prompt == len(follow_up)
        assert forecast.n_cached == 64
        assert cache is not None
        assert cache.counters.upstream.tokens == 64
        assert cache.counters.prefilled_tokens == 64 + len(follow_up) - 64

    with fake_vllm(**switches) as fake:
        asyncio.run(play(fake))


def test_cached_tokens_are_reported_at_once_if_vllm_reports_them_at_once() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            await events_of(engine.submit(request("a")))
            events = await events_of(engine.submit(request("b")))
        assert events[0] == evaluated_in(events)
        assert evaluated_in(events).n_cached == 32

    with fake_vllm(reports_at_once=True) as fake:
        asyncio.run(play(fake))


def test_a_late_report_comes_behind_progress_that_says_what_was_sent_before() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            await events_of(engine.submit(request("a", range(100, 200))))
            events = await events_of(engine.submit(request("b", range(100, 200))))
        assert isinstance(events[0], PrefillProgress)
        assert (events[0].n_total, events[0].n_cached) == (100, 64)
        assert events.index(evaluated_in(events)) == len(events) - 2
        assert evaluated_in(events).n_cached == 96

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_an_upstream_that_reports_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            for name in "abc":
                events = await events_of(engine.submit(request(name, range(100, 300))))
                assert evaluated_in(events).n_cached == 0

    with fake_vllm(reports_cached=False) as fake, caplog.at_level(logging.WARNING):
        asyncio.run(play(fake))
    assert caplog.text.count("--enable-prompt-tokens-details") == 1


def test_a_budget_for_reasoning_is_said_once_not_to_be_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = ReasoningLimit(max_tokens=3, opening="<think>", closing="</think>")

    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            for name in "ab":
                asked = request(name)
                limited = replace(asked.sampling, reasoning_limit=limit)
                events = await events_of(engine.submit(replace(asked, sampling=limited)))
                assert tokens_in(events) == fake.reply_to(list(asked.prompt))[:-1]

    with fake_vllm() as fake, caplog.at_level(logging.WARNING):
        asyncio.run(play(fake))
    assert caplog.text.count("a budget of reasoning tokens is not applied") == 1


def test_log_probabilities_come_with_each_token() -> None:
    async def play(fake: FakeVllm) -> list[TokenLogprobs | None]:
        async with engine_on(fake) as engine:
            events = await events_of(engine.submit(request("a", n_top_logprobs=2)))
        return [event.logprobs for event in events if isinstance(event, TokenSampled)]

    seen = []
    for switches in WAYS.values():
        with fake_vllm(**switches) as fake:
            seen.append(asyncio.run(play(fake)))
    first = fake.reply_to(list(range(100, 140)))[0]
    assert seen[0][0] == TokenLogprobs(-0.5, ((first, -0.5), (1000, -1.5)))
    assert seen == [seen[0]] * 3


def test_max_tokens_ends_a_reply_and_priming_samples_nothing() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            cut = await events_of(engine.submit(request("a", max_tokens=3)))
            primed = await events_of(engine.submit(request("b", max_tokens=0)))
        assert len(tokens_in(cut)) == 3
        assert cut[-1] == Finished(StopCause.LENGTH)
        assert tokens_in(primed) == []
        assert primed[-1] == Finished(StopCause.LENGTH)
        assert [body["sampling_params"]["max_tokens"] for body in fake.asked] == [3, 1]

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_namespaces_do_not_share_and_a_request_without_cache_finds_nothing() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            found = []
            for name, namespace, uses_cache in (
                ("a", "one", True),
                ("b", "two", True),
                ("c", "one", False),
                ("d", "one", True),
            ):
                asked = request(name, namespace=namespace, cache_prompt=uses_cache)
                found.append(evaluated_in(await events_of(engine.submit(asked))).n_cached)
            prompt = tuple(range(100, 164))
            forecasts = [
                (await engine.ask(LookUp(tokens=prompt, namespace=each))).n_cached
                for each in ("one", "")
            ]
        assert found == [0, 0, 0, 32]
        assert forecasts == [0, 0]  # less than a chunk
        salts = [body["cache_salt"] for body in fake.asked]
        assert salts[:2] == ["one", "two"]
        assert len(set(salts)) == 3

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_a_cancel_reaches_the_upstream() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            fake.gate.clear()
            stream = engine.submit(request("a"))
            await until(lambda: bool(fake.asked))
            assert engine.status().n_running == 1
            stream.cancel()
            stream.cancel()
            assert await asyncio.to_thread(fake.aborted.wait, 20)
            assert engine.status().n_running == engine.status().n_waiting == 0

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_more_than_may_wait_are_refused() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake, n_each=2, queue_size=1) as engine:
            fake.gate.clear()
            streams = [engine.submit(request(name)) for name in "abc"]
            await until(lambda: len(fake.asked) == 2)
            status = engine.status()
            assert (status.n_slots, status.n_running, status.n_waiting) == (2, 2, 1)
            assert [slot.request_id for slot in status.slots] == ["a", "b"]
            with pytest.raises(Overloaded):
                engine.submit(request("d"))
            fake.gate.set()
            replies = await asyncio.gather(*map(events_of, streams))
            assert len({tuple(tokens_in(reply)) for reply in replies}) == 1

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_what_vllm_cannot_do_is_refused_by_name() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            with pytest.raises(InvalidRequest) as refused:
                engine.submit(request("a", sampling=Sampling(typical_p=0.5)))
            assert refused.value.param == "typical_p"
            with pytest.raises(PromptTooLong):
                engine.submit(request("b", range(fake.n_ctx)))
            with pytest.raises(InvalidRequest, match="persist"):
                engine.submit(
                    GenerationRequest(
                        id="c",
                        prompt=(1, 2),
                        boundaries=(),
                        sampling=Sampling(),
                        max_tokens=0,
                        terms=CacheTerms(persist=True),
                    )
                )
            with pytest.raises(InvalidRequest, match="vLLM"):
                await engine.embed(EmbeddingRequest(id="e", inputs=((1,),)))
            with pytest.raises(InvalidRequest, match="max allowed: 20"):
                await events_of(engine.submit(request("d", n_top_logprobs=21)))
            assert engine.status().cache is not None

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_background_requests_yield_at_once() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            events = await events_of(engine.submit(request("a", background=True)))
        assert events == [Finished(StopCause.YIELDED)]
        assert fake.asked == []

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_a_reply_that_breaks_off_is_an_error_behind_what_was_said() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            fake.dies_after = 3
            tokens: list[int] = []
            with pytest.raises(UpstreamFailed, match=fake.url):
                await tokens_before_failure(engine.submit(request("a")), tokens)
            assert tokens == fake.reply_to(list(range(100, 140)))[:3]

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_silence_is_a_time_out() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake, first_byte_seconds=0.1) as engine:
            fake.gate.clear()
            with pytest.raises(UpstreamTimedOut, match="does not answer"):
                await events_of(engine.submit(request("a")))

    with fake_vllm() as fake:
        asyncio.run(play(fake))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 500}, "500: EngineCore"),
        ({"answers_garbage": True}, "<html>"),
        ({"samples_nonsense": True}, "unknown token"),
    ],
)
def test_a_bad_answer_is_reported_in_its_own_words(fault: dict[str, object], words: str) -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            for name, value in fault.items():
                setattr(fake, name, value)
            with pytest.raises(UpstreamFailed, match=words):
                await events_of(engine.submit(request("a")))

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_shutting_down_lets_a_reply_end_and_takes_no_more() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            fake.gate.clear()
            stream = engine.submit(request("a"))
            await until(lambda: bool(fake.asked))
            closing = asyncio.create_task(engine.shut_down(20))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                engine.submit(request("b"))
            fake.gate.set()
            assert len(tokens_in(await events_of(stream))) == 6
            await closing

    with fake_vllm() as fake:
        asyncio.run(play(fake))


def test_what_still_runs_when_time_is_up_is_cut_with_a_reason() -> None:
    async def play(fake: FakeVllm) -> None:
        async with engine_on(fake) as engine:
            fake.gate.clear()
            stream = engine.submit(request("a"))
            await until(lambda: bool(fake.asked))
            await engine.shut_down(0)
            with pytest.raises(ShuttingDown):
                await events_of(stream)
            assert await asyncio.to_thread(fake.aborted.wait, 20)

    with fake_vllm() as fake:
        asyncio.run(play(fake))
