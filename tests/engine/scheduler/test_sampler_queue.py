"""Samplers that are prepared beside the engine: who waits for them, and who does not."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import pytest

from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Cancel, Delivery, Stop, Wake
from rekindle.engine.scheduler.sampler_queue import PreparingThreads
from rekindle.errors import EngineError, InvalidRequest
from rekindle.generation.events import Finished, StopCause, TokenSampled
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import GenerationRequest, Grammar, GrammarKind, Sampling
from rekindle.link.activity_page import ActivityPage, new_page_file
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, FakeSampler, expected_reply
from tests.support.fake_embedder import FakeEmbedder
from tests.support.loop_driver import Bench
from tests.support.preparers import SteppedPreparer

CONSTRAINED = Sampling(temperature=0, grammar=Grammar(GrammarKind.REGEX, "[0-9]+"))
PENALISED = Sampling(temperature=0, repeat_penalty=1.1)
PROMPT = list(range(1, 301))


class Hooked(FakeBackend):
    """Calls `before_sampler` while it makes a sampler for a reply under a grammar."""

    def __init__(self) -> None:
        super().__init__()
        self.before_sampler: Callable[[], None] = lambda: None

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> FakeSampler:
        if sampling.grammar is not None:
            self.before_sampler()
        return super().new_sampler(
            sampling, tokens, n_reply, n_top_logprobs, n_left=n_left, is_landing=is_landing
        )


@pytest.mark.parametrize("sampling", [CONSTRAINED, PENALISED])
def test_a_prompt_is_computed_once_while_its_sampler_is_prepared(sampling: Sampling) -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    bench.submit("a", PROMPT, sampling=sampling)
    for _ in range(5):
        bench.step()
    assert bench.backend.n_computed == len(PROMPT)
    assert bench.tokens("a") == []
    preparer.work()
    bench.run()
    assert bench.backend.n_computed == len(PROMPT) + 7
    assert bench.tokens("a") == expected_reply(PROMPT, 8)
    bench.assert_nothing_is_left()


def test_others_stream_while_a_sampler_is_prepared() -> None:
    bench = Bench(FakeBackend(), preparer=SteppedPreparer())
    bench.submit("waits", PROMPT, sampling=CONSTRAINED)
    bench.submit("streams", [7, 8, 9], max_tokens=20)
    for _ in range(30):
        bench.step()
    assert bench.tokens("streams") == expected_reply([7, 8, 9], 20)
    assert bench.tokens("waits") == []


def test_an_engine_that_waits_for_a_sampler_sleeps_until_it_is_woken() -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    bench.submit("a", PROMPT, sampling=CONSTRAINED)
    for _ in range(5):
        bench.step()
    assert bench.loop.inbox.empty()
    assert bench.loop._seconds_to_wait() == 1.0
    preparer.work()
    assert isinstance(bench.loop.inbox.get_nowait(), Wake)


@pytest.mark.parametrize("model_class", ModelClass)
@pytest.mark.parametrize("n_prompt", [1, 65, 512, 1_100])
def test_a_late_sampler_changes_no_chunk(model_class: ModelClass, n_prompt: int) -> None:
    batches = []
    for n_steps_late in (0, 7):
        preparer = SteppedPreparer()
        bench = Bench(FakeBackend(model_class=model_class), preparer=preparer)
        bench.submit("a", range(1, n_prompt + 1), sampling=CONSTRAINED)
        bench.loop.inbox.put(Wake())
        bench.loop.receive()
        for _ in range(n_steps_late):
            bench.step()
        preparer.work()
        bench.run()
        batches.append(bench.backend.batches)
    assert batches[0] == batches[1]


@pytest.mark.parametrize(
    ("sampling", "light"),
    [
        (Sampling(mirostat=2), [True]),
        (Sampling(dry_multiplier=1.0), [True]),
        (Sampling(dry_multiplier=1.0, dry_sequence_breakers=("word",)), [True, False]),
        (Sampling(dry_sequence_breakers=("word",)), []),
    ],
)
def test_breakers_that_take_long_to_find_delay_no_light_sampler(
    sampling: Sampling, light: list[bool]
) -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    bench.submit("a", PROMPT, sampling=sampling)
    bench.step()
    while preparer.jobs:
        preparer.work()
    bench.run()
    assert preparer.light == light
    assert bench.tokens("a") == expected_reply(PROMPT, 8)


def test_a_sampler_without_grammar_and_penalties_does_not_wait() -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    bench.submit("a", PROMPT, sampling=Sampling(seed=3))
    bench.run()
    assert not preparer.jobs
    assert bench.tokens("a") == expected_reply(PROMPT, 8)


def test_a_sampler_that_cannot_be_made_fails_its_own_request() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("good", PROMPT, sampling=CONSTRAINED)
    bad = Sampling(grammar=Grammar(GrammarKind.REGEX, "bad"))
    bench.submit("bad", PROMPT, sampling=bad)
    bench.run()
    assert isinstance(bench.events("bad")[-1], InvalidRequest)
    assert bench.tokens("good") == expected_reply(PROMPT, 8)
    bench.assert_nothing_is_left()


def test_a_defect_in_the_backend_is_an_engine_error_of_one_request() -> None:
    backend = Hooked()
    bench = Bench(backend)

    def fail() -> None:
        raise ZeroDivisionError("a defect")

    backend.before_sampler = fail
    bench.submit("a", PROMPT, sampling=CONSTRAINED)
    bench.submit("b", PROMPT)
    bench.run()
    [error] = bench.events("a")
    assert isinstance(error, EngineError)
    assert "a defect" in error.message
    assert bench.tokens("b") == expected_reply(PROMPT, 8)


def test_a_request_that_ends_before_its_turn_needs_no_sampler() -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    bench.submit("a", PROMPT, sampling=CONSTRAINED)
    bench.step()
    bench.loop.inbox.put(Cancel("a"))
    bench.step()
    preparer.work()
    assert bench.backend.samplers == []
    bench.assert_nothing_is_left()


def test_a_sampler_of_a_request_that_has_ended_is_closed() -> None:
    backend, preparer = Hooked(), SteppedPreparer()
    bench = Bench(backend, preparer=preparer)
    bench.submit("a", PROMPT, sampling=CONSTRAINED)
    bench.step()

    def cancel() -> None:
        bench.loop.inbox.put(Cancel("a"))
        bench.step()

    backend.before_sampler = cancel
    preparer.work()
    assert [sampler.closed for sampler in backend.samplers] == [False]
    bench.step()
    bench.assert_nothing_is_left()


def test_stopping_closes_the_samplers_that_are_being_made() -> None:
    backend, preparer = Hooked(), SteppedPreparer()
    bench = Bench(backend, preparer=preparer)
    bench.submit("a", PROMPT, sampling=CONSTRAINED)
    bench.submit("b", PROMPT, sampling=CONSTRAINED)
    bench.step()
    backend.before_sampler = bench.close
    preparer.work()
    bench.loop._samplers.collect()
    assert len(backend.samplers) == 1
    bench.assert_nothing_is_left()


def test_a_crash_can_be_traced_to_the_sampler_that_was_being_made() -> None:
    backend, preparer = Hooked(), SteppedPreparer()
    bench = Bench(backend, preparer=preparer)
    noted: list[tuple[int, ...]] = []
    backend.before_sampler = lambda: noted.append(bench.loop._activity.last().preparing)
    bench.submit("a", PROMPT, sampling=CONSTRAINED, number=17)
    bench.step()
    preparer.work()
    assert noted == [(17,)]
    assert bench.loop._activity.last().preparing == ()


def test_a_step_never_waits_for_the_preparing_thread() -> None:
    backend = Hooked()
    may_prepare = threading.Event()
    threads: list[str] = []

    def wait() -> None:
        threads.append(threading.current_thread().name)
        assert may_prepare.wait(10)

    backend.before_sampler = wait
    events: SimpleQueue[Delivery] = SimpleQueue()

    def deliver(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            events.put(delivery)

    loop = EngineLoop(
        backend,
        deliver,
        cache_opener(),
        queue_size=8,
        embedder=FakeEmbedder(),
        preparer=PreparingThreads(),
        activity=ActivityPage(new_page_file()),
    )
    engine = threading.Thread(target=loop.run)
    engine.start()
    for name, sampling in (("slow", CONSTRAINED), ("fast", Sampling(temperature=0))):
        request = GenerationRequest(
            id=name, prompt=tuple(PROMPT), boundaries=(), sampling=sampling, max_tokens=8
        )
        loop.inbox.put(request)
    finished: list[str] = []
    sampled: dict[str, list[int]] = {"slow": [], "fast": []}
    while len(finished) < 2:
        name, event = events.get(timeout=10)
        if isinstance(event, TokenSampled):
            sampled[name].append(event.token)
        elif isinstance(event, Finished):
            assert event.cause is StopCause.LENGTH
            finished.append(name)
            may_prepare.set()
    loop.inbox.put(Stop())
    engine.join()
    assert finished == ["fast", "slow"]
    assert sampled["slow"] == sampled["fast"] == expected_reply(PROMPT, 8)
    assert threads == ["prepare"]
    assert "prepare" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(("max_tokens", "n_left"), [(50, 50), (None, 212), (4_000, 212)])
def test_a_sampler_knows_how_many_tokens_the_limit_and_the_context_leave(
    max_tokens: int | None, n_left: int
) -> None:
    bench = Bench(FakeBackend(n_cells=512))
    bench.submit("a", PROMPT, max_tokens=max_tokens)
    bench.step()
    [sampler] = bench.backend.samplers
    assert sampler.n_left == n_left
