"""The loop, step by step on the test's own thread, over a backend that checks every position."""

import pytest

from rekindle.engine.orders import Cancel
from rekindle.engine.scheduler.batch_planner import LONGEST_STEP_SECONDS, PREFILL_GRAIN
from rekindle.errors import ContextFull, DecodeFailed, EngineError, ShuttingDown
from rekindle.generation.events import (
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenSampled,
)
from tests.support.fake_backend import END, FakeBackend, expected_reply
from tests.support.loop_driver import Bench


def prompt(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_a_reply_is_what_the_whole_prompt_gives() -> None:
    bench = Bench(FakeBackend())
    bench.submit("a", prompt(1, 700), max_tokens=5)
    bench.run()
    assert bench.tokens("a") == expected_reply(prompt(1, 700), 5)
    assert bench.events("a")[-1] == Finished(StopCause.LENGTH)
    bench.assert_nothing_is_left()


def test_a_turn_that_was_ended_for_its_length_says_so() -> None:
    backend = FakeBackend(reply=lambda prefix: END if prefix[-1] == 8 else prefix[-1] + 1)
    bench = Bench(backend)
    bench.submit("whole", [1, 2, 3], max_tokens=50)
    bench.run()
    backend.lands_at = 6
    bench.submit("ended", [1, 2, 3], max_tokens=50)
    bench.run()
    assert bench.tokens("whole") == bench.tokens("ended") == [4, 5, 6, 7, 8]
    assert bench.events("whole")[-1] == Finished(StopCause.END_OF_TURN, END)
    assert bench.events("ended")[-1] == Finished(StopCause.LENGTH, END)


def test_every_request_beyond_the_slots_gets_the_reply_it_gets_alone() -> None:
    bench = Bench(FakeBackend(n_slots=4, n_cells=4096))
    lengths = [3, 900, 64, 1, 333, 512, 70, 1200, 5, 640, 128, 2]
    for index, length in enumerate(lengths):
        bench.submit(f"r{index}", prompt(1000 * index, length), max_tokens=6 + index)
    bench.run()
    for index, length in enumerate(lengths):
        wanted = expected_reply(prompt(1000 * index, length), 6 + index)
        assert bench.tokens(f"r{index}") == wanted, f"r{index}"
    bench.assert_nothing_is_left()


def test_no_token_is_computed_twice_when_the_context_is_large_enough() -> None:
    bench = Bench(FakeBackend(n_slots=2))
    bench.submit("a", prompt(1, 700), max_tokens=10)
    bench.submit("b", prompt(900, 300), max_tokens=10)
    bench.run()
    # The last token of a reply is sampled, never decoded.
    assert bench.backend.n_computed == 700 + 9 + 300 + 9


def test_a_stream_gets_a_token_with_every_chunk_of_another_prompt() -> None:
    bench = Bench(FakeBackend())
    bench.submit("stream", prompt(1, 10), max_tokens=200)
    bench.step()
    bench.submit("long", prompt(500, 3000), max_tokens=1)
    while not any(isinstance(event, PromptEvaluated) for event in bench.events("long")):
        before = len(bench.tokens("stream"))
        bench.step()
        assert len(bench.tokens("stream")) == before + 1
        assert sum(bench.backend.batches[-1]) <= bench.backend.n_ubatch


def test_end_of_generation_is_not_part_of_the_reply() -> None:
    bench = Bench(FakeBackend(reply=lambda prefix: 5 if len(prefix) < 6 else END))
    bench.submit("a", [1, 2, 3], max_tokens=None)
    bench.run()
    assert bench.tokens("a") == [5, 5, 5]
    assert bench.events("a")[-1] == Finished(StopCause.END_OF_TURN, END)


def test_a_reply_that_fills_the_context_ends_by_length() -> None:
    bench = Bench(FakeBackend(n_slots=1, n_cells=32))
    bench.submit("a", prompt(1, 30), max_tokens=32_000)
    bench.run()
    assert len(bench.tokens("a")) == 2
    assert bench.events("a")[-1] == Finished(StopCause.LENGTH)


def test_no_prefill_step_of_a_slow_machine_looks_like_a_hang() -> None:
    """Nor does the first one, before any speed is known."""
    bench = Bench(FakeBackend(n_ubatch=512))
    bench.loop._saver.prefill_seconds_per_token = None
    bench.submit("a", prompt(1, 700), max_tokens=1)
    bench.step()
    bench.loop._saver.prefill_seconds_per_token = LONGEST_STEP_SECONDS / 192
    bench.step()
    assert bench.backend.batches == [[PREFILL_GRAIN], [192]]


def test_a_prompt_beside_streams_is_cut_at_grains_before_any_speed_is_known() -> None:
    """As after a start, when the first prompt was found whole."""
    bench = Bench(FakeBackend(n_ubatch=512))
    for number in range(3):
        bench.submit(f"stream {number}", prompt(1000 * number, 40), max_tokens=50)
    bench.step()
    bench.loop._saver.prefill_seconds_per_token = None
    bench.submit("a", prompt(5000, 700), max_tokens=1)
    bench.step()
    assert sorted(bench.backend.batches[-1]) == [1, 1, 1, PREFILL_GRAIN]
    assert bench.loop._saver.prefill_seconds_per_token is not None


def test_progress_is_reported_per_chunk_and_the_evaluated_prompt_once() -> None:
    bench = Bench(FakeBackend(n_ubatch=128))
    bench.submit("a", prompt(1, 300), max_tokens=3)
    bench.run()
    kinds = [type(event) for event in bench.events("a")]
    assert kinds[:4] == [PrefillProgress] * 2 + [PromptEvaluated, TokenSampled]
    assert kinds.count(PromptEvaluated) == 1
    done = [event.n_done for event in bench.events("a") if isinstance(event, PrefillProgress)]
    assert done == [128, 256]


@pytest.mark.parametrize("n_steps_before", [0, 1, 3, 9])
def test_cancel_takes_effect_before_the_next_batch(n_steps_before: int) -> None:
    bench = Bench(FakeBackend(n_slots=1, n_ubatch=64))
    bench.submit("gone", prompt(1, 256), max_tokens=100)
    bench.submit("waits", prompt(500, 20), max_tokens=4)
    for _ in range(n_steps_before):
        bench.step()
    said, n_batches = len(bench.events("gone")), len(bench.backend.batches)
    bench.loop.inbox.put(Cancel("gone"))
    bench.run()
    assert len(bench.events("gone")) == said
    assert bench.tokens("waits") == expected_reply(prompt(500, 20), 4)
    assert len(bench.backend.batches) == n_batches + 4  # 20, and three of the reply
    bench.assert_nothing_is_left()


def test_cancelling_a_waiting_request_does_not_affect_the_running_one() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("runs", prompt(1, 20), max_tokens=5)
    bench.submit("waits", prompt(100, 20), max_tokens=5)
    bench.step()
    bench.loop.inbox.put(Cancel("waits"))
    bench.run()
    assert bench.tokens("runs") == expected_reply(prompt(1, 20), 5)
    assert bench.events("waits") == []


def test_a_full_context_requeues_the_youngest_and_changes_no_reply() -> None:
    bench = Bench(FakeBackend(n_slots=3, n_cells=512))
    for index in range(3):
        bench.submit(f"r{index}", prompt(1000 * index, 60), max_tokens=300)
    bench.run(n_steps=3000)
    for index in range(3):
        assert bench.tokens(f"r{index}") == expected_reply(prompt(1000 * index, 60), 300)
        evaluated = [e for e in bench.events(f"r{index}") if isinstance(e, PromptEvaluated)]
        assert len(evaluated) == 1
    bench.assert_nothing_is_left()


def test_context_full_from_the_backend_requeues_a_request() -> None:
    backend = FakeBackend(n_slots=2)
    bench = Bench(backend)
    bench.submit("a", prompt(1, 20), max_tokens=6)
    bench.submit("b", prompt(100, 20), max_tokens=6)
    bench.step()
    backend.decode_failures.append(ContextFull("no"))
    bench.run()
    assert bench.tokens("a") == expected_reply(prompt(1, 20), 6)
    assert bench.tokens("b") == expected_reply(prompt(100, 20), 6)


def test_context_full_for_a_lone_request_is_its_error() -> None:
    backend = FakeBackend()
    bench = Bench(backend)
    backend.decode_failures.append(ContextFull("no"))
    bench.submit("a", prompt(1, 20))
    bench.run()
    assert isinstance(bench.events("a")[-1], EngineError)
    bench.assert_nothing_is_left()


def test_a_decode_that_may_have_spoilt_rows_ends_the_engine() -> None:
    """Its process: no live row can be trusted, and the next process continues every request."""
    backend = FakeBackend(n_slots=2)
    bench = Bench(backend)
    bench.submit("a", prompt(1, 20))
    bench.step()
    backend.decode_failures.append(DecodeFailed("broken"))
    with pytest.raises(DecodeFailed):
        bench.run()


def test_a_refused_batch_fails_only_the_sequences_in_it() -> None:
    backend = FakeBackend(n_slots=2)
    bench = Bench(backend)
    bench.submit("a", prompt(1, 20))
    bench.submit("b", prompt(100, 20))
    bench.submit("later", prompt(200, 20), max_tokens=4)
    bench.step()
    backend.decode_failures.append(DecodeFailed("broken", rows_intact=True))
    bench.run()
    assert isinstance(bench.events("a")[-1], DecodeFailed)
    assert isinstance(bench.events("b")[-1], DecodeFailed)
    assert bench.tokens("later") == expected_reply(prompt(200, 20), 4)
    bench.assert_nothing_is_left()


def test_a_sampler_that_fails_ends_only_its_own_request() -> None:
    backend = FakeBackend()
    backend.fail_sampling_of.add(20)
    bench = Bench(backend)
    bench.submit("bad", prompt(1, 20))
    bench.submit("good", prompt(100, 20), max_tokens=4)
    bench.run()
    assert isinstance(bench.events("bad")[-1], EngineError)
    assert bench.tokens("good") == expected_reply(prompt(100, 20), 4)
    bench.assert_nothing_is_left()


def test_stopping_the_engine_fails_every_request_with_shutting_down() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("runs", prompt(1, 20))
    bench.submit("waits", prompt(100, 20))
    bench.step()
    bench.close()
    assert isinstance(bench.events("runs")[-1], ShuttingDown)
    assert isinstance(bench.events("waits")[-1], ShuttingDown)
    bench.assert_nothing_is_left()
