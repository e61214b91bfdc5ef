"""Requests with max_tokens 0: the prompt is evaluated and kept, and nothing is sampled."""

import pytest

from rekindle.generation.events import CachedSpan, CacheSource, Finished, PromptEvaluated, StopCause
from rekindle.generation.model_state import ModelClass
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench

ALL_CLASSES = list(ModelClass)
ENDED = Finished(StopCause.LENGTH)


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


@pytest.mark.parametrize("model_class", ALL_CLASSES)
@pytest.mark.parametrize("n_prompt", [1, 2, 64, 700])
def test_the_prompt_is_computed_and_no_sampler_is_made(
    model_class: ModelClass, n_prompt: int
) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    asked = bench.ask("a", text(1, n_prompt), 0)
    assert asked.n_computed == n_prompt
    assert [type(event) for event in bench.events("a")[-2:]] == [PromptEvaluated, Finished]
    assert bench.events("a")[-1] == ENDED
    assert asked.evaluated.n_cached == 0
    assert bench.backend.samplers == []
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_the_next_request_finds_an_evaluated_prompt_live(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    bench.ask("warm", text(1, 700), 0)
    asked = bench.ask("a", text(1, 700) + text(5_000, 20), 3)
    assert asked.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, 700),)
    assert asked.n_computed == 20 + 2
    assert asked.tokens == expected_reply(text(1, 700) + text(5_000, 20), 3)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_the_next_request_finds_an_evaluated_prompt_stored(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=1))
    bench.ask("warm", text(1, 700), 0)
    bench.ask("other", text(90_000, 300), 1)
    asked = bench.ask("a", text(1, 700) + text(5_000, 20), 1)
    assert asked.evaluated.spans == (CachedSpan(CacheSource.MEMORY, 0, 700),)
    assert asked.n_computed == 20


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_evaluating_a_live_prompt_costs_nothing(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=2))
    bench.ask("warm", text(1, 700), 0)
    again = bench.ask("again", text(1, 700), 0)
    assert again.n_computed == 0
    assert again.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, 700),)
    assert bench.events("again")[-1] == ENDED
    assert bench.ask("a", text(1, 720), 1).n_computed == 20


def test_warming_a_prompt_leaves_the_reply_behind_it_live() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    reply = bench.ask("a", text(1, 700), 50).tokens
    assert bench.ask("warm", text(1, 700), 0).n_computed == 0
    following = text(1, 700) + reply + text(5_000, 20)
    assert bench.ask("b", following, 1).n_computed == 1 + 20


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_evaluating_a_stored_prompt_restores_it(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class, n_slots=1))
    bench.ask("warm", text(1, 700), 0)
    bench.ask("other", text(90_000, 300), 1)
    again = bench.ask("again", text(1, 700), 0)
    assert again.n_computed <= 64
    assert again.evaluated.n_cached == 700 - again.n_computed
    assert bench.ask("a", text(1, 720), 1).n_computed == 20


def test_evaluating_beside_streams_changes_none_of_their_tokens() -> None:
    bench = Bench(FakeBackend(n_ubatch=128))
    bench.submit("stream", text(1, 20), 40)
    bench.submit("warm", text(5_000, 500), 0)
    bench.submit("other", text(9_000, 30), 7)
    bench.run()
    assert bench.tokens("stream") == expected_reply(text(1, 20), 40)
    assert bench.tokens("other") == expected_reply(text(9_000, 30), 7)
    assert (bench.tokens("warm"), bench.events("warm")[-1]) == ([], ENDED)


def test_evaluating_without_the_cache_computes_all_and_keeps_nothing() -> None:
    bench = Bench(FakeBackend())
    assert bench.ask("warm", text(1, 300), 0, cache_prompt=False).n_computed == 300
    assert bench.backend.n_cells_used == 0


def test_a_request_in_single_flight_starts_where_the_evaluation_ends() -> None:
    bench = Bench(FakeBackend(n_ubatch=128))
    bench.submit("warm", text(1, 500), 0)
    bench.step()
    bench.submit("a", text(1, 540), 2)
    bench.run()
    assert bench.backend.n_computed == 540 + 1
    assert bench.tokens("a") == expected_reply(text(1, 540), 2)
