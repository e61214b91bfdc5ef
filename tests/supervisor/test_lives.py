"""How an engine process is watched and started again."""

import asyncio
from collections.abc import Callable

import pytest

from rekindle.errors import EngineFailed, ShuttingDown
from rekindle.generation.questions import LookUp
from rekindle.generation.status import DeathCause, ProcessState
from rekindle.link.activity_page import Activity, LastActivity, Pulse
from rekindle.link.messages import Report, Started
from rekindle.supervisor import lives, restarts
from rekindle.supervisor.engine import SupervisedEngine
from rekindle.supervisor.link import EngineLink, connect
from rekindle.supervisor.process import Death, EngineProcess
from rekindle.supervisor.restarts import FAILED_DEATHS, HangWatch, Restarts
from tests.supervisor.test_engine import reply, request, until
from tests.support.fake_backend import expected_reply
from tests.support.thread_process import Fate, MortalBackend, ThreadProcess, new_engine, running

NOTHING = LastActivity(Activity.IDLE, (), (), 0)
SEGFAULT = Death(DeathCause.SEGFAULT, -11, NOTHING, "", 1.0)


def state(engine: SupervisedEngine) -> ProcessState:
    process = engine.status().process
    assert process is not None
    return process.state


def busy(n_steps: int, n_heartbeats: int) -> Pulse:
    return Pulse(n_heartbeats, n_steps, is_busy=True)


def test_an_engine_without_a_step_hangs_after_the_bound() -> None:
    watch = HangWatch(seconds=2.0, look_seconds=0.5)
    looks = [watch.is_hung(busy(n_steps=7, n_heartbeats=beat)) for beat in range(1, 7)]
    assert looks == [False, False, False, False, True, True]


def test_a_process_without_a_heartbeat_hangs_after_the_bound_also_when_idle() -> None:
    watch = HangWatch(seconds=2.0, look_seconds=0.5)
    looks = [watch.is_hung(Pulse(5, 7, is_busy=False)) for _ in range(6)]
    assert looks == [False, False, False, False, True, True]


def test_a_slow_engine_does_not_hang_as_long_as_it_makes_a_step_in_time() -> None:
    watch = HangWatch(seconds=2.0, look_seconds=0.5)
    for look in range(100):
        assert not watch.is_hung(busy(n_steps=look // 4, n_heartbeats=look + 1))


def test_an_idle_engine_does_not_hang() -> None:
    watch = HangWatch(seconds=2.0, look_seconds=0.5)
    for look in range(100):
        assert not watch.is_hung(Pulse(look + 1, 7, is_busy=False))


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer() -> None:
    counted = Restarts()
    delays = []
    for _ in range(12):
        counted.note_death(SEGFAULT)
        delays.append(counted.delay_seconds)
    assert delays[0] == 0
    assert delays[1:5] == [0.25, 0.5, 1.0, 2.0]
    assert delays[-1] == 30
    counted.note_success()
    counted.note_death(SEGFAULT)
    assert counted.delay_seconds == 0
    assert counted.by_cause == {"segfault": 13}


def test_an_engine_that_never_starts_is_tried_again_for_ever() -> None:
    counted = Restarts()
    for _ in range(2_000):  # one every 30 s: 17 hours
        counted.note_failed_start(DeathCause.EXIT, "no GPU")
        assert counted.delay_seconds <= restarts.LONGEST_DELAY_SECONDS


def test_an_engine_that_never_gets_ready_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = MortalBackend.warm_up
    fate = Fate()

    def hang_once(self: MortalBackend) -> None:
        if len(fate.lives) == 1:
            fate.now.hang()
        warm_up(self)

    async def scenario() -> None:
        monkeypatch.setattr(MortalBackend, "warm_up", hang_once)
        monkeypatch.setattr(lives, "START_SECONDS", 3.0)
        async with running(fate, hang_seconds=60.0) as engine:
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            process = engine.status().process
            assert process is not None
            assert process.restarts == {DeathCause.HANG: 1}

    asyncio.run(scenario())


def test_an_engine_that_is_ready_when_its_link_connects_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect_slowly(
        process: EngineProcess, on_report: Callable[[Report], None]
    ) -> EngineLink:
        has_started = asyncio.Event()

        def note(report: Report) -> None:
            on_report(report)
            if isinstance(report, Started):
                has_started.set()

        link = await connect(process, note)
        await has_started.wait()
        return link

    async def scenario() -> None:
        monkeypatch.setattr(lives, "connect", connect_slowly)
        monkeypatch.setattr(lives, "START_SECONDS", 0.3)
        async with running(Fate(), hang_seconds=60.0) as engine:
            await asyncio.sleep(1.0)
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            process = engine.status().process
            assert process is not None
            assert process.restarts == {}

    asyncio.run(scenario())


def test_five_deaths_in_a_row_without_a_success_fail_the_engine() -> None:
    counted = Restarts()
    for _ in range(3):
        for _ in range(FAILED_DEATHS - 1):
            counted.note_death(SEGFAULT)
            assert counted.state is ProcessState.RESTARTING
        counted.note_success()
    for _ in range(FAILED_DEATHS):
        counted.note_death(SEGFAULT)
    assert counted.state is ProcessState.FAILED


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-11, "it was ended by SIGSEGV"),
        (-40, "it was ended by signal 40"),
        (3, "it exited with code 3"),
    ],
)
def test_a_death_says_how_the_process_ended(code: int, text: str) -> None:
    assert str(Death(DeathCause.SIGNAL, code, NOTHING, "", 1.0)) == text


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_hung_process_is_killed_and_its_requests_continue(*, is_stopped: bool) -> None:
    async def scenario() -> None:
        fate = Fate(hang_at_decodes={3})
        async with running(fate, hang_seconds=5.0) as engine:
            fate.now.engine_page.is_stopped = is_stopped
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            process = engine.status().process
            assert process is not None
            assert process.restarts == {"hang": 1}
            assert process.last_death == "it made no step for too long and was ended"

    asyncio.run(scenario())


def test_a_process_that_hangs_while_it_loads_is_killed() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, held_loads={1})
        async with running(fate, hang_seconds=1.0) as engine:
            stream = engine.submit(request("a"))
            await until(lambda: len(fate.lives) == 2)
            fate.now.engine_page.is_stopped = True
            assert await reply(stream) == expected_reply(range(1, 21), 8)
            assert len(fate.lives) == 3

    asyncio.run(scenario())


def test_a_process_that_dies_while_it_loads_is_started_again() -> None:
    async def scenario() -> None:
        fate = Fate(at_decodes={0}, at_loads={1}, refused_loads={2})
        async with running(fate) as engine:
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            process = engine.status().process
            assert process is not None
            assert process.restarts == {"segfault": 2, "exit": 1}
        assert all(life.wait(0) for life in fate.lives)

    asyncio.run(scenario())


def test_an_engine_that_fails_refuses_requests_until_a_process_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.001)

    async def scenario() -> None:
        fate = Fate(at_decodes={0}, at_loads={1, 2, 3}, refused_loads={4}, held_loads={5})
        async with running(fate) as engine:
            waiting = engine.submit(request("a"))
            with pytest.raises(EngineFailed, match="The file is gone") as failure:
                await reply(waiting)
            assert failure.value.retry_after_seconds >= 1
            assert state(engine) is ProcessState.FAILED
            with pytest.raises(EngineFailed):
                engine.submit(request("b"))
            with pytest.raises(EngineFailed):
                await engine.ask(LookUp(namespace="", tokens=(1,)))
            fate.release.set()
            await until(lambda: state(engine) is ProcessState.RUNNING)
            assert await reply(engine.submit(request("c"))) == expected_reply(range(1, 21), 8)

    asyncio.run(scenario())


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 0.001)
    begin = ThreadProcess.__init__
    n_refused = 0

    def refuse_twice(process: ThreadProcess, *args: object, **options: object) -> None:
        nonlocal n_refused
        n_refused += 1
        if n_refused <= 2:
            raise OSError(11, "Resource temporarily unavailable")
        begin(process, *args, **options)  # type: ignore[arg-type]

    async def scenario() -> None:
        fate = Fate(at_decodes={2})
        async with running(fate) as engine:
            monkeypatch.setattr(ThreadProcess, "__init__", refuse_twice)
            assert await reply(engine.submit(request("a"))) == expected_reply(range(1, 21), 8)
            process = engine.status().process
            assert process is not None
            assert process.restarts == {"segfault": 1, "exit": 2}

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_restart_that_is_due_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_SECONDS", 3_600.0)
    monkeypatch.setattr(restarts, "LONGEST_DELAY_SECONDS", 3_600.0)

    async def scenario() -> None:
        fate = Fate(at_decodes={0}, at_loads={1})
        engine = new_engine(fate)
        engine.start()
        stream = engine.submit(request("a"))
        await until(lambda: engine._lives.restarts.delay_seconds > 0)
        async with asyncio.timeout(10):
            await asyncio.to_thread(engine.close)
        with pytest.raises(ShuttingDown):
            await reply(stream)

    asyncio.run(scenario())


def test_closing_an_engine_that_was_never_started_ends_its_process() -> None:
    fate = Fate()
    new_engine(fate).close()
    assert fate.now.wait(0)


def test_closing_right_after_the_start_ends_the_process() -> None:
    async def scenario() -> None:
        fate = Fate()
        engine = new_engine(fate)
        engine.start()
        await asyncio.to_thread(engine.close)
        assert fate.now.wait(0)

    asyncio.run(scenario())
