"""Long work on the engine thread is done in slices: streams and new orders come in between."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import pytest

from rekindle.cache.disk import residency as disk_residency
from rekindle.cache.entry import Kind
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.listing import slices
from rekindle.cache.policy import ExportPace
from rekindle.engine import step_time
from rekindle.engine.export.slot_saver import REST_SECONDS
from rekindle.engine.orders import Ask
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.errors import ShuttingDown
from rekindle.generation.events import Finished, StopCause
from rekindle.generation.model_state import ModelClass
from rekindle.generation.questions import (
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    Question,
)
from rekindle.generation.request import CacheTerms
from tests.engine.reuse.test_reuse import ALL_CLASSES, text
from tests.support.caches import ROOT, cache_opener
from tests.support.deletions import forget, forget_key
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.index_check import check_index
from tests.support.loop_driver import Bench

T = TypeVar("T")

WAIT_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _one_slice_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has time for one slice of one node, or one export."""
    monkeypatch.setattr(step_time, "STEP_SECONDS", 1e-9)
    monkeypatch.setattr(slices, "SLICE_NODES", 1)
    monkeypatch.setattr("rekindle.cache.listing.contents.SLICE_NODES", 1)


def ask(bench: Bench, question: Question[T]) -> Ask[T]:
    order = Ask(question)
    bench.loop.inbox.put(order)
    bench.step()
    return order


def steps_until(bench: Bench, is_so: Callable[[], bool]) -> int:
    n_steps = 0
    while not is_so():
        n_steps += 1
        assert n_steps < 2_000
        bench.step()
    return n_steps


def n_cached(bench: Bench, prompt: list[int]) -> int:
    return bench.question(LookUp(tokens=tuple(prompt), namespace="")).n_cached


@pytest.mark.parametrize(
    "question",
    [
        ListStored(namespace="", limit=100),
        ListBranches(namespace="", limit=2),
        forget(),
    ],
)
def test_a_stream_gets_a_token_between_any_two_slices_of_a_question(
    question: Question[object],
) -> None:
    bench = Bench(FakeBackend(n_slots=2))
    for number in range(3):
        bench.ask(f"stored {number}", text(1100), 1)
    bench.submit("stream", text(10), 2_000)
    steps_until(bench, lambda: bool(bench.tokens("stream")))
    order = ask(bench, question)
    assert not order.outcome.done()
    n_before = len(bench.tokens("stream"))
    n_steps = steps_until(bench, order.outcome.done)
    assert n_steps >= 10
    assert len(bench.tokens("stream")) == n_before + n_steps


def test_a_lookup_does_not_wait_for_a_delete() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("stored", text(2100), 1)
    deleting = ask(bench, forget())
    asked = ask(bench, LookUp(tokens=(1, 2, 3), namespace=""))
    assert asked.outcome.done()
    assert not deleting.outcome.done()


def test_questions_are_answered_in_order() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("stored", text(1100), 1)
    deleting = ask(bench, forget())
    listing = ask(bench, ListStored(namespace="", limit=10))
    steps_until(bench, deleting.outcome.done)
    assert not listing.outcome.done()
    steps_until(bench, listing.outcome.done)
    assert listing.outcome.result() == []


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_delete_drops_all_that_was_there_and_leaves_no_entry_without_its_parent(
    model_class: ModelClass,
) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=2))
    old = text(1100)
    bench.ask("old", old, 1)
    index = bench.loop._cache._index
    there = {node.key for node in index.nodes()}
    # The request starts from the old rows. It stores new blocks behind them during the delete.
    longer, new = [*old, *text(600)], text(600)
    later = CacheTerms(asked_at=time.time() + 60)
    bench.submit("longer", longer, 1, terms=later)
    bench.submit("new", new, 1, terms=later)
    order = ask(bench, forget())
    steps_until(bench, order.outcome.done)
    assert not there & {node.key for node in index.nodes()}
    check_index(index)
    bench.run()
    check_index(index)
    blocks = [node for node in index.nodes() if node.kind is Kind.BLOCK]
    assert all(node.start == 0 or node.parent is not None for node in blocks)
    assert bench.tokens("longer") == expected_reply(longer, 1)
    assert index.match_blocks(ROOT, PrefixKeys(ROOT, new).between(0, len(new)))


def test_an_idle_slot_does_not_store_deleted_rows_again() -> None:
    bench = Bench(FakeBackend(n_slots=1, n_cells=2048))
    old = text(1100)
    bench.ask("old", old, 1)
    order = ask(bench, forget())
    bench.submit("other", text(1500), 1)  # it needs the cells of the idle slot
    steps_until(bench, order.outcome.done)
    bench.run()
    assert n_cached(bench, old) == 0


def test_a_pin_skips_entries_that_were_dropped_meanwhile() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("stored", text(1024), 0)
    [stored] = bench.question(ListStored(namespace="", limit=10))
    order = ask(bench, PinStored(namespace="", key=stored.key, seconds=60.0))
    cache = bench.loop._cache
    cache._holdings.drop([cache._index.get(bytes.fromhex(stored.key))])  # type: ignore[list-item]
    steps_until(bench, order.outcome.done)
    assert cache._holdings._pins.n_bytes == sum(node.payload_bytes for node in cache._index.nodes())


def test_unanswered_questions_fail_at_shutdown() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("stored", text(2100), 1)
    begun = ask(bench, forget())
    waiting = ask(bench, ListStored(namespace="", limit=10))
    bench.close()
    for order in (begun, waiting):
        assert isinstance(order.outcome.exception(timeout=0), ShuttingDown)


def test_a_cancelled_question_is_not_answered() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(1100)
    bench.ask("stored", prompt, 1)
    [stored] = bench.question(ListStored(namespace="", limit=10))
    bench.submit("stream", text(10), 100)
    listing = ask(bench, ListStored(namespace="", limit=10))
    deleting = ask(bench, forget_key(stored.key))
    assert deleting.outcome.cancel()
    bench.run()
    assert listing.outcome.done()
    assert n_cached(bench, prompt) == len(prompt)


def test_a_listing_waits_for_the_index_and_a_stream_does_not(tmp_path: Path) -> None:
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("stored", text(600), 1)
    first.close()
    may_list: list[bool] = []
    bench = bench_with_slow_index(tmp_path, may_list)
    bench.submit("stream", text(10), 2_000, cache_prompt=False)
    steps_until(bench, lambda: bool(bench.tokens("stream")))
    order = ask(bench, ListStored(namespace="", limit=10))
    n_before = len(bench.tokens("stream"))
    for _ in range(20):
        bench.step()
    assert not order.outcome.done()
    assert len(bench.tokens("stream")) == n_before + 20
    may_list.append(True)
    deadline = time.monotonic() + WAIT_SECONDS
    while not order.outcome.done():
        assert time.monotonic() < deadline
        bench.step()
    assert len(order.outcome.result()) == 1
    bench.close()


def test_a_prompt_waits_for_its_entries_on_disk_and_a_stream_does_not(tmp_path: Path) -> None:
    prompt = text(600)
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("stored", prompt, 1)
    first.close()
    may_list: list[bool] = []
    bench = bench_with_slow_index(tmp_path, may_list)
    transfers = bench.loop._cache._disk.transfers  # type: ignore[union-attr]
    rows_along, may_answer = transfers._rows_along, list[bool]()

    def late(path: object) -> object:
        wait_for(may_answer)
        return rows_along(path)  # type: ignore[arg-type]

    bench.submit("stream", text(10), 2_000, cache_prompt=False)
    steps_until(bench, lambda: bool(bench.tokens("stream")))
    with (
        patch.object(transfers, "_rows_along", late),
        patch.object(disk_residency, "LOOK_UP_SECONDS", WAIT_SECONDS),
    ):
        bench.submit("again", [*prompt, 1, 2, 3], 1)
        n_before = len(bench.tokens("stream"))
        for _ in range(20):
            bench.step()
        assert not bench.events("again")
        assert len(bench.tokens("stream")) == n_before + 20
        may_answer.append(True)
        deadline = time.monotonic() + WAIT_SECONDS
        while not bench.tokens("again"):
            assert time.monotonic() < deadline
            bench.step()
    assert bench.backend.imports
    may_list.append(True)
    bench.close()


def bench_with_slow_index(directory: Path, may_list: list[bool]) -> Bench:
    opened = cache_opener(directory)

    def open_cache(*arguments: object) -> object:
        cache = opened(*arguments)  # type: ignore[arg-type]
        transfers = cache._disk.transfers  # type: ignore[union-attr]
        rows = transfers._list

        def late() -> None:
            wait_for(may_list)
            rows()

        transfers._list = late  # type: ignore[method-assign]
        return cache

    with patch.object(disk_residency, "INDEX_SECONDS", 0.0):
        return Bench(FakeBackend(), open_cache)  # type: ignore[arg-type]


def wait_for(signal: list[bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not signal and time.monotonic() < deadline:
        time.sleep(0.001)


def test_the_end_of_a_long_turn_is_exported_over_many_steps() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(2100)
    bench.submit("long", prompt, 0)
    steps_until(bench, lambda: len(bench.backend.tokens(0)) == len(prompt))
    n_exported = [len(bench.backend.exports)]
    while (seconds := bench.loop._seconds_to_wait()) is not None:
        assert seconds <= REST_SECONDS  # the reply has just ended; then no step waits
        bench.step()
        n_exported.append(len(bench.backend.exports))
    assert max(after - before for before, after in pairwise(n_exported)) == 1
    assert sum(each.stop - each.start for each in bench.backend.exports) == len(prompt)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_slot_evicted_for_streams_is_stored_over_many_steps_and_no_row_is_lost(
    model_class: ModelClass,
) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=2, n_cells=2048))
    old = text(1400)
    bench.submit("old", old, 0)
    steps_until(bench, lambda: bool(bench.events("old")))
    n_exported = len(bench.backend.exports)
    bench.submit("stream", text(500), 400)  # more cells than are left
    bench.run(2_000)
    assert len(bench.tokens("stream")) == 400
    assert len(bench.backend.exports) > n_exported
    again = bench.ask("again", [*old, 1, 2, 3], 1, n_steps=2_000)
    assert again.tokens == expected_reply([*old, 1, 2, 3], 1)
    assert again.evaluated.n_cached >= len(old) - 64
    bench.assert_nothing_is_left()


def test_a_prompt_without_room_is_looked_up_again_only_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    find = PrefixFinder.find

    def counted(finder: PrefixFinder, sequence: object) -> object:
        found.append(sequence.request.id)  # type: ignore[attr-defined]
        return find(finder, sequence)  # type: ignore[arg-type]

    bench = Bench(FakeBackend(n_slots=2, n_cells=1024))
    bench.submit("stream", text(600), 300)
    steps_until(bench, lambda: len(bench.tokens("stream")) > 40)
    monkeypatch.setattr(PrefixFinder, "find", counted)
    bench.submit("waits", text(700), 1)
    n_steps = steps_until(bench, lambda: len(bench.tokens("stream")) > 200)
    assert n_steps > 100
    assert found.count("waits") <= 3  # at first, and after exports of the stream's blocks
    bench.run(1_000)
    assert len(bench.tokens("waits")) == 1


def test_a_prompt_that_waits_for_the_export_of_a_slot_tries_again_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(FakeBackend(n_slots=3, n_cells=2048))
    bench.submit("stream", text(10), 400)
    # Only the wait for the cells exports rows.
    monkeypatch.setattr(ExportPace, "may_export", False)
    bench.submit("old", text(1400), 0)
    steps_until(bench, lambda: bool(bench.events("old")))
    bench.submit("new", text(1000), 1)
    n_steps = steps_until(bench, lambda: bool(bench.tokens("new")))
    assert n_steps < 40
    assert sum(each.stop - each.start for each in bench.backend.exports) >= 1400


def test_a_background_request_waits_for_the_rows_that_it_overwrites_to_be_stored() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    old = text(2100)
    bench.submit("old", old, 1)
    steps_until(bench, lambda: bool(bench.tokens("old")))
    ahead = [*old[:2000], 1, 2, 3]
    bench.submit("ahead", ahead, 0, background=True)
    steps_until(bench, lambda: any(isinstance(each, Finished) for each in bench.events("ahead")))
    assert Finished(StopCause.LENGTH) in bench.events("ahead")
    assert bench.backend.tokens(0) == ahead
