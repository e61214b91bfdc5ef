"""Background requests use idle time and delay no other request."""

import pytest

from rekindle.engine.orders import Cancel
from rekindle.errors import ContextFull, ShuttingDown
from rekindle.generation.events import (
    CachedSpan,
    CacheSource,
    Finished,
    PromptEvaluated,
    StopCause,
)
from rekindle.generation.model_state import ModelClass
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench

ALL_CLASSES = list(ModelClass)
YIELDED = Finished(StopCause.YIELDED)


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def evaluated(bench: Bench, name: str) -> PromptEvaluated:
    [event] = [each for each in bench.events(name) if isinstance(each, PromptEvaluated)]
    return event


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_background_prefill_is_found_whole_by_the_next_request(
    model_class: ModelClass,
) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    prompt = text(1, 700)
    bench.submit("ahead", prompt, 0, background=True)
    bench.run()
    assert bench.events("ahead")[-1] == Finished(StopCause.LENGTH)
    asked = bench.ask("a", prompt + text(5_000, 30), 1)
    assert asked.n_computed == 30
    assert asked.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, 700),)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
@pytest.mark.parametrize("n_steps_before", [1, 4])
def test_a_background_request_yields_to_a_request_that_then_reuses_its_rows(
    model_class: ModelClass, n_steps_before: int
) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_ubatch=128))
    prompt = text(1, 1500)
    bench.submit("ahead", prompt, 0, background=True)
    for _ in range(n_steps_before):
        bench.step()
    n_ahead = bench.backend.n_computed
    assert n_ahead > 0
    bench.submit("a", prompt + text(5_000, 30), 4)
    bench.step()
    assert bench.events("ahead")[-1] == YIELDED
    assert bench.backend.batches[-1] == [128]  # the very next step is the newcomer's
    bench.run()
    assert evaluated(bench, "a").spans == (CachedSpan(CacheSource.LIVE, 0, n_ahead),)
    assert bench.tokens("a") == expected_reply(prompt + text(5_000, 30), 4)
    assert bench.backend.n_computed == 1530 + 3
    bench.assert_nothing_is_left()


def test_a_background_request_does_not_delay_an_unrelated_first_token() -> None:
    def steps_to_first_token(*, busy: bool) -> int:
        bench = Bench(FakeBackend(n_ubatch=128))
        if busy:
            bench.submit("ahead", text(1, 1500), 0, background=True)
            bench.submit("ahead too", text(10_000, 1500), 0, background=True)
        bench.step()
        bench.submit("a", text(5_000, 300), 4)
        for n_steps in range(1, 100):
            bench.step()
            if bench.tokens("a"):
                return n_steps
        raise AssertionError

    assert steps_to_first_token(busy=True) == steps_to_first_token(busy=False)


def test_a_decoding_background_request_yields_and_closes_its_sampler() -> None:
    bench = Bench(FakeBackend())
    bench.submit("ahead", text(1, 100), 50, background=True)
    for _ in range(6):
        bench.step()
    assert bench.tokens("ahead")
    bench.submit("a", text(5_000, 20), 3)
    bench.run()
    assert bench.events("ahead")[-1] == YIELDED
    assert bench.tokens("a") == expected_reply(text(5_000, 20), 3)
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("n_steps_before", [0, 1, 3])
def test_a_background_request_waits_while_anything_runs_or_waits(n_steps_before: int) -> None:
    bench = Bench(FakeBackend(n_slots=4))
    bench.submit("a", text(1, 50), 20)
    for _ in range(n_steps_before):
        bench.step()
    bench.submit("ahead", text(5_000, 100), 0, background=True)
    bench.run()
    assert bench.events("ahead") == [YIELDED]
    assert bench.backend.n_computed == 50 + 19


def test_background_requests_run_one_at_a_time_and_all_yield_together() -> None:
    bench = Bench(FakeBackend(n_ubatch=64))
    for index in range(3):
        bench.submit(f"ahead {index}", text(10_000 * index, 100), 0, background=True)
    while not bench.events("ahead 1"):
        bench.step()
        assert len(bench.backend.batches[-1]) == 1
        assert (bench.loop.status().n_running, bench.loop.status().n_waiting) == (0, 0)
    assert bench.events("ahead 0")[-1] == Finished(StopCause.LENGTH)
    assert bench.loop.status().n_background == 2
    bench.submit("a", text(50_000, 20), 2)
    bench.step()
    assert bench.loop.status().n_background == 0
    assert bench.events("ahead 1")[-1] == bench.events("ahead 2")[-1] == YIELDED


def test_background_steps_are_short_before_any_speed_is_known() -> None:
    bench = Bench(FakeBackend(n_ubatch=512))
    bench.loop._saver.prefill_seconds_per_token = None
    bench.submit("ahead", text(1, 1000), 0, background=True)
    bench.step()
    assert bench.backend.batches == [[64]]
    bench.loop._saver.prefill_seconds_per_token = 0.25 / 192  # a slow machine
    bench.step()
    assert bench.backend.batches[-1] == [192]
    bench.submit("a", text(5_000, 1000), 1)
    bench.step()
    assert bench.backend.batches[-1] == [512]


def test_a_background_restore_copies_one_piece_per_step() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("a", text(1, 1100), 1)
    bench.ask("b", text(5_000, 300), 1)
    bench.submit("ahead", text(1, 1150), 0, background=True)
    while not bench.events("ahead"):
        n_before = len(bench.backend.imports)
        bench.step()
        assert len(bench.backend.imports) <= n_before + 1
    bench.run()
    assert evaluated(bench, "ahead").spans == (CachedSpan(CacheSource.MEMORY, 0, 1100),)


def test_a_background_request_uses_the_slot_it_extends_and_no_other() -> None:
    bench = Bench(FakeBackend(n_slots=3))
    conversations = [text(10_000 * index, 300) for index in range(3)]
    replies = [bench.ask(f"c{n}", each, 10).tokens for n, each in enumerate(conversations)]
    ahead = conversations[0] + replies[0] + text(90_000, 40)
    bench.submit("ahead", ahead, 0, background=True)
    bench.run()
    assert evaluated(bench, "ahead").n_cached == 309
    for n in (1, 2):
        asked = bench.ask(f"again {n}", conversations[n] + replies[n] + text(80_000, 20), 1)
        assert asked.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, 309),)


def test_a_background_request_that_leaves_no_room_to_grow_is_not_started() -> None:
    bench = Bench(FakeBackend(n_slots=2, n_cells=512))
    bench.submit("ahead", text(1, 490), 0, background=True)  # 64 cells of room to grow are missing
    bench.run()
    assert bench.events("ahead") == [YIELDED]
    assert bench.ask("a", text(1, 490), 2).tokens == expected_reply(text(1, 490), 2)


def test_a_full_context_evicts_no_slot_for_a_background_request() -> None:
    backend = FakeBackend(n_slots=2)
    bench = Bench(backend)
    bench.ask("a", text(1, 300), 1)
    backend.decode_failures.append(ContextFull("no"))
    bench.submit("ahead", text(5_000, 100), 0, background=True)
    bench.run()
    assert bench.events("ahead")[-1] == YIELDED
    assert bench.ask("again", text(1, 320), 1).evaluated.spans == (
        CachedSpan(CacheSource.LIVE, 0, 300),
    )


def test_a_background_reply_that_outgrows_the_context_ends() -> None:
    bench = Bench(FakeBackend(n_slots=2, n_cells=512))
    bench.ask("a", text(1, 200), 1)
    bench.submit("ahead", text(5_000, 200), None, background=True)
    bench.run()
    assert bench.events("ahead")[-1] == YIELDED
    assert bench.backend.tokens(0) == text(1, 200)
    bench.assert_nothing_is_left()


def test_a_background_request_can_be_cancelled_and_fails_when_the_engine_stops() -> None:
    bench = Bench(FakeBackend(n_ubatch=64))
    bench.submit("cancelled", text(1, 300), 0, background=True)
    bench.submit("waits", text(5_000, 300), 0, background=True)
    bench.step()
    bench.loop.inbox.put(Cancel("cancelled"))
    bench.step()
    assert not any(isinstance(event, Finished) for event in bench.events("cancelled"))
    bench.close()
    assert isinstance(bench.events("waits")[-1], ShuttingDown)
    bench.assert_nothing_is_left()
