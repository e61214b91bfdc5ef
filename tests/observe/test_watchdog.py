"""The watchdog counts what makes others wait, and says where it was."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rekindle.engine import step_time
from rekindle.engine.export import slot_saver
from rekindle.generation.status import CacheCounters, CacheStatus, EngineStatus, Stalls
from rekindle.observe import watchdog as watchdog_module
from rekindle.observe.telemetry import Telemetry, total
from rekindle.observe.watchdog import EngineWatchdog, EventLoopWatchdog
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import Bench

STALL = 0.5  # seconds


class Clock:
    """Stands in for the module `time`. Time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> Callable[[], None]:
        def block() -> None:
            self.now += seconds

        return block


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers come at once: the clock is moved instead."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        select = self._selector.select  # type: ignore[attr-defined]

        def without_waiting(timeout: float | None = None) -> object:
            clock.now += max(timeout or 0.0, 0.0)
            return select(0)

        self._selector.select = without_waiting  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._clock.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A machine that takes no core away: this time would not count."""
    clock = Clock()
    monkeypatch.setattr(watchdog_module, "time", clock)
    monkeypatch.setattr(watchdog_module._RunDelay, "read", lambda _: 0.0)
    monkeypatch.setattr(watchdog_module, "_stolen_seconds", dict)
    return clock


def stalls_of(
    clock: Clock, *callbacks: Callable[[], None], watchdog: EventLoopWatchdog | None = None
) -> Stalls:
    watchdog = watchdog or EventLoopWatchdog()

    async def run() -> None:
        watchdog.start()
        await asyncio.sleep(0.4)  # some beats
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0)  # after these callbacks
        await asyncio.sleep(0.4)

    with asyncio.Runner(loop_factory=lambda: ClockedLoop(clock)) as runner:
        runner.run(run())
    watchdog.stop()
    return watchdog.stalls


def block() -> None:
    time.sleep(STALL)


def test_a_callback_that_blocks_is_one_stall_with_its_place(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = EventLoopWatchdog()

    def block_until_seen() -> None:
        clock.now += STALL
        while not watchdog._watchdog._stack:
            time.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        stalls = stalls_of(clock, block_until_seen, watchdog=watchdog)
    assert stalls.count == 1
    assert stalls.seconds == stalls.longest_seconds > STALL / 2
    assert f"{__name__}:" in caplog.text
    assert "block_until_seen" in caplog.text


def test_many_callbacks_at_once_are_a_stall(clock: Clock) -> None:
    assert stalls_of(clock, *[clock.pass_by(STALL / 10)] * 10).count == 1


def test_a_short_callback_is_no_stall(clock: Clock) -> None:
    assert stalls_of(clock, clock.pass_by(STALL / 10)).count == 0


@pytest.mark.parametrize("function", ["_run_delay", "_stolen_seconds"])
def test_time_in_which_another_thread_or_a_core_was_taken_away_does_not_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    delays: dict[str, Callable[..., object]] = {
        "_run_delay": lambda _: clock.now,
        "_stolen_seconds": lambda: {"cpu0": 0.0, "cpu1": clock.now},
    }
    monkeypatch.setattr(watchdog_module, function, delays[function])
    try:
        assert stalls_of(clock, clock.pass_by(STALL)).count == 0
    finally:
        is_over.set()
        other.join()


def test_a_stall_in_progress_does_not_outlive_the_event_loop() -> None:
    others = set(threading.enumerate())
    watchdog = EventLoopWatchdog()

    async def run() -> None:
        watchdog.start()
        asyncio.get_running_loop().call_soon(block)

    asyncio.run(run())
    watchdog.stop()
    threads = set(threading.enumerate()) - others
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def engine_stalls(bench: Bench) -> int:
    cache = bench.loop.status().cache
    assert cache is not None
    return cache.counters.stalls.count


def test_a_slow_batch_is_no_stall_of_the_engine_and_each_slow_sampling_is_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    bench = Bench(backend)
    decode, sample = backend.decode, backend.sample

    def slow_decode(*args: object) -> object:
        clock.now += STALL
        return decode(*args)  # type: ignore[arg-type]

    def slow_sample(*args: object) -> object:
        clock.now += STALL
        return sample(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "decode", slow_decode)
    bench.submit("one", range(8), max_tokens=2)
    bench.run()
    assert engine_stalls(bench) == 0
    monkeypatch.setattr(backend, "decode", decode)
    monkeypatch.setattr(backend, "sample", slow_sample)
    bench.submit("two", range(20, 28), max_tokens=2)
    bench.run()
    assert engine_stalls(bench) == 2


def test_many_short_exports_of_an_idle_engine_are_no_stall(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new order is seen between any two of them."""
    measured = SimpleNamespace(perf_counter=clock.monotonic, monotonic=time.monotonic)
    for module in (slot_saver, step_time):
        monkeypatch.setattr(module, "time", measured)
    backend = FakeBackend(n_cells=8_192)
    bench = Bench(backend)
    export = backend.export_rows

    def slow_export(slot: int, start: int, stop: int) -> memoryview:
        clock.now += STALL / 25
        return export(slot, start, stop)

    monkeypatch.setattr(backend, "export_rows", slow_export)
    bench.submit("one", range(4_000), max_tokens=1)
    bench.run()
    bench.step()
    assert len(backend.exports) > 10
    assert engine_stalls(bench) == 0


def test_the_log_says_where_the_engine_was(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    noted: list[float] = []
    watchdog = EngineWatchdog(noted.append)

    def block_until_seen() -> None:
        clock.now += STALL
        while not watchdog._stack:
            time.sleep(0.01)

    watchdog.start()
    with caplog.at_level(logging.WARNING):
        watchdog.busy()
        block_until_seen()
        watchdog.free()
    watchdog.stop()
    assert noted == [STALL]
    assert "block_until_seen" in caplog.text


def test_waiting_for_an_order_is_no_stall(clock: Clock) -> None:
    noted: list[float] = []
    watchdog = EngineWatchdog(noted.append)
    watchdog.busy()
    watchdog.free()
    clock.now += STALL
    watchdog.busy()
    watchdog.free()
    assert noted == []


def test_stalls_of_all_engines_add_up_to_one_metric() -> None:
    def engine(stalls: Stalls) -> EngineStatus:
        counters = CacheCounters(stalls=stalls)
        cache = CacheStatus(model_class="dense", off_because=None, tiers=(), counters=counters)
        return EngineStatus(1, 0, 0, 1, 1, 1, 0, cache)

    past = CacheCounters(stalls=Stalls(1, 0.25, 0.25))
    engines = [engine(Stalls(2, 0.5, 0.25)), engine(Stalls(1, 2.0, 2.0))]
    telemetry = Telemetry()
    telemetry.watch(lambda: total(engines, past, {}))
    text = telemetry.render().decode()
    assert "rekindle_engine_stalls_total 4.0" in text
    assert "rekindle_engine_stall_seconds_total 2.75" in text
    assert "rekindle_engine_longest_stall_seconds 2.0" in text
