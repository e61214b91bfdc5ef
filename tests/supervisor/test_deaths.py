"""Requests continue in the next process when theirs dies: no token is repeated or missing."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.errors import ShuttingDown
from rekindle.generation.events import (
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenEvent,
    TokenSampled,
)
from rekindle.generation.model_state import ModelClass
from rekindle.generation.questions import ListStored, LookUp
from rekindle.generation.request import CacheTerms, GenerationRequest, Grammar, GrammarKind
from rekindle.generation.status import ProcessState
from rekindle.link.messages import End, Step, Token
from rekindle.supervisor.engine import SupervisedEngine
from rekindle.supervisor.journal import Unfinished
from tests.supervisor.test_engine import (
    FIRST,
    SECOND,
    embedded,
    embedding,
    events,
    reply,
    request,
    until,
)
from tests.support.deletions import forget, forget_key
from tests.support.fake_backend import END, expected_reply
from tests.support.thread_process import (
    MEMORY_ONLY,
    Fate,
    MortalBackend,
    new_engine,
    on_disk,
    running,
)

SMALL = {"n_slots": 3, "n_ubatch": 16}
STREAMS = [
    request("long prompt", n_prompt=70, max_tokens=6),
    request("short prompt", n_prompt=5, start=1_000, max_tokens=12),
    request("prefill", n_prompt=40, start=2_000, max_tokens=0),
    request("waits", n_prompt=20, start=1_500, max_tokens=9),
    request("same prompt", n_prompt=70, max_tokens=3),
]


def assert_whole(asked: GenerationRequest, got: Sequence[TokenEvent]) -> PromptEvaluated:
    """Check that the client cannot tell from the events that a process died."""
    n_tokens = asked.max_tokens or 0
    tokens = [event.token for event in got if isinstance(event, TokenSampled)]
    assert tokens == expected_reply(asked.prompt, n_tokens)
    assert got[-1] == Finished(StopCause.LENGTH)
    [evaluated] = [event for event in got if isinstance(event, PromptEvaluated)]
    if n_tokens:
        first = next(i for i, event in enumerate(got) if isinstance(event, TokenSampled))
        assert got[first - 1] is evaluated
    return evaluated


async def run_streams(fate: Fate, directory: Path, **backend: object) -> None:
    async with running(fate, cache=on_disk(directory), backend=SMALL | backend) as engine:
        got = await asyncio.gather(*(events(engine.submit(each)) for each in STREAMS))
        for asked, each in zip(STREAMS, got, strict=True):
            evaluated = assert_whole(asked, each)
            if asked.id != "same prompt":  # which finds the rows of the first
                assert evaluated.n_cached == 0


def test_a_death_at_any_step_leaves_every_stream_whole(tmp_path: Path) -> None:
    whole = Fate()
    asyncio.run(run_streams(whole, tmp_path / "whole"))
    assert whole.n_decodes > 10
    for step in range(whole.n_decodes):
        fate = Fate(at_decodes={step})
        asyncio.run(run_streams(fate, tmp_path / str(step)))
        assert len(fate.lives) == 2, step


def test_a_call_that_is_being_ended_continues_to_end_after_a_death() -> None:
    async def scenario(fate: Fate) -> None:
        backend = {
            "lands_at": 6,
            "reply": lambda prefix: END if prefix[-1] == 9 else prefix[-1] + 1,
        }
        async with running(fate, backend=backend) as engine:
            got = await events(engine.submit(request("a", n_prompt=3, max_tokens=50)))
        assert got[-1] == Finished(StopCause.LENGTH, END)
        lands = [event.lands for event in got if isinstance(event, TokenSampled)]
        assert lands == [False, False, True, True, True, True]

    for step in range(6):
        fate = Fate(at_decodes={step})
        asyncio.run(scenario(fate))
        assert len(fate.lives) == 2, step


def test_a_sampler_that_remembers_continues_after_a_death() -> None:
    """What Mirostat remembers does not follow from the tokens: it comes with them."""

    async def scenario(fate: Fate) -> None:
        asked = request("a", n_prompt=3, max_tokens=8)
        asked = replace(asked, sampling=replace(asked.sampling, mirostat=2))
        async with running(fate) as engine:
            got = await events(engine.submit(asked))
        states = [event.sampler_state for event in got if isinstance(event, TokenSampled)]
        assert states == [(float(n),) for n in range(1, 9)]

    for step in range(8):
        fate = Fate(at_decodes={step})
        asyncio.run(scenario(fate))
        assert len(fate.lives) == 2, step


def test_deaths_at_any_two_neighbouring_steps_leave_every_stream_whole(tmp_path: Path) -> None:
    for step in range(0, 16, 3):
        fate = Fate(at_decodes={step, step + 1})
        asyncio.run(run_streams(fate, tmp_path / str(step)))
        assert len(fate.lives) == 3


@pytest.mark.parametrize("model_class", list(ModelClass))
def test_a_death_leaves_every_stream_whole_with_any_kind_of_state(
    model_class: ModelClass, tmp_path: Path
) -> None:
    for step in (2, 7):
        fate = Fate(at_decodes={step})
        asyncio.run(run_streams(fate, tmp_path / str(step), model_class=model_class))
        assert len(fate.lives) == 2


def test_a_death_during_a_restore_leaves_the_stream_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(cache=on_disk(tmp_path)) as engine:
            await reply(engine.submit(request("a", n_prompt=600)))
        fate = Fate(at_imports={1})
        async with running(fate, cache=on_disk(tmp_path)) as engine:
            asked = request("b", n_prompt=600)
            evaluated = assert_whole(asked, await events(engine.submit(asked)))
            assert evaluated.n_cached == 600
        assert len(fate.lives) == 2

    asyncio.run(scenario())


def test_rows_that_a_request_computed_before_the_death_do_not_count_as_cached(
    tmp_path: Path,
) -> None:
    def wait_for_writes() -> None:
        deadline = time.monotonic() + 10
        while len(list(tmp_path.rglob("*.kv"))) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)

    async def scenario() -> None:
        fate = Fate(at_decodes={30}, before_death=wait_for_writes)
        small = {"n_ubatch": 64, "n_slots": 1}
        async with running(fate, cache=on_disk(tmp_path), backend=small) as engine:
            asked = request("a", n_prompt=1_500)
            evaluated = assert_whole(asked, await events(engine.submit(asked)))
            assert evaluated.n_cached == 0
        n_again = sum(map(len, fate.batches[31:]))
        assert n_again < 2_000, "the second process restored nothing"

    asyncio.run(scenario())


def test_a_reply_whose_last_token_arrived_without_its_end_ends_by_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_report = SupervisedEngine.on_report
    fate = Fate()

    def lose_the_end(engine: SupervisedEngine, report: object) -> None:
        if isinstance(report, Step) and any(isinstance(event, End) for event in report.events):
            report = Step([event for event in report.events if isinstance(event, Token)])
            fate.now.kill()
            monkeypatch.setattr(SupervisedEngine, "on_report", on_report)
        on_report(engine, report)  # type: ignore[arg-type]

    async def scenario() -> None:
        async with running(fate) as engine:
            monkeypatch.setattr(SupervisedEngine, "on_report", lose_the_end)
            asked = request("a")
            assert_whole(asked, await events(engine.submit(asked)))
            assert fate.n_decodes == 8, "the second process computed it again"

    asyncio.run(scenario())


def test_a_seed_stays_the_same_after_a_death() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={3})
        async with running(fate) as engine:
            await reply(engine.submit(request("a", seed=None)))
        assert len(fate.seeds) == 2
        assert fate.seeds[0] == fate.seeds[1] is not None

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_during_the_restart_is_not_sent() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={3}, held_loads={1})
        async with running(fate, backend={"n_slots": 2}) as engine:
            gone, stays = engine.submit(request("gone")), engine.submit(request("stays", start=50))
            await until(lambda: len(fate.lives) == 2)
            gone.cancel()
            fate.release.set()
            assert await reply(stays) == expected_reply(range(50, 70), 8)
            for batch in fate.batches[4:]:
                assert not set(batch) & set(range(1, 21))

    asyncio.run(scenario())


def test_requests_and_questions_of_the_restart_are_answered_after_it() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, held_loads={1})
        async with running(fate) as engine:
            first = asyncio.create_task(reply(engine.submit(request("first"))))
            await until(lambda: len(fate.lives) == 2)
            status = engine.status()
            assert status.process is not None
            assert status.process.state is ProcessState.RESTARTING
            assert (status.n_running, status.n_waiting) == (0, 1)
            second = asyncio.create_task(reply(engine.submit(request("second", start=50))))
            asked = asyncio.create_task(engine.ask(LookUp(namespace="", tokens=FIRST)))
            vectors = asyncio.create_task(engine.embed(embedding("e")))
            good = Grammar(GrammarKind.LARK, "good")
            check = asyncio.wrap_future(engine.check_grammar(good))
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in (first, second, asked, vectors, check))
            fate.release.set()
            assert await first == expected_reply(range(1, 21), 8)
            assert await second == expected_reply(range(50, 70), 8)
            assert (await asked).n_prompt == len(FIRST)
            assert await vectors == embedded(FIRST)
            await check
            status = engine.status()
            assert status.process is not None
            assert status.process.state is ProcessState.RUNNING
            assert status.process.restarts == {"segfault": 1}

    asyncio.run(scenario())


def test_the_time_in_the_queue_counts_the_restart() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, held_loads={1})
        async with running(fate) as engine:
            stream = engine.submit(request("a"))
            await until(lambda: len(fate.lives) == 2)
            await asyncio.sleep(0.05)
            fate.release.set()
            asked = await events(stream)
            evaluated = assert_whole(request("a"), asked)
            assert evaluated.queue_seconds >= 0.05

    asyncio.run(scenario())


def test_grammar_checks_that_wait_for_a_restart_do_not_prevent_it() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, held_loads={1})
        async with running(fate) as engine:
            stream = engine.submit(request("a"))
            await until(lambda: len(fate.lives) == 2)
            fate.at_loads = {1}  # so that threads are needed while the checks hold theirs
            checks = [
                asyncio.wrap_future(engine.check_grammar(Grammar(GrammarKind.LARK, str(index))))
                for index in range(64)
            ]
            waiting = asyncio.gather(*checks)
            await asyncio.sleep(0.02)
            fate.release.set()
            async with asyncio.timeout(10):
                await waiting
            assert await reply(stream) == expected_reply(range(1, 21), 8)

    asyncio.run(scenario())


def test_background_requests_continue_and_yield_as_before() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={1}, held_loads={1})
        async with running(fate, backend={"n_ubatch": 16}) as engine:
            ahead = request("ahead", n_prompt=60, max_tokens=4, background=True)
            fate.release.set()
            assert_whole(ahead, await events(engine.submit(ahead)))
            fate.at_decodes, fate.held_loads = {fate.n_decodes + 1}, {2}
            fate.release.clear()
            later = engine.submit(
                request("later", n_prompt=60, start=500, max_tokens=None, background=True)
            )
            await until(lambda: len(fate.lives) == 3)
            stream = engine.submit(request("client", start=900))
            fate.release.set()
            assert await reply(stream) == expected_reply(range(900, 920), 8)
            assert (await events(later))[-1] == Finished(StopCause.YIELDED)

    asyncio.run(scenario())


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_persisted_prompt_is_on_disk_after_a_death_at_any_step(
    max_tokens: int, tmp_path: Path
) -> None:
    async def scenario(step: int) -> None:
        fate = Fate(at_decodes={step})
        directory = tmp_path / str(step)
        asked = request("a", n_prompt=100, max_tokens=max_tokens, persist=True)
        async with running(fate, cache=on_disk(directory), backend={"n_ubatch": 32}) as engine:
            assert_whole(asked, await events(engine.submit(asked)))
            fate.now.kill()  # nothing more is stored
            forecast = await engine.ask(LookUp(namespace="", tokens=asked.prompt))
            assert forecast.n_cached >= 99

    for step in range(4 + max_tokens):
        asyncio.run(scenario(step))


def test_an_embedding_starts_again_after_a_death() -> None:
    async def scenario() -> None:
        fate = Fate(of_inputs={20})
        async with running(fate) as engine:
            made = asyncio.create_task(engine.embed(embedding("e", FIRST, SECOND)))
            await until(lambda: len(fate.lives) == 2)
            fate.of_inputs.clear()
            assert await made == embedded(FIRST, SECOND)
        assert fate.now.embedder.journal[:3] == [FIRST[:4], FIRST[4:8], FIRST[8:]]

    asyncio.run(scenario())


def test_counters_of_dead_processes_are_added_up() -> None:
    async def scenario() -> None:
        fate = Fate()
        async with running(fate) as engine:
            for turn in range(3):
                await reply(engine.submit(request("a", start=100 * turn)))
                await engine.refresh()
                fate.now.kill()
                await until(lambda: not engine._lives.is_connected)
                await until(lambda: engine._lives.is_connected)
        status = engine.status()
        assert status.cache is not None
        assert status.cache.counters.prefilled_tokens == 60

    asyncio.run(scenario())


def test_closing_during_a_restart_ends_everything() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, held_loads={1})
        engine = new_engine(fate)
        engine.start()
        streams = [engine.submit(request(f"r{index}")) for index in range(6)]
        asked = asyncio.create_task(engine.ask(LookUp(namespace="", tokens=FIRST)))
        await until(lambda: len(fate.lives) == 2 and fate.now.is_hanging.is_set())
        await asyncio.to_thread(engine.close)
        for stream in streams:
            with pytest.raises(ShuttingDown):
                await reply(stream)
        if not asked.done() or asked.exception() is not None:
            with pytest.raises(ShuttingDown):
                await asked
        assert all(life.wait(0) for life in fate.lives)

    asyncio.run(scenario())


def test_requests_are_not_continued_after_a_cut() -> None:
    async def scenario() -> None:
        fate = Fate(hang_at_decodes={3})
        async with running(fate) as engine:
            stream = engine.submit(request("a"))
            await until(lambda: fate.now.is_hanging.is_set())
            engine.cut()
            fate.now.kill()
            with pytest.raises(ShuttingDown):
                await reply(stream)
            assert fate.n_decodes == 4

    asyncio.run(scenario())


def test_streams_survive_many_deaths() -> None:
    """Each process makes some progress, then dies."""

    async def scenario() -> None:
        fate = Fate(at_decodes=set(itertools.islice(itertools.count(6, 6), 20)))
        async with running(fate, backend={"n_slots": 2}) as engine:
            asked = [request(f"r{n}", start=100 * n, max_tokens=30) for n in range(4)]
            got = await asyncio.gather(*(events(engine.submit(each)) for each in asked))
            for one, each in zip(asked, got, strict=True):
                assert_whole(one, each)
        assert len(fate.lives) > 10

    asyncio.run(scenario())


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_request_that_was_deleted_leaves_nothing_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_disk: bool, by_key: bool
) -> None:
    decode = MortalBackend.decode

    def decode_slowly(self: MortalBackend, *batch: list[int]) -> None:
        time.sleep(0.001)  # the deletion is to be answered before the reply has ended
        decode(self, *batch)

    monkeypatch.setattr(MortalBackend, "decode", decode_slowly)

    async def scenario() -> None:
        fate = Fate()
        settings = on_disk(tmp_path) if has_disk else MEMORY_ONLY
        n_tokens = 1_500
        async with running(fate, cache=settings) as engine:
            asked = request("a", n_prompt=600, max_tokens=n_tokens)
            old = replace(asked, terms=CacheTerms(asked_at=time.time()))
            streamed = asyncio.create_task(reply(engine.submit(old)))
            await until(lambda: fate.n_decodes > 20)
            if by_key:
                [stored] = await engine.ask(ListStored(namespace="", limit=10))
                await engine.ask(forget_key(stored.key))
            else:
                await engine.ask(forget())
            fate.at_decodes = {fate.n_decodes + 100}
            assert await streamed == expected_reply(old.prompt, n_tokens)
            assert len(fate.lives) == 2
            forecast = await engine.ask(LookUp(namespace="", tokens=old.prompt))
            assert forecast.n_cached == 0

    asyncio.run(scenario())
    assert list(tmp_path.rglob("*.kv")) == []


def test_progress_never_runs_backwards() -> None:
    """The next process computes the prompt from its own beginning."""
    unfinished = Unfinished(request("a", n_prompt=600), arrived_at=0.0)
    progress = [PrefillProgress(n_done, 600, 0.1) for n_done in (200, 400, 100, 400, 500)]
    assert [unfinished.note(each) for each in progress] == [True, True, False, True, True]
