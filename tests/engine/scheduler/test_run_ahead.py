"""On a GPU, batches of a prefill follow each other without a wait, and nothing is lost by it."""

from types import SimpleNamespace

import pytest

from rekindle.engine.scheduler import batch_runner
from rekindle.generation.events import Finished
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import Sampling
from rekindle.link.activity_page import Activity
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench
from tests.support.preparers import SteppedPreparer

PROMPT = list(range(1, 1_601))
N_UBATCH = 256


class FakeGpu(FakeBackend):
    """Notes what was done while a batch might still run."""

    def __init__(
        self, *, model_class: ModelClass = ModelClass.DENSE, n_ubatch: int = N_UBATCH
    ) -> None:
        super().__init__(model_class=model_class, n_ubatch=n_ubatch, n_cells=8_192, n_slots=2)
        self.on_gpu = True
        self.is_running = False
        self.not_waited_for: list[str] = []
        self.longest_run = 0
        self._n_run = 0

    def decode(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        super().decode(tokens, positions, slots, outputs)
        self.is_running = True
        self._n_run += 1
        self.longest_run = max(self.longest_run, self._n_run)

    def wait(self) -> None:
        super().wait()
        self.is_running, self._n_run = False, 0

    def sample(self, samplers: object, rows: object) -> object:  # type: ignore[override]
        self._note("sample")
        return super().sample(samplers, rows)  # type: ignore[arg-type]

    def export_rows(self, slot: int, start: int, stop: int) -> memoryview:
        self._note("export")
        return super().export_rows(slot, start, stop)

    def import_rows(self, slot: int, start: int, stop: int, rows: object) -> None:
        self._note("import")
        super().import_rows(slot, start, stop, rows)  # type: ignore[arg-type]

    def _note(self, what: str) -> None:
        if self.is_running:
            self.not_waited_for.append(what)


def test_a_prompt_is_computed_without_a_wait_until_its_last_batch() -> None:
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("a", PROMPT, max_tokens=4)
    bench.run()
    assert bench.tokens("a") == expected_reply(PROMPT, 4)
    assert backend.longest_run == len(PROMPT) // N_UBATCH + 1
    assert backend.not_waited_for == []


def test_the_last_token_is_not_computed_alone() -> None:
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    assert backend.batches[-1] == [len(PROMPT) % N_UBATCH]


def test_a_lone_prompt_takes_wide_batches_and_one_beside_a_stream_takes_less() -> None:
    backend = FakeGpu(n_ubatch=2_048)
    bench = Bench(backend)
    bench.submit("alone", list(range(1, 4_001)), max_tokens=20)
    bench.step()
    bench.step()
    assert backend.batches[-2:] == [[2_048], [1_952]]
    bench.submit("beside", list(range(5_000, 7_000)), max_tokens=1)
    bench.run()
    assert max(max(each) for each in backend.batches[2:]) == 1_024


def test_prompts_of_a_burst_share_a_batch_only_up_to_what_is_enough() -> None:
    backend = FakeGpu(n_ubatch=2_048)
    bench = Bench(backend)
    for number in range(2):
        start = 1_000 * number + 1
        bench.submit(str(number), list(range(start, start + 900)), max_tokens=1)
    bench.run()
    assert [sum(each) for each in backend.batches] == [1_024, 776]


def test_a_batch_of_unknown_speed_is_not_a_wide_one() -> None:
    backend = FakeGpu(n_ubatch=2_048)
    bench = Bench(backend)
    bench.loop._saver.prefill_seconds_per_token = None
    bench.submit("a", PROMPT, max_tokens=1)
    bench.step()
    assert backend.batches == [[512]]


def test_nothing_needs_the_rows_of_a_running_batch() -> None:
    """A second request comes in the middle of the prefill, forks, restores and decodes."""
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("stored", PROMPT, max_tokens=4)
    bench.run()
    bench.submit("other", PROMPT[::-1], max_tokens=4)
    bench.submit("third", [*PROMPT[::-1], 7], max_tokens=4)
    bench.run()
    bench.submit("long", [*range(2_000, 4_000)], max_tokens=4)
    for _ in range(3):
        bench.step()
    bench.submit("back", [*PROMPT, 9], max_tokens=4)
    bench.run()
    assert bench.tokens("back") == expected_reply([*PROMPT, 9], 4)
    assert bench.tokens("long") == expected_reply(range(2_000, 4_000), 4)
    assert backend.not_waited_for == []
    assert backend.exports
    assert backend.imports


def test_a_long_prefill_waits_from_time_to_time_so_that_rows_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_runner, "LONGEST_RUN_SECONDS", 0.0)
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    assert backend.longest_run == 1


def test_a_model_with_checkpoints_waits_for_each_batch() -> None:
    backend = FakeGpu(model_class=ModelClass.HYBRID)
    bench = Bench(backend)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    assert backend.longest_run == 1


def test_rows_of_an_ended_reply_are_stored_during_the_next_prefill() -> None:
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("ended", PROMPT, max_tokens=1)
    while not bench.tokens("ended"):
        bench.step()
    n_before = len(backend.exports)
    bench.submit("next", range(2_000, 4_000), max_tokens=1)
    while not bench.tokens("next"):
        bench.step()
    assert len(backend.exports) - n_before >= len(PROMPT) // 256
    assert backend.not_waited_for == []


def test_a_prompt_that_is_not_sampled_is_computed_when_it_is_reported() -> None:
    backend = FakeGpu()
    bench = Bench(backend)
    bench.submit("a", PROMPT, max_tokens=0)
    while not any(isinstance(event, Finished) for event in bench.events("a")):
        bench.step()
    assert not backend.is_running


def test_a_prompt_that_waits_for_its_sampler_is_caught_up_with() -> None:
    """Otherwise its time would count as computing, and nothing would be stored."""
    backend = FakeGpu()
    bench = Bench(backend, preparer=SteppedPreparer())
    bench.submit("a", PROMPT, max_tokens=1, sampling=Sampling(temperature=0, repeat_penalty=1.5))
    for _ in range(20):
        bench.step()
    assert not backend.is_running
    assert backend.exports


def test_a_death_in_the_wait_is_blamed_on_the_requests_of_the_batches() -> None:
    backend = FakeGpu()
    bench = Bench(backend)
    seen: list[object] = []
    wait = backend.wait

    def looking_wait() -> None:
        last = bench.loop._activity.last()
        seen.append((last.activity, 7 in last.numbers or 8 in last.numbers))
        wait()

    backend.wait = looking_wait  # type: ignore[method-assign]
    bench.submit("a", PROMPT, max_tokens=1, number=7)
    bench.step()
    bench.step()
    bench.submit("b", PROMPT[::-1], max_tokens=1, number=8)
    bench.run()
    assert set(seen) == {(Activity.DECODE, True)}


def test_the_speed_of_a_prefill_is_that_of_all_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that returns early is no measure, and the wait at the end belongs to all of them."""
    backend = FakeGpu()
    bench = Bench(backend)
    bench.loop._saver.prefill_seconds_per_token = None
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(batch_runner, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    wait = backend.wait

    def slow_wait() -> None:
        clock.now += 0.2 if backend.is_running else 0.0
        wait()

    monkeypatch.setattr(backend, "wait", slow_wait)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.run()
    speed = bench.loop._saver.prefill_seconds_per_token
    assert speed is not None
    assert 0.2 / len(PROMPT) <= speed < 2.0 / len(PROMPT)
