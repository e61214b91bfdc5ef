"""A request that kills the engine is found; all others end as if nothing had happened."""

import asyncio
from pathlib import Path

import pytest

from rekindle.engine.questions import Answering, EnginePrefixes
from rekindle.errors import RequestCrashed
from rekindle.generation.events import TokenSampled
from rekindle.generation.questions import AnyQuestion, LookUp
from rekindle.generation.request import GenerationRequest, Grammar, GrammarKind
from rekindle.generation.status import ProcessState
from rekindle.supervisor import restarts
from tests.supervisor.test_deaths import assert_whole
from tests.supervisor.test_engine import embedded, embedding, events, reply, request, until
from tests.support.fake_backend import expected_reply
from tests.support.thread_process import Fate, MortalBackend, on_disk, running

POISON = 9_000_000  # no prompt and no reply has it by chance


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.001)


def poison(name: str, n_prompt: int = 10) -> GenerationRequest:
    return request(name, start=POISON + 1 - n_prompt, n_prompt=n_prompt)


def test_a_poison_request_fails_at_the_third_death_and_all_others_are_whole() -> None:
    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate, backend={"n_slots": 4}) as engine:
            asked = [request(f"r{n}", start=100 * n, max_tokens=20) for n in range(6)]
            others = [engine.submit(each) for each in asked[:3]]
            bad = engine.submit(poison("poison"))
            others += [engine.submit(each) for each in asked[3:]]
            # A death counts from the last progress, whose report may come at the first or second.
            with pytest.raises(RequestCrashed, match=r"died [34] times .* SIGSEGV"):
                await reply(bad)
            got = await asyncio.gather(*map(events, others))
            for one, each in zip(asked, got, strict=True):
                assert_whole(one, each)
        assert len(fate.lives) in (4, 5)

    asyncio.run(scenario())


def test_a_suspect_runs_alone() -> None:
    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate) as engine:
            other = engine.submit(request("other", max_tokens=30))
            bad = engine.submit(poison("poison"))
            with pytest.raises(RequestCrashed):
                await reply(bad)
            assert await reply(other) == expected_reply(range(1, 21), 30)
        last = max(index for index, batch in enumerate(fate.batches) if POISON in batch)
        assert not set(fate.batches[last]) - set(poison("poison").prompt)

    asyncio.run(scenario())


@pytest.mark.parametrize("n_poisons", [2, 4])
def test_several_poison_requests_at_once_fail_alone(n_poisons: int) -> None:
    """Deaths whose cause is found do not count towards a failed engine."""

    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate, backend={"n_slots": 8}) as engine:
            bad = [engine.submit(poison(f"bad{n}", 10 + n)) for n in range(n_poisons)]
            asked = request("good", max_tokens=20)
            good = engine.submit(asked)
            for each in bad:
                with pytest.raises(RequestCrashed):
                    await reply(each)
            assert_whole(asked, await events(good))

    asyncio.run(scenario())


def test_progress_acquits_a_suspect() -> None:
    """Eight deaths with the request in the batch, but never three without a token between."""

    async def scenario() -> None:
        fate = Fate(at_decodes={4, 5, 8, 9, 12, 13, 16, 17})
        async with running(fate) as engine:
            asked = request("a", max_tokens=12)
            assert_whole(asked, await events(engine.submit(asked)))
        assert len(fate.lives) == 9

    asyncio.run(scenario())


def test_a_request_that_is_taken_back_at_any_moment_loses_and_repeats_nothing() -> None:
    """A suspect arrives and leaves at once, while the tokens of the others are on their way."""

    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate) as engine:
            with pytest.raises(RequestCrashed):
                await reply(engine.submit(poison("poison")))
            fate.of_tokens.clear()
            asked = request("other", max_tokens=400)
            reading = asyncio.create_task(events(engine.submit(asked)))
            n_retries = 0
            while not reading.done() and n_retries < 200:
                engine.submit(poison(f"again{n_retries}")).cancel()
                n_retries += 1
                await asyncio.sleep(0.0005)
            assert n_retries > 3
            assert_whole(asked, await reading)

    asyncio.run(scenario())


def test_a_retry_of_a_crashed_prompt_dies_once_and_is_then_refused() -> None:
    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate) as engine:
            with pytest.raises(RequestCrashed):
                await reply(engine.submit(poison("first")))
            n_lives = len(fate.lives)
            with pytest.raises(RequestCrashed):
                await reply(engine.submit(poison("second")))
            assert len(fate.lives) == n_lives + 1
            for name in ("third", "fourth"):
                with pytest.raises(RequestCrashed, match="again and again"):
                    engine.submit(poison(name))
            assert len(fate.lives) == n_lives + 1
            assert await reply(engine.submit(request("good"))) == expected_reply(range(1, 21), 8)

    asyncio.run(scenario())


def test_a_retry_that_no_longer_crashes_is_answered() -> None:
    async def scenario() -> None:
        fate = Fate(of_tokens={POISON})
        async with running(fate) as engine:
            with pytest.raises(RequestCrashed):
                await reply(engine.submit(poison("first")))
            fate.of_tokens.clear()
            asked = poison("second")
            assert_whole(asked, await events(engine.submit(asked)))

    asyncio.run(scenario())


def test_stored_rows_that_crash_the_engine_are_set_aside(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(cache=on_disk(tmp_path)) as engine:
            await reply(engine.submit(request("a", n_prompt=600)))
        fate = Fate(at_imports={0, 1, 2})
        async with running(fate, cache=on_disk(tmp_path)) as engine:
            with pytest.raises(RequestCrashed):
                await reply(engine.submit(request("b", n_prompt=600)))
            asked = request("c", n_prompt=600)
            evaluated = assert_whole(asked, await events(engine.submit(asked)))
            assert evaluated.n_cached == 0
            assert fate.n_imports == 3

    asyncio.run(scenario())


def test_a_reply_that_kills_the_engine_at_every_token_ends_after_32_deaths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        # One step of each process computes a token, the next one dies.
        fate = Fate()
        decode = MortalBackend.decode
        n_in_life: dict[int, int] = {}

        def dies_after_one(
            self: MortalBackend,
            tokens: list[int],
            positions: list[int],
            slots: list[int],
            outputs: list[int],
        ) -> None:
            life = len(fate.lives)
            decode(self, tokens, positions, slots, outputs)
            if outputs:
                n_in_life[life] = n_in_life.get(life, 0) + 1
                if n_in_life[life] > 1:
                    fate.now.die(fate.code)

        monkeypatch.setattr(MortalBackend, "decode", dies_after_one)
        async with running(fate) as engine:
            got: list[int] = []

            async def read() -> None:
                async for event in engine.submit(request("a", max_tokens=None)):
                    if isinstance(event, TokenSampled):
                        got.append(event.token)

            with pytest.raises(RequestCrashed, match="died 32 times"):
                await read()
            assert got == expected_reply(range(1, 21), len(got))
            assert len(got) >= 32

    asyncio.run(scenario())


def test_an_embedding_that_kills_the_engine_fails_alone() -> None:
    async def scenario() -> None:
        fate = Fate(of_inputs={POISON})
        async with running(fate) as engine:
            asked = request("good", max_tokens=20)
            good = engine.submit(asked)
            bad = asyncio.create_task(engine.embed(embedding("bad", (1, POISON))))
            fine = asyncio.create_task(engine.embed(embedding("fine", (1, 2))))
            with pytest.raises(RequestCrashed):
                await bad
            assert await fine == embedded((1, 2))
            assert_whole(asked, await events(good))

    asyncio.run(scenario())


def test_a_grammar_that_kills_the_engine_twice_fails_its_check_only() -> None:
    async def scenario() -> None:
        fate = Fate(of_grammars={"poison"})
        async with running(fate) as engine:
            asked = request("good", max_tokens=60)
            good = asyncio.create_task(events(engine.submit(asked)))
            bad = Grammar(GrammarKind.LARK, "poison")
            with pytest.raises(RequestCrashed, match="died 2 times while it compiled"):
                await asyncio.wrap_future(engine.check_grammar(bad))
            await asyncio.wrap_future(engine.check_grammar(Grammar(GrammarKind.LARK, "fine")))
            assert_whole(asked, await good)
            with pytest.raises(RequestCrashed, match="refuses it until the next restart"):
                await asyncio.wrap_future(engine.check_grammar(bad))
        assert len(fate.lives) == 3

    asyncio.run(scenario())


def test_a_question_that_kills_the_engine_again_and_again_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fate = Fate()
    answer = EnginePrefixes.answer

    def die_of_lookups(
        self: EnginePrefixes, question: AnyQuestion, asked_at: float
    ) -> Answering[object]:
        if isinstance(question, LookUp):
            fate.now.die(fate.code)
        return (yield from answer(self, question, asked_at))

    async def scenario() -> None:
        monkeypatch.setattr(EnginePrefixes, "answer", die_of_lookups)
        async with running(fate) as engine:
            asked = request("good", max_tokens=60)
            good = asyncio.create_task(events(engine.submit(asked)))
            with pytest.raises(RequestCrashed, match="answered this question"):
                await engine.ask(LookUp(namespace="", tokens=(1,)))
            assert_whole(asked, await good)
            process = engine.status().process
            assert process is not None
            assert process.state is ProcessState.RUNNING
        assert len(fate.lives) == 3

    asyncio.run(scenario())


def test_deaths_between_batches_make_nobody_a_suspect() -> None:
    async def scenario() -> None:
        fate = Fate(hang_at_decodes=set())
        async with running(fate) as engine:
            await reply(engine.submit(request("a")))
            for _ in range(4):
                life = len(fate.lives)
                fate.now.kill()
                await until(lambda n=life: len(fate.lives) > n)  # type: ignore[misc]
            assert await reply(engine.submit(request("b"))) == expected_reply(range(1, 21), 8)

    asyncio.run(scenario())
