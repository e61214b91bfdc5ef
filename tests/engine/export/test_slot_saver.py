"""When rows are exported: not where a first token or the next request would wait for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rekindle.cache.policy import OVERDUE_SECONDS
from rekindle.engine.export import slot_saver
from rekindle.generation.questions import ListStored
from rekindle.generation.request import USUAL_TERMS, CacheTerms, Pin, Rank
from tests.engine.reuse.test_reuse import text
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import MAX_STEPS, Bench


def steps_until(bench: Bench, is_so: Callable[[], bool]) -> None:
    for _ in range(MAX_STEPS):
        if is_so():
            return
        bench.step()
    raise AssertionError("it never was")


def has_ended(bench: Bench, name: str) -> bool:
    return bool(bench.tokens(name)) and bench.loop.status().n_running == 0


def reply(bench: Bench, name: str, prompt: Sequence[int], terms: CacheTerms = USUAL_TERMS) -> None:
    """Take the steps of a request up to the one in which its reply ends."""
    bench.submit(name, prompt, 1, terms=terms)
    steps_until(bench, lambda: has_ended(bench, name))


def n_exported(bench: Bench) -> int:
    return sum(each.stop - each.start for each in bench.backend.exports)


@pytest.fixture
def long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a reply rest as long as the test lasts."""
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)


@pytest.mark.usefixtures("long_rest")
def test_a_request_right_behind_a_reply_waits_for_no_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before its first token, nor in the step that delivers it."""
    bench = Bench(FakeBackend(n_slots=2))
    reply(bench, "first", text(600))
    bench.step()
    assert 0 < (bench.loop._seconds_to_wait() or 0) <= 60
    bench.submit("next", text(300), 4)
    steps_until(bench, lambda: bool(bench.tokens("next")))
    assert n_exported(bench) == 512  # the blocks that were complete before the reply
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 0.0)
    bench.run()
    assert n_exported(bench) == 903


def test_a_question_right_behind_a_reply_finds_it_stored() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    reply(bench, "first", prompt)
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens == len(prompt)


@pytest.mark.usefixtures("long_rest")
def test_an_overdue_reply_is_stored_although_requests_follow_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_saver, "OVERDUE_SECONDS", 0.0)
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(100)
    for turn in range(3):
        reply(bench, f"turn {turn}", prompt)
        bench.step()
        bench.step()
        assert n_exported(bench) >= 100 * turn
        prompt = [*prompt, *text(100)]


@pytest.mark.usefixtures("long_rest")
def test_a_long_prefill_right_behind_a_reply_begins_once_that_is_stored() -> None:
    """A kill a second after the reply, in the prefill's first batch, must not lose it."""
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(600)
    reply(bench, "first", prompt)
    bench.loop._saver.prefill_seconds_per_token = 0.01
    bench.submit("next", [*prompt, *bench.tokens("first"), *text(60)], 1)
    n_batches = len(bench.backend.batches)
    steps_until(bench, lambda: len(bench.backend.batches) > n_batches)
    assert n_exported(bench) == 600


@pytest.mark.usefixtures("long_rest")
def test_rows_of_another_session_are_stored_before_its_slot_continues() -> None:
    """Otherwise they would be stored, and deleted, as rows of the session that continues them."""
    assert n_stored_first(CacheTerms(session="one"), CacheTerms(session="two")) == 200


@pytest.mark.usefixtures("long_rest")
@pytest.mark.parametrize(
    ("first", "then", "n_stored"),
    [(Rank.MAIN, Rank.BACKGROUND, 200), (Rank.BACKGROUND, Rank.MAIN, 0)],
)
def test_rows_of_a_conversation_keep_its_rank_and_rows_that_it_continues_get_it(
    first: Rank, then: Rank, n_stored: int
) -> None:
    terms = CacheTerms(rank=first), CacheTerms(rank=then)
    assert n_stored_first(*terms) == n_stored


def n_stored_first(first: CacheTerms, then: CacheTerms) -> int:
    """Return how many of 200 rows are stored when the next request has continued them."""
    # So few cells that no second slot fits beside the rows.
    bench, prompt = Bench(FakeBackend(n_slots=2, n_cells=256)), text(200)
    reply(bench, "first", prompt, first)
    bench.step()
    assert n_exported(bench) == 0
    bench.submit("next", [*prompt, *text(20)], 8, terms=then)
    steps_until(bench, lambda: bool(bench.tokens("next")))
    return n_exported(bench)


@pytest.mark.usefixtures("long_rest")
def test_the_wait_of_one_reply_does_not_count_for_the_next() -> None:
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(200)
    reply(bench, "first", prompt)
    bench.step()
    [slot] = [slot for slot in bench.loop._slots.all if slot.is_idle]
    assert slot.export_waits_since is not None
    slot.export_waits_since -= 2 * OVERDUE_SECONDS
    bench.submit("next", [*prompt, *text(20)], 20)
    steps_until(bench, lambda: has_ended(bench, "next"))
    bench.step()
    assert n_exported(bench) == 200


def test_a_question_that_comes_with_a_request_finds_the_reply_before_them() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    prompt = text(600)
    reply(bench, "first", prompt)
    bench.submit("next", text(50), 1)
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens == len(prompt)


@pytest.mark.usefixtures("long_rest")
def test_a_pin_holds_although_the_next_request_continues_the_reply_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(200)
    pinning = CacheTerms(session="pinning", pins=(Pin(200, 3600.0),))
    reply(bench, "first", prompt, pinning)
    bench.step()
    assert n_exported(bench) == 0
    bench.submit("next", [*prompt, *text(20)], 1)
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 0.0)
    bench.run()
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens >= len(prompt)
    assert stored.pinned_until is not None


@pytest.mark.usefixtures("long_rest")
def test_rows_do_not_rest_beside_an_embedding() -> None:
    """A part of it may take seconds."""
    bench = Bench(FakeBackend(n_slots=2))
    reply(bench, "first", text(200))
    bench.step()
    assert n_exported(bench) == 0
    bench.embed("second", [1, 2, 3])
    bench.step()
    assert n_exported(bench) == 200


@pytest.mark.usefixtures("long_rest")
def test_a_prefill_waits_for_the_export_of_a_tail_however_long_the_slot_is() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    bench.backend.traits = replace(bench.backend.traits, row_bytes=8)
    reply(bench, "first", text(2_100))
    saver = bench.loop._saver
    [slot] = [slot for slot in bench.loop._slots.all if slot.is_idle]
    assert (slot.n_saved, slot.n_rows) == (2_048, 2_100)
    limit = saver._writer.speed.seconds(100 * 8)
    assert limit is not None
    assert saver._may_export(slot, limit, others_decode=False)
    assert not saver._may_export(slot, limit / 10, others_decode=False)


def test_the_only_slot_is_exported_at_once() -> None:
    """The next request may have to store its rows before it can begin."""
    bench = Bench(FakeBackend(n_slots=1))
    reply(bench, "first", text(600))
    bench.step()
    assert n_exported(bench) == 600
