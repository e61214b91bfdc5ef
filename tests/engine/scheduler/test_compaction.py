"""Compaction: holes between rows are closed once they have cost as much as closing them."""

import pytest

from rekindle.cache.policy import CellTax
from rekindle.errors import DecodeFailed
from tests.engine.reuse.test_reuse import text
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(n_slots=3)
    backend.pays_for_holes = True
    return backend


@pytest.fixture
def bench(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Each cell costs a second of every step: idle slots leave as soon as they are stored."""
    monkeypatch.setattr(CellTax, "seconds_per_cell", lambda *_: 1.0)
    return Bench(backend)


def test_rows_move_down_once_idle_rows_below_are_gone(bench: Bench, backend: FakeBackend) -> None:
    bench.ask("idle", text(600))
    prompt = text(300)
    bench.submit("runs", prompt, 40)
    bench.run()
    assert bench.tokens("runs") == expected_reply(prompt, 40)
    [slot] = set(backend.moved)
    assert len(backend.moved) == 1
    assert backend.tokens(slot)[:300] == prompt


def test_without_holes_nothing_moves(bench: Bench, backend: FakeBackend) -> None:
    bench.submit("runs", text(300), 40)
    bench.run()
    assert backend.moved == []


@pytest.mark.parametrize("lacks", ["has_room_to_move", "pays_for_holes"])
def test_nothing_moves_where_holes_cost_nothing_or_room_is_short(
    bench: Bench, backend: FakeBackend, lacks: str
) -> None:
    setattr(backend, lacks, False)
    bench.ask("idle", text(600))
    bench.submit("runs", text(300), 40)
    bench.run()
    assert backend.moved == []


def test_shared_rows_are_not_moved(bench: Bench, backend: FakeBackend) -> None:
    bench.ask("idle", text(600))
    head = text(300)
    prompts = {"one": [*head, 1, 2], "two": [*head, 3, 4]}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 40)


def test_a_failed_move_ends_the_engine(bench: Bench, backend: FakeBackend) -> None:
    """Rows that the failure may have damaged are not used again."""
    backend.move_failures.append(DecodeFailed("told to", rows_intact=False))
    bench.ask("idle", text(600))
    bench.submit("runs", text(300), 40)
    with pytest.raises(DecodeFailed):
        bench.run()


def test_rows_behind_an_evicted_conversation_move_down_before_a_long_prompt() -> None:
    """Otherwise all its tokens would read the tiles behind the gap, too."""
    backend = FakeBackend()
    bench = Bench(backend)
    shared = text(300)
    bench.ask("long", shared + text(600), 1)
    fork = shared + text(40)
    bench.ask("fork", fork, 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    prompt = fork + text(500)
    bench.submit("continues", prompt, 4)
    bench.run()
    assert bench.tokens("continues") == expected_reply(prompt, 4)
    [slot] = backend.moved
    assert backend.tokens(slot)[: len(prompt)] == prompt


def test_a_prompt_that_ends_in_a_burst_leaves_the_context_before_the_next_one() -> None:
    """Attention would read its rows for all prompts behind it. It is found again."""
    backend = FakeBackend(n_slots=3, n_cells=8192)
    bench = Bench(backend)
    bench.ask("measures", text(600), 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    prompts = {name: text(1500) for name in ("one", "two", "three")}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 1)
    live: list[int] = []
    while not bench.tokens("three"):
        bench.step()
        live.append(max(sum(slot.n_rows for slot in bench.loop._slots.all if slot.is_idle), 0))
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 1)
    assert max(live) <= 1500, "two ended prompts were live at once"
    assert backend.moved
    for name, prompt in prompts.items():
        assert bench.ask(f"{name} again", prompt, 1).n_computed == 0


@pytest.mark.parametrize(("n_prompt", "is_evicted"), [(2100, True), (600, False)])
def test_on_a_gpu_only_a_long_prompt_leaves_its_burst(n_prompt: int, *, is_evicted: bool) -> None:
    """To store a short one between the batches of the others would take longer."""
    backend = FakeBackend(n_slots=3, n_cells=8192)
    backend.on_gpu = True
    bench = Bench(backend)
    bench.ask("measures", text(100), 1)
    bench.loop._saver.prefill_seconds_per_token = 1.0
    for name in ("one", "two"):
        bench.submit(name, text(n_prompt), 1)
    while not bench.tokens("two"):
        bench.step()
        # Not measured: in the fake, the speed of a prefill is that of this machine.
        bench.loop._saver.prefill_seconds_per_token = 1.0
    ended = [slot for slot in bench.loop._slots.all if slot.is_idle and slot.n_rows >= n_prompt]
    assert len(ended) == (1 if is_evicted else 2)
