"""Streams are delayed by at most one export or one import per step."""

from pathlib import Path

import pytest

from rekindle.cache.policy import CellTax
from rekindle.engine.scheduler import admission
from rekindle.generation.events import CacheSource, PromptEvaluated
from rekindle.generation.request import CacheTerms, Rank
from tests.engine.reuse.test_reuse import text
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench


def transfers_per_step(bench: Bench, n_steps: int) -> list[tuple[int, int]]:
    """(exports, imports) of each step."""
    counts = []
    for _ in range(n_steps):
        before = len(bench.backend.exports), len(bench.backend.imports)
        bench.step()
        counts.append(
            (len(bench.backend.exports) - before[0], len(bench.backend.imports) - before[1])
        )
    return counts


def test_a_restore_copies_one_block_per_step_while_others_decode() -> None:
    bench = Bench(FakeBackend(n_slots=2, n_cells=8192))
    returning = text(2000)
    bench.ask("first", returning, 1)
    bench.ask("other", text(300), 1)
    bench.ask("another", text(300), 1)
    bench.submit("stream", text(50), 60)
    bench.step()
    bench.step()
    bench.submit("returns", returning, 1)
    n_tokens_before = len(bench.tokens("stream"))
    counts = transfers_per_step(bench, 12)
    assert max(imports for _, imports in counts) == 1
    assert sum(imports for _, imports in counts) == 8
    assert len(bench.tokens("stream")) == n_tokens_before + 12
    bench.run()
    assert bench.tokens("returns") == expected_reply(returning, 1)


def test_a_restore_takes_one_step_while_no_sequence_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "STEP_SECONDS", 60.0)
    bench = Bench(FakeBackend(n_slots=1, n_cells=8192))
    returning = text(2000)
    bench.ask("first", returning, 1)
    bench.ask("other", text(300), 1)
    bench.submit("returns", returning, 1)
    [(_, n_imports)] = transfers_per_step(bench, 1)
    assert n_imports == 8


def test_a_restore_leaves_the_step_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STEP_SECONDS", 0.0)
    bench = Bench(FakeBackend(n_slots=1, n_cells=8192))
    returning = text(2000)
    bench.ask("first", returning, 1)
    bench.ask("other", text(300), 1)
    bench.submit("returns", returning, 1)
    counts = transfers_per_step(bench, 8)
    assert [imports for _, imports in counts] == [1] * 8
    bench.run()
    assert bench.tokens("returns") == expected_reply(returning, 1)


def test_an_export_copies_one_block_per_step_while_others_decode() -> None:
    bench = Bench(FakeBackend(n_slots=3, n_cells=8192))
    bench.submit("stream", text(50), 100)
    bench.step()
    bench.step()
    for number in range(2):
        bench.submit(f"prompt {number}", text(1500), 1)
    counts = transfers_per_step(bench, 40)
    assert max(exports for exports, _ in counts) == 1
    assert sum(exports for exports, _ in counts) >= 12


def test_an_idle_slot_is_parked_when_it_slows_others_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CellTax, "seconds_per_cell", lambda *_: 1.0)
    bench = Bench(FakeBackend())
    idle = text(600)
    bench.ask("idle", idle, 1)
    bench.ask("busy", text(100), 5)
    cache = bench.loop.status().cache
    assert cache is not None
    assert cache.counters.parked == 1
    [source] = {span.source for span in bench.ask("back", idle, 1).evaluated.spans}
    assert source is CacheSource.MEMORY


def test_an_idle_slot_that_costs_nothing_stays_live() -> None:
    bench = Bench(FakeBackend())
    idle = text(600)
    bench.ask("idle", idle, 1)
    bench.ask("busy", text(100), 5)
    [source] = {span.source for span in bench.ask("back", idle, 1).evaluated.spans}
    assert source is CacheSource.LIVE


def test_idle_slots_are_evicted_for_a_prefill_much_longer_than_their_restore() -> None:
    bench = Bench(FakeBackend())
    idle = text(600)
    bench.ask("idle", idle, 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    bench.ask("long", text(300), 1)
    [source] = {span.source for span in bench.ask("back", idle, 1).evaluated.spans}
    assert source is CacheSource.MEMORY


def test_idle_slots_that_share_a_beginning_are_evicted_together() -> None:
    bench = Bench(FakeBackend())
    shared = text(600)
    first, second = shared + text(100), shared + text(100)
    bench.ask("first", first, 1)
    bench.ask("second", second, 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    bench.ask("long", text(300), 1)
    for name, prompt in (("first back", first), ("second back", second)):
        sources = {span.source for span in bench.ask(name, prompt, 1).evaluated.spans}
        assert CacheSource.MEMORY in sources


def test_rows_shared_with_the_new_request_are_not_evicted() -> None:
    """They would free next to nothing."""
    bench = Bench(FakeBackend())
    shared = text(600)
    first = shared + text(10)
    bench.ask("first", first, 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    bench.ask("second", shared + text(300), 1)
    [source] = {span.source for span in bench.ask("back", first, 1).evaluated.spans}
    assert source is CacheSource.LIVE


def test_rows_that_the_new_request_shares_with_two_slots_are_not_evicted() -> None:
    """Neither slot would free much: the fork keeps what they share."""
    bench = Bench(FakeBackend())
    shared = text(600)
    for name in ("first", "second"):
        bench.ask(name, shared + text(10), 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    bench.ask("third", shared + text(300), 1)
    assert sum(slot.is_idle for slot in bench.loop._slots.all) == 3


def test_the_rest_of_a_conversation_is_evicted_once_its_beginning_is_forked() -> None:
    """Its rows would slow the prefill down, and only those of the beginning are shared."""
    bench = Bench(FakeBackend())
    shared = text(100)
    bench.ask("first", shared + text(600), 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    second = bench.ask("second", shared + text(300), 1)
    assert second.evaluated.n_cached == 100
    assert sum(slot.is_idle for slot in bench.loop._slots.all) == 1
    assert bench.loop._slots.n_cells_used < 500


@pytest.mark.parametrize(("n_shared", "n_left"), [(600, 1), (0, 2)])
def test_only_rows_that_no_other_slot_holds_count_as_the_cost_of_a_return(
    monkeypatch: pytest.MonkeyPatch, n_shared: int, n_left: int
) -> None:
    """A prefill of 300 s may cost a tenth of that; the whole conversation would cost 70 s."""
    bench = Bench(FakeBackend())
    shared = text(n_shared)
    bench.ask("first", shared + text(700 - n_shared), 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    gate = bench.loop._cache.gate
    monkeypatch.setattr(
        type(gate), "load_seconds", lambda _, match, n_live=0: 0.1 * (match.n_tokens - n_live)
    )
    bench.ask("second", shared + text(300), 1)
    assert sum(slot.is_idle for slot in bench.loop._slots.all) == n_left


def test_a_main_conversation_is_not_evicted_for_a_side_request() -> None:
    bench = Bench(FakeBackend())
    idle = text(600)
    bench.ask("idle", idle, 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    bench.ask("title", text(300), 1, terms=CacheTerms(rank=Rank.BACKGROUND))
    [source] = {span.source for span in bench.ask("back", idle, 1).evaluated.spans}
    assert source is CacheSource.LIVE


def test_idle_slots_stay_when_the_new_prompt_needs_little_prefill() -> None:
    bench = Bench(FakeBackend())
    idle, other = text(600), text(300)
    bench.ask("idle", idle, 1)
    bench.ask("other", other, 1)
    bench.loop._saver.prefill_seconds_per_token = 0.01
    bench.ask("the same", other, 1)
    [source] = {span.source for span in bench.ask("back", idle, 1).evaluated.spans}
    assert source is CacheSource.LIVE


def test_streams_keep_decoding_while_a_restore_waits_for_the_disk(tmp_path: Path) -> None:
    tokens = text(2000)
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("first", tokens, 1)
    first.close()
    bench = Bench(FakeBackend(), cache_opener(tmp_path))
    prompt = text(50)
    bench.submit("stream", prompt, 2000)
    bench.step()
    bench.step()
    bench.submit("returns", tokens, 1)
    n_steps = 0
    while not any(isinstance(event, PromptEvaluated) for event in bench.events("returns")):
        before = len(bench.tokens("stream"))
        bench.step()
        assert len(bench.tokens("stream")) == before + 1
        n_steps += 1
    assert n_steps >= 8
    bench.run(5000)
    assert bench.tokens("stream") == expected_reply(prompt, 2000)
    bench.close()


def test_the_last_token_of_a_prompt_says_little_about_the_speed_of_prefills() -> None:
    """It is computed alone, which takes a whole step."""
    bench = Bench(FakeBackend())
    batches, saver = bench.loop._batches, bench.loop._saver
    for _ in range(20):
        batches._learn_prefill_speed(512, 0.512)
        batches._learn_prefill_speed(1, 0.020)
    assert saver.prefill_seconds_per_token == pytest.approx(0.001, rel=0.3)
    for _ in range(20):
        batches._learn_prefill_speed(512, 1.024)
    assert saver.prefill_seconds_per_token == pytest.approx(0.002, rel=0.1)
