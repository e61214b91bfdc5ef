"""When rows are exported: not where a first token or the next request would wait for it."""

from collections.abc import Callable

import pytest

from rekindle.cache.policy import OVERDUE_SECONDS
from rekindle.engine.export import slot_saver
from rekindle.generation.questions import ListStored
from rekindle.generation.request import CacheTerms, Pin, Rank
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


def n_exported(bench: Bench) -> int:
    return sum(each.stop - each.start for each in bench.backend.exports)


def test_a_request_right_behind_a_reply_waits_for_no_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before its first token, nor in the step that delivers it."""
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    bench = Bench(FakeBackend(n_slots=2))
    bench.submit("first", text(600), 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
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
    bench.submit("first", prompt, 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens == len(prompt)


def test_an_overdue_reply_is_stored_although_requests_follow_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    monkeypatch.setattr(slot_saver, "OVERDUE_SECONDS", 0.0)
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(100)
    for turn in range(3):
        bench.submit(f"turn {turn}", prompt, 1)
        steps_until(bench, lambda name=f"turn {turn}": has_ended(bench, name))  # type: ignore[misc]
        bench.step()
        bench.step()
        assert n_exported(bench) >= 100 * turn
        prompt = [*prompt, *text(100)]


def test_a_long_prefill_right_behind_a_reply_begins_once_that_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill a second after the reply, in the prefill's first batch, must not lose it."""
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(600)
    bench.submit("first", prompt, 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
    bench.loop._saver.prefill_seconds_per_token = 0.01
    bench.submit("next", [*prompt, *bench.tokens("first"), *text(60)], 1)
    n_batches = len(bench.backend.batches)
    steps_until(bench, lambda: len(bench.backend.batches) > n_batches)
    assert n_exported(bench) == 600


def test_rows_of_another_session_are_stored_before_its_slot_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they would be stored, and deleted, as rows of the session that continues them."""
    assert n_stored_first(monkeypatch, CacheTerms(session="one"), CacheTerms(session="two")) == 200


@pytest.mark.parametrize(
    ("first", "then", "n_stored"),
    [(Rank.MAIN, Rank.BACKGROUND, 200), (Rank.BACKGROUND, Rank.MAIN, 0)],
)
def test_rows_of_a_conversation_keep_its_rank_and_rows_that_it_continues_get_it(
    monkeypatch: pytest.MonkeyPatch, first: Rank, then: Rank, n_stored: int
) -> None:
    terms = CacheTerms(rank=first), CacheTerms(rank=then)
    assert n_stored_first(monkeypatch, *terms) == n_stored


def n_stored_first(monkeypatch: pytest.MonkeyPatch, first: CacheTerms, then: CacheTerms) -> int:
    """Return how many of 200 rows are stored when the next request has continued them."""
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    # So few cells that no second slot fits beside the rows.
    bench, prompt = Bench(FakeBackend(n_slots=2, n_cells=256)), text(200)
    bench.submit("first", prompt, 1, terms=first)
    steps_until(bench, lambda: has_ended(bench, "first"))
    bench.step()
    assert n_exported(bench) == 0
    bench.submit("next", [*prompt, *text(20)], 8, terms=then)
    steps_until(bench, lambda: bool(bench.tokens("next")))
    return n_exported(bench)


def test_the_wait_of_one_reply_does_not_count_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(200)
    bench.submit("first", prompt, 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
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
    bench.submit("first", prompt, 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
    bench.submit("next", text(50), 1)
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens == len(prompt)


def test_a_pin_holds_although_the_next_request_continues_the_reply_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 60.0)
    bench, prompt = Bench(FakeBackend(n_slots=2)), text(200)
    pinning = CacheTerms(session="pinning", pins=(Pin(200, 3600.0),))
    bench.submit("first", prompt, 1, terms=pinning)
    steps_until(bench, lambda: has_ended(bench, "first"))
    bench.step()
    assert n_exported(bench) == 0
    bench.submit("next", [*prompt, *text(20)], 1)
    monkeypatch.setattr(slot_saver, "REST_SECONDS", 0.0)
    bench.run()
    [stored] = bench.question(ListStored(namespace="", limit=10))
    assert stored.n_tokens >= len(prompt)
    assert stored.pinned_until is not None


def test_the_only_slot_is_exported_at_once() -> None:
    """The next request may have to store its rows before it can begin."""
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("first", text(600), 1)
    steps_until(bench, lambda: has_ended(bench, "first"))
    bench.step()
    assert n_exported(bench) == 600
