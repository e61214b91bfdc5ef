"""The watchdog counts what makes others wait, and says where it was."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from rekindle.generation.status import CacheCounters, CacheStatus, EngineStatus, Stalls
from rekindle.observe import watchdog as watchdog_module
from rekindle.observe.telemetry import Telemetry, total
from rekindle.observe.watchdog import EngineWatchdog, EventLoopWatchdog
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import Bench

STALL = 0.5  # seconds


async def settle() -> None:
    """Let the watchdog look some times."""
    await asyncio.sleep(0.4)


def stalls_of(*callbacks: object) -> Stalls:
    watchdog = EventLoopWatchdog()

    async def run() -> None:
        watchdog.start()
        await settle()
        for callback in callbacks:
            assert callable(callback)
            asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0)  # after these callbacks
        await settle()

    asyncio.run(run())
    watchdog.stop()
    return watchdog.stalls


def block() -> None:
    time.sleep(STALL)


def block_shortly() -> None:
    time.sleep(STALL / 10)


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No core is taken away: this time would not count."""
    monkeypatch.setattr(watchdog_module, "_run_delay", lambda _: 0.0)
    monkeypatch.setattr(watchdog_module, "_stolen_seconds", dict)


@pytest.mark.usefixtures("quiet_machine")
def test_a_callback_that_blocks_is_one_stall_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        stalls = stalls_of(block)
    assert stalls.count == 1
    assert stalls.seconds == stalls.longest_seconds > STALL / 2
    assert f"{__name__}:" in caplog.text
    assert "block" in caplog.text


@pytest.mark.usefixtures("quiet_machine")
def test_many_callbacks_at_once_are_a_stall() -> None:
    assert stalls_of(*[block_shortly] * 10).count == 1


@pytest.mark.parametrize(
    ("function", "delays"),
    [
        ("_run_delay", lambda _: time.monotonic()),
        ("_stolen_seconds", lambda: {"cpu0": 0.0, "cpu1": time.monotonic()}),
    ],
)
def test_time_in_which_another_thread_or_a_core_was_taken_away_does_not_count(
    monkeypatch: pytest.MonkeyPatch, function: str, delays: Callable[..., object]
) -> None:
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    monkeypatch.setattr(watchdog_module, function, delays)
    try:
        assert stalls_of(block).count == 0
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    bench = Bench(backend)
    decode, sample = backend.decode, backend.sample

    def slow_decode(*args: object) -> object:
        time.sleep(STALL)
        return decode(*args)  # type: ignore[arg-type]

    def slow_sample(*args: object) -> object:
        time.sleep(STALL)
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new order is seen between any two of them."""
    backend = FakeBackend(n_cells=8_192)
    bench = Bench(backend)
    export = backend.export_rows

    def slow_export(slot: int, start: int, stop: int) -> memoryview:
        time.sleep(STALL / 25)
        return export(slot, start, stop)

    monkeypatch.setattr(backend, "export_rows", slow_export)
    bench.submit("one", range(4_000), max_tokens=1)
    bench.run()
    bench.step()
    assert len(backend.exports) > 10
    assert engine_stalls(bench) == 0


def test_the_log_says_where_the_engine_was(caplog: pytest.LogCaptureFixture) -> None:
    noted: list[float] = []
    watchdog = EngineWatchdog(noted.append)
    watchdog.start()
    with caplog.at_level(logging.WARNING):
        watchdog.busy()
        block()
        watchdog.free()
    watchdog.stop()
    assert len(noted) == 1
    assert "block" in caplog.text


def test_waiting_for_an_order_is_no_stall() -> None:
    noted: list[float] = []
    watchdog = EngineWatchdog(noted.append)
    watchdog.busy()
    watchdog.free()
    block()
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
