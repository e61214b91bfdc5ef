"""The engine from the event loop's side, without any death: a real link, a fake backend."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.engine import embedding_queue
from rekindle.engine_process.service import EngineService
from rekindle.errors import EngineError, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from rekindle.generation.events import (
    Embedded,
    Finished,
    PromptEvaluated,
    StopCause,
    TokenEvent,
    TokenSampled,
    TokenStream,
)
from rekindle.generation.forgetting import Deleted, Place
from rekindle.generation.questions import (
    AnyQuestion,
    Forget,
    ForgetKey,
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    Quarantine,
    ReadTokens,
)
from rekindle.generation.request import (
    CacheTerms,
    EmbeddingRequest,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Sampling,
)
from rekindle.generation.status import Forecast, ProcessState
from rekindle.link.messages import (
    CheckGrammar,
    End,
    Logged,
    Order,
    Report,
    StatusReport,
    Step,
    Token,
)
from tests.support.deletions import forget, forget_key, n_deleted
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.fake_embedder import vector_of
from tests.support.thread_process import Fate, new_engine, on_disk, running

FIRST, SECOND = tuple(range(1, 11)), (20, 21)


def request(
    name: str,
    *,
    n_prompt: int = 20,
    max_tokens: int | None = 8,
    start: int = 1,
    background: bool = False,
    persist: bool = False,
    seed: int | None = 1,
) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt=tuple(range(start, start + n_prompt)),
        boundaries=(),
        sampling=Sampling(seed=seed),
        max_tokens=max_tokens,
        background=background,
        terms=CacheTerms(persist=persist),
    )


def embedding(name: str, *inputs: tuple[int, ...]) -> EmbeddingRequest:
    return EmbeddingRequest(id=name, inputs=inputs or (FIRST,))


def embedded(*inputs: tuple[int, ...]) -> Embedded:
    return Embedded(tuple(map(vector_of, inputs)))


async def reply(stream: TokenStream) -> list[int]:
    return [event.token async for event in stream if isinstance(event, TokenSampled)]


async def events(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine thread gives no event to wait for
            await asyncio.sleep(0.001)


def test_grammars_are_prepared_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reply with tools would wait for them."""
    is_prepared = threading.Event()
    monkeypatch.setattr(FakeBackend, "prepare_grammars", lambda _: is_prepared.set())

    async def scenario() -> None:
        async with running():
            await until(is_prepared.is_set)

    asyncio.run(scenario())


def test_concurrent_requests_each_get_their_own_reply() -> None:
    async def scenario() -> None:
        async with running(backend={"n_slots": 3}) as engine:
            streams = [
                engine.submit(request(f"r{index}", start=100 * index, n_prompt=5 + index))
                for index in range(20)
            ]
            replies = await asyncio.gather(*map(reply, streams))
            for index, tokens in enumerate(replies):
                prompt = range(100 * index, 100 * index + 5 + index)
                assert tokens == expected_reply(list(prompt), 8)

    asyncio.run(scenario())


def test_the_last_token_waits_for_no_status_and_the_end_follows_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []
    send = EngineService._send

    def noted(service: EngineService, report: Report) -> None:
        events = report.events if isinstance(report, Step) else [report]
        sent.extend(type(each).__name__ for each in events if not isinstance(each, Logged))
        send(service, report)

    monkeypatch.setattr(EngineService, "_send", noted)

    async def scenario() -> None:
        async with running() as engine:
            await events(engine.submit(request("a", max_tokens=1)))

    asyncio.run(scenario())
    last_token, end = sent.index(Token.__name__), sent.index(End.__name__)
    assert set(sent[last_token + 1 : end]) == {StatusReport.__name__}


def test_leaving_a_stream_early_frees_its_slot() -> None:
    async def scenario() -> None:
        async with running(backend={"n_slots": 1}) as engine:
            events = aiter(engine.submit(request("a", max_tokens=None)))
            await anext(events)
            await events.aclose()
            assert await reply(engine.submit(request("b"))) == expected_reply(range(1, 21), 8)
            await engine.refresh()
            assert engine.status().n_running == 0

    asyncio.run(scenario())


def test_cancelling_twice_or_after_the_end_is_harmless() -> None:
    async def scenario() -> None:
        async with running() as engine:
            stream = engine.submit(request("a"))
            await reply(stream)
            stream.cancel()
            stream.cancel()
            assert len(await reply(engine.submit(request("b")))) == 8

    asyncio.run(scenario())


def test_a_full_queue_is_refused_with_a_time_to_retry() -> None:
    async def scenario() -> None:
        async with running(backend={"n_slots": 1}, queue_size=2) as engine:
            streams = [engine.submit(request(f"r{i}", max_tokens=None)) for i in range(3)]
            with pytest.raises(Overloaded) as refusal:
                engine.submit(request("too many"))
            assert 1 <= refusal.value.retry_after_seconds <= 60
            for stream in streams:
                stream.cancel()
            assert len(await reply(engine.submit(request("now there is room")))) == 8

    asyncio.run(scenario())


@pytest.mark.parametrize(("n_prompt", "fits"), [(63, True), (64, False), (65, False)])
def test_a_prompt_must_leave_room_for_one_token(n_prompt: int, *, fits: bool) -> None:
    """Anything shorter runs whole."""

    async def scenario() -> None:
        async with running(backend={"n_slots": 1, "n_cells": 64}) as engine:
            if fits:
                stream = engine.submit(request("a", n_prompt=n_prompt, max_tokens=32_000))
                assert len(await reply(stream)) == 1
                return
            with pytest.raises(PromptTooLong) as refusal:
                engine.submit(request("a", n_prompt=n_prompt))
            assert (refusal.value.n_prompt, refusal.value.n_ctx) == (n_prompt, 64)

    asyncio.run(scenario())


def test_shutdown_lets_a_short_reply_end_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        async with running() as engine:
            stream = engine.submit(request("a"))
            ending = asyncio.create_task(engine.shut_down(grace_seconds=30))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                engine.submit(request("b"))
            assert len(await reply(stream)) == 8
            await ending

    asyncio.run(scenario())


def test_shutdown_fails_requests_that_outlast_the_grace_time() -> None:
    async def scenario() -> None:
        # An endless reply: nothing but the cut can end it.
        async with running(backend={"n_cells": 10**9}) as engine:
            stream = engine.submit(request("a", max_tokens=None))
            ending = asyncio.create_task(engine.shut_down(grace_seconds=0.05))
            with pytest.raises(ShuttingDown):
                await reply(stream)
            await ending

    asyncio.run(scenario())


def test_closing_the_engine_ends_every_stream_with_an_error() -> None:
    async def scenario() -> None:
        engine = new_engine(Fate(), backend={"n_cells": 10**9}, queue_size=1)
        engine.start()
        stream = engine.submit(request("a", max_tokens=None))
        await asyncio.to_thread(engine.close)
        with pytest.raises(ShuttingDown):
            await reply(stream)

    asyncio.run(scenario())


def test_an_exception_in_a_step_ends_the_process_and_no_request() -> None:
    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            fate.now.backend.slots = None  # type: ignore[assignment]
            assert len(await reply(engine.submit(request("a")))) == 8
            assert len(fate.lives) == 2

    asyncio.run(scenario())


def test_an_order_that_cannot_be_carried_out_ends_the_process_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    obey = EngineService._obey

    def obey_badly(self: EngineService, order: Order) -> None:
        if isinstance(order, CheckGrammar):
            raise ArithmeticError(order)
        obey(self, order)

    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            streamed = asyncio.create_task(reply(engine.submit(request("a", max_tokens=2_000))))
            await until(lambda: fate.n_decodes > 5)
            with monkeypatch.context() as broken:
                broken.setattr(EngineService, "_obey", obey_badly)
                check = engine.check_grammar(Grammar(GrammarKind.LARK, "fine"))
                await until(lambda: len(fate.lives) > 1)
            await asyncio.wrap_future(check)
            assert await streamed == expected_reply(range(1, 21), 2_000)

    asyncio.run(scenario())


def test_an_order_that_cannot_be_read_fails_its_own_request_alone() -> None:
    """Each process would meet it again, and end."""

    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            beside = asyncio.create_task(reply(engine.submit(request("a"))))
            wrong = replace(request("b"), sampling=Sampling(seed=1, mirostat_tau=True))
            with pytest.raises(EngineError, match="Expected `float`, got `bool`"):
                await reply(engine.submit(wrong))
            grammar = Grammar(GrammarKind.LARK, "good", start=3)  # type: ignore[arg-type]
            with pytest.raises(EngineError, match="got `int`"):
                await asyncio.wrap_future(engine.check_grammar(grammar))
            assert await beside == expected_reply(range(1, 21), 8)
            assert len(fate.lives) == 1

    asyncio.run(scenario())


def test_a_bad_grammar_is_the_clients_error() -> None:
    async def scenario() -> None:
        async with running() as engine:
            await asyncio.wrap_future(engine.check_grammar(Grammar(GrammarKind.LARK, "good")))
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="bad grammar"):
                    await asyncio.wrap_future(
                        engine.check_grammar(Grammar(GrammarKind.LARK, "bad"))
                    )

    asyncio.run(scenario())


def test_every_question_gets_its_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(cache=on_disk(tmp_path)) as engine:
            prompt = request("a", n_prompt=300, max_tokens=0, persist=True)
            await reply(engine.submit(prompt))
            forecast = await engine.ask(LookUp(namespace="", tokens=prompt.prompt))
            assert isinstance(forecast, Forecast)
            assert forecast.n_cached >= 256
            [stored] = await engine.ask(ListStored(namespace="", limit=10))
            [branch] = await engine.ask(ListBranches(namespace="", limit=10))
            assert branch.stop == stored.n_tokens
            tokens = await engine.ask(ReadTokens(namespace="", key=stored.key))
            assert tokens == prompt.prompt[: stored.n_tokens]
            assert await engine.ask(ReadTokens(namespace="", key="0" * 32)) is None
            assert await engine.ask(PinStored(namespace="", key=stored.key, seconds=60.0))
            assert await engine.ask(Quarantine(namespace="", tokens=(7, *prompt.prompt))) == 0
            assert await engine.ask(Quarantine(namespace="", tokens=prompt.prompt)) >= 1
            assert (await engine.ask(ListStored(namespace="", limit=10))) == []
            assert n_deleted(await engine.ask(forget_key(stored.key))) == 0
            deleted = await engine.ask(forget())
            # The slot's own rows, and the two blocks that were quarantined.
            assert deleted == Deleted(counts={Place.LIVE: 1, Place.QUARANTINE: 2})

    asyncio.run(scenario())


def test_every_question_is_tested() -> None:
    assert set(AnyQuestion.__args__) == {
        LookUp, ListStored, ListBranches, ReadTokens, PinStored, Forget, ForgetKey,
        Quarantine,
    }  # fmt: skip


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            await asyncio.gather(*(reply(engine.submit(request(n, seed=None))) for n in "ab"))
        assert None not in fate.seeds
        assert len(set(fate.seeds)) == 2

    asyncio.run(scenario())


def test_the_status_after_the_close_has_the_last_counters() -> None:
    async def scenario() -> None:
        async with running() as engine:
            await reply(engine.submit(request("a", n_prompt=20)))
        status = engine.status()
        assert status.cache is not None
        assert status.cache.counters.prefilled_tokens == 20

    asyncio.run(scenario())


def test_a_server_that_leaves_stops_the_engine_and_its_rows_are_stored(tmp_path: Path) -> None:
    fate = Fate()
    first = request("a", n_prompt=300)

    async def leave() -> None:
        engine = new_engine(fate, cache=on_disk(tmp_path))
        engine.start()
        await reply(engine.submit(first))
        fate.now.hang_up()  # as the kernel does when the server is killed
        assert await asyncio.to_thread(fate.now.wait, 10)
        assert fate.now.code == 0
        await asyncio.to_thread(engine.close)

    async def come_back() -> None:
        async with running(cache=on_disk(tmp_path)) as engine:
            events = [event async for event in engine.submit(request("b", n_prompt=300))]
            [evaluated] = [each for each in events if isinstance(each, PromptEvaluated)]
            assert evaluated.n_cached == 300

    asyncio.run(leave())
    asyncio.run(come_back())


def test_an_engine_tells_that_it_runs() -> None:
    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            process = engine.status().process
            assert process is not None
            assert (process.state, process.pid) == (ProcessState.RUNNING, fate.now.pid)
            assert process.restarts == {}

    asyncio.run(scenario())


def test_an_idle_engine_wakes_to_free_the_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_queue, "REST_SECONDS", 0.02)

    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            await engine.embed(embedding("a", SECOND))
            await until(lambda: fate.now.embedder.journal == [SECOND, "rest"])

    asyncio.run(scenario())


def test_embeddings_and_replies_run_at_once_and_each_gets_its_own() -> None:
    async def scenario() -> None:
        async with running(embedder={"n_part": 1}) as engine:
            made = [
                asyncio.create_task(engine.embed(embedding(f"e{i}", (i, i + 1))))
                for i in range(1, 6)
            ]
            await asyncio.sleep(0)
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            for index, one in enumerate(await asyncio.gather(*made), start=1):
                assert one == embedded((index, index + 1))

    asyncio.run(scenario())


def test_too_many_embedding_requests_are_refused_and_replies_are_not() -> None:
    async def scenario() -> None:
        gate = threading.Event()
        async with running(embedder={"on_part": gate.wait}, queue_size=2) as engine:
            made = [asyncio.create_task(engine.embed(embedding(f"e{i}"))) for i in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as refusal:
                await engine.embed(embedding("too many"))
            assert 1 <= refusal.value.retry_after_seconds <= 60
            stream = engine.submit(request("a"))
            gate.set()
            assert len(await reply(stream)) == 8
            await asyncio.gather(*made)
            assert await engine.embed(embedding("now there is room")) == embedded(FIRST)

    asyncio.run(scenario())


def test_cancelling_the_call_cancels_the_embedding_request() -> None:
    async def scenario() -> None:
        fate = Fate()
        async with running(fate, embedder={"n_ctx": 10**6, "n_part": 1}) as engine:
            waiting = asyncio.create_task(engine.embed(embedding("a", tuple(range(10**6)))))
            await until(lambda: len(fate.now.embedder.journal) > 3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert await engine.embed(embedding("b", SECOND)) == embedded(SECOND)
            await engine.refresh()
            status = engine.status().embedder
            assert status is not None
            assert status.n_requests == 0

    asyncio.run(scenario())


def test_shutdown_waits_for_embeddings_and_then_cuts_them() -> None:
    async def scenario() -> None:
        async with running() as engine:
            short = asyncio.create_task(engine.embed(embedding("short")))
            await asyncio.sleep(0)
            await engine.shut_down(grace_seconds=30)
            assert await short == embedded(FIRST)
            with pytest.raises(ShuttingDown):
                await engine.embed(embedding("late"))
        async with running(embedder={"n_ctx": 10**6, "n_part": 1}) as engine:
            endless = asyncio.create_task(engine.embed(embedding("endless", (1,) * 10**6)))
            await asyncio.sleep(0)
            await engine.shut_down(grace_seconds=0.05)
            with pytest.raises(ShuttingDown):
                await endless

    asyncio.run(scenario())


def test_background_requests_take_no_place_in_the_queue() -> None:
    async def scenario() -> None:
        async with running(backend={"n_slots": 1, "n_cells": 10**9}, queue_size=0) as engine:
            ahead = [
                engine.submit(request(f"ahead {n}", max_tokens=None, background=True))
                for n in range(3)
            ]
            async with asyncio.timeout(10):
                while engine.status().n_background < 3:
                    await asyncio.sleep(0.001)
                    await engine.refresh()
            stream = engine.submit(request("a", max_tokens=None))
            for each in ahead:
                assert (await events(each))[-1] == Finished(StopCause.YIELDED)
            with pytest.raises(Overloaded):
                engine.submit(request("too many"))
            assert await events(engine.submit(request("late", background=True))) == [
                Finished(StopCause.YIELDED)
            ]
            stream.cancel()

    asyncio.run(scenario())


def test_shutdown_does_not_wait_for_background_requests() -> None:
    async def scenario() -> None:
        async with running(backend={"n_cells": 10**9}) as engine:
            ahead = engine.submit(request("ahead", max_tokens=None, background=True))
            async with asyncio.timeout(10):
                await engine.shut_down(grace_seconds=60)
            assert (await events(ahead))[-1] == Finished(StopCause.YIELDED)

    asyncio.run(scenario())
