"""Failures that were found once, each in its smallest form."""

from pathlib import Path

import pytest

from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.orders import Cancel
from rekindle.generation.events import Finished
from rekindle.generation.model_state import ModelClass
from tests.engine.reuse.test_reuse import text
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench


def test_a_context_smaller_than_reported_requeues_one_request_not_all() -> None:
    backend = FakeBackend(n_slots=2, n_cells=4096)
    bench = Bench(backend)
    prompts = {"a": text(300), "b": text(300)}
    bench.submit("a", prompts["a"], 100)
    for _ in range(3):
        bench.step()
    bench.submit("b", prompts["b"], 100)
    backend.n_cells = 550
    bench.run(1000)
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 100)


def test_a_step_that_freed_room_is_followed_by_another_at_once() -> None:
    backend = FakeBackend(n_slots=2, n_cells=4096)
    bench = Bench(backend)
    for name in ("a", "b"):
        bench.submit(name, text(300), 100)
    for _ in range(5):
        bench.step()
    backend.n_cells = backend.n_cells_used
    bench.step()
    assert not bench.loop._is_stalled


def test_memory_held_by_a_restore_leaves_no_gap_in_a_stored_prefix(tmp_path: Path) -> None:
    returning = text(2000)
    first = Bench(FakeBackend(), cache_opener(tmp_path))
    first.ask("returning", returning, 1)
    first.close()
    opened: list[PrefixCache] = []
    bench = Bench(FakeBackend(), cache_opener(tmp_path, memory_bytes=0, opened=opened))
    prompt = text(600)
    bench.submit("returns", returning, 1)
    bench.submit("beside it", prompt, 4)
    bench.run(20_000)
    assert bench.tokens("returns") == expected_reply(returning, 1)
    bench.close()
    keys = PrefixKeys(opened[0].root, [*prompt, *bench.tokens("beside it")])
    assert opened[0].match(keys, 600).n_tokens == 600


def test_rows_evicted_from_memory_are_stored_again_before_their_slot_is_reused() -> None:
    # Memory for 20 blocks; 18 of a conversation, then others push them out.
    bench = Bench(FakeBackend(n_slots=2, n_cells=20_000), cache_opener(memory_bytes=200_000))
    conversation = text(2000)
    bench.ask("long ago", conversation, 1)
    for number in range(3):
        other = text(2500)
        for turn in range(3):
            bench.ask(f"{number} {turn}", other, 1)
    asked = bench.ask("back", conversation, 1)
    assert asked.evaluated.n_cached >= 1024


@pytest.mark.parametrize("model_class", [ModelClass.DENSE, ModelClass.HYBRID])
def test_no_sequence_waits_for_rows_that_cannot_be_shared(model_class: ModelClass) -> None:
    backend = FakeBackend(
        model_class=model_class, n_cells=10_000, off_because="The round trip failed."
    )
    bench = Bench(backend)
    prompt = text(3000)
    bench.submit("first", prompt, 1)
    bench.step()
    bench.submit("second", prompt, 1)
    bench.step()
    assert bench.loop.status().n_waiting == 0
    bench.loop.inbox.put(Cancel("first"))
    bench.run()
    assert isinstance(bench.events("second")[-1], Finished)


def test_a_recurrent_models_turn_leaves_no_entry_that_leads_nowhere() -> None:
    bench = Bench(FakeBackend(model_class=ModelClass.RECURRENT))
    bench.ask("a", text(300), 1)
    cache = bench.loop.status().cache
    assert cache is not None
    # One whole block, a checkpoint near the prompt's end, and one at the end of the turn.
    assert cache.tiers[0].n_entries == 3
