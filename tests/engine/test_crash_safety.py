"""After a crash, the next process finds the rows of every request that had ended."""

import threading
import time
from itertools import count
from pathlib import Path

import pytest

from rekindle.cache.disk import transfers
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Entry, Key
from rekindle.cache.policy import TAIL_GRAIN
from rekindle.cache.stores import back_store
from rekindle.engine import loop
from rekindle.generation.events import PromptEvaluated
from rekindle.generation.model_state import ModelClass
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import Bench

_fresh = count(1_000_000, 100_000)


def text(length: int) -> list[int]:
    start = next(_fresh)
    return list(range(start, start + length))


def bench_on(directory: Path, model_class: ModelClass) -> Bench:
    return Bench(FakeBackend(model_class=model_class), cache_opener(directory))


def wait_for_writes(bench: Bench) -> None:
    """While requests run, and without a step that would save more of them."""
    deadline = time.monotonic() + 20
    while True:
        bench.loop._cache.poll()
        cache = bench.loop.status().cache
        assert cache is not None
        memory, disk = cache.tiers
        if memory.n_entries == disk.n_entries:
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


def n_found_by_the_next(directory: Path, model_class: ModelClass, prompt: list[int]) -> int:
    bench = bench_on(directory, model_class)
    bench.submit("again", prompt, 1)
    while not bench.tokens("again"):
        bench.step()
        time.sleep(0.001)  # it may be read from disk
    bench.close()
    [evaluated] = [each for each in bench.events("again") if isinstance(each, PromptEvaluated)]
    return evaluated.n_cached


def test_the_end_of_a_turn_is_stored_although_the_next_turn_follows_at_once(
    tmp_path: Path,
) -> None:
    bench = bench_on(tmp_path, ModelClass.DENSE)
    # While others decode there is one export in a step, and the long prompt's come first.
    bench.submit("another", text(10), 1000)
    bench.step()
    bench.submit("long", text(2000), 1000)
    first = text(300)
    bench.submit("first", first, 1)
    while not bench.tokens("first"):
        bench.step()
    bench.submit("second", first + bench.tokens("first") + text(10), 1000)
    for _ in range(20):
        bench.step()
    assert bench.tokens("second")
    wait_for_writes(bench)
    assert n_found_by_the_next(tmp_path, ModelClass.DENSE, first) == len(first) - 1
    bench.close()


@pytest.mark.parametrize("model_class", [each for each in ModelClass if each != "opaque"])
def test_a_prompt_that_forks_a_running_stream_is_found_up_to_its_end(
    tmp_path: Path, model_class: ModelClass
) -> None:
    bench = bench_on(tmp_path, model_class)
    first = text(300)
    bench.submit("stream", first, 1000)
    while len(bench.tokens("stream")) < 80:
        bench.step()
    fork = first + bench.tokens("stream") + text(5)
    bench.submit("fork", fork, 1)
    while not bench.tokens("fork"):
        bench.step()
    for _ in range(5):  # one export in each
        bench.step()
    wait_for_writes(bench)
    assert n_found_by_the_next(tmp_path, model_class, fork) >= len(fork) - TAIL_GRAIN
    bench.close()


def test_shutdown_waits_for_a_slow_disk_where_memory_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = DiskTier.put

    def put_slowly(tier: DiskTier, entry: Entry) -> list[Key]:
        time.sleep(0.02)
        return put(tier, entry)

    monkeypatch.setattr(DiskTier, "put", put_slowly)
    bench = Bench(FakeBackend(), cache_opener(tmp_path, memory_bytes=0))
    long = text(3000)
    bench.ask("long", long, 1)
    bench.close()
    assert n_found_by_the_next(tmp_path, ModelClass.DENSE, long) == len(long)


def test_a_hanging_disk_blocks_no_request_and_no_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_well = threading.Event()
    monkeypatch.setattr(DiskTier, "put", lambda *_: is_well.wait() and [])
    monkeypatch.setattr(back_store, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(transfers, "ABANDON_SECONDS", 0.1)
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.1)
    bench = Bench(FakeBackend(n_slots=1), cache_opener(tmp_path, memory_bytes=0))
    for n in range(4):
        bench.submit(f"{n}", text(700), 1)
        while not bench.tokens(f"{n}"):
            bench.step()
            time.sleep(0.001)
    bench.close()
    is_well.set()
