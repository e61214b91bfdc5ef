"""Embeddings beside sequences: their order, their errors, and that no slot is touched."""

import pytest

from rekindle.engine import embedding_queue
from rekindle.engine.orders import Cancel
from rekindle.errors import EngineError, InvalidRequest, ShuttingDown
from rekindle.generation.events import Embedded, Finished, StopCause
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.fake_embedder import FakeEmbedder, vector_of
from tests.support.loop_driver import Bench

FIRST, SECOND, THIRD = tuple(range(1, 11)), (20, 21), tuple(range(30, 36))


def embedded(*inputs: tuple[int, ...]) -> Embedded:
    return Embedded(tuple(map(vector_of, inputs)))


def test_inputs_are_embedded_one_after_another_in_order_of_arrival() -> None:
    embedder = FakeEmbedder(n_part=4)
    bench = Bench(FakeBackend(), embedder=embedder)
    bench.embed("a", FIRST, SECOND)
    bench.embed("b", THIRD)
    bench.run()
    assert bench.said == [("a", embedded(FIRST, SECOND)), ("b", embedded(THIRD))]
    assert embedder.journal == [FIRST[:4], FIRST[4:8], FIRST[8:], SECOND, THIRD[:4], THIRD[4:]]


def test_a_stream_gets_a_token_with_every_part_of_an_embedding() -> None:
    backend = FakeBackend()
    n_batches_before_part: list[int] = []
    embedder = FakeEmbedder(
        n_part=1, on_part=lambda: n_batches_before_part.append(len(backend.batches))
    )
    bench = Bench(backend, embedder=embedder)
    bench.submit("stream", range(1, 11), max_tokens=40)
    bench.step()
    bench.embed("a", FIRST)
    bench.embed("b", FIRST)
    while bench.loop.status().n_running:
        before = len(bench.tokens("stream"))
        bench.step()
        assert len(bench.tokens("stream")) == before + 1
    assert bench.events("a") == bench.events("b") == [embedded(FIRST)]
    assert n_batches_before_part == sorted(set(n_batches_before_part)), "two parts in one step"


def test_no_token_waits_for_an_embedding() -> None:
    n_said_before_part: list[int] = []
    embedder = FakeEmbedder(n_part=1)
    bench = Bench(FakeBackend(), embedder=embedder)
    embedder.on_part = lambda: n_said_before_part.append(len(bench.tokens("stream")))
    bench.submit("stream", range(1, 11), max_tokens=40)
    while not (n_said := len(bench.tokens("stream"))):
        bench.step()
    bench.embed("a", FIRST)
    bench.run()
    assert n_said_before_part == list(range(n_said + 1, n_said + 1 + len(FIRST)))


def test_an_embedding_between_two_turns_changes_nothing_about_the_second() -> None:
    """The same calls to the backend, and the same tokens cached."""

    def second_turn(*, with_embedding: bool) -> tuple[object, ...]:
        backend = FakeBackend(n_slots=1)
        bench = Bench(backend, embedder=FakeEmbedder(n_ctx=4096))
        first = bench.ask("first", range(1, 601))
        if with_embedding:
            # The same tokens as the conversation's, and others.
            bench.embed("e", tuple(range(1, 601)), FIRST)
            bench.run()
            assert isinstance(bench.events("e")[-1], Embedded)
        second = bench.ask("second", [*range(1, 601), *first.tokens, 7, 8, 9])
        bench.assert_nothing_is_left()
        calls = (backend.batches, backend.exports, backend.imports, backend.copies, backend.trims)
        return second.tokens, second.n_computed, second.evaluated.n_cached, calls

    assert second_turn(with_embedding=True) == second_turn(with_embedding=False)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (EngineError("no room"), EngineError),
        (InvalidRequest("makes none"), InvalidRequest),
        (ValueError("a bug"), EngineError),
    ],
)
def test_a_failed_embedding_ends_its_request_and_nothing_else(
    failure: Exception, told: type[Exception]
) -> None:
    embedder = FakeEmbedder()
    bench = Bench(FakeBackend(), embedder=embedder)
    bench.submit("stream", range(1, 11), max_tokens=12)
    bench.step()
    embedder.failures.append(failure)
    bench.embed("bad", FIRST, SECOND)
    bench.embed("good", SECOND)
    bench.run()
    [error] = bench.events("bad")
    assert type(error) is told
    assert bench.events("good") == [embedded(SECOND)]
    assert bench.tokens("stream") == expected_reply(range(1, 11), 12)
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("n_steps_before", [0, 1, 3])
def test_a_cancelled_embedding_sends_no_event_and_frees_the_embedder(n_steps_before: int) -> None:
    embedder = FakeEmbedder(n_part=1)
    bench = Bench(FakeBackend(), embedder=embedder)
    bench.embed("gone", FIRST)
    bench.embed("next", SECOND)
    for _ in range(n_steps_before):
        bench.step()
    bench.loop.inbox.put(Cancel("gone"))
    bench.run()
    assert bench.said == [("next", embedded(SECOND))]
    assert len(embedder.journal) == n_steps_before + 2


def test_stopping_the_engine_fails_embeddings() -> None:
    bench = Bench(FakeBackend(), embedder=FakeEmbedder(n_part=1))
    bench.embed("runs", FIRST)
    bench.embed("waits", FIRST)
    bench.step()
    bench.close()
    for name in ("runs", "waits"):
        [error] = bench.events(name)
        assert isinstance(error, ShuttingDown)


def test_an_embedding_stops_background_requests_and_blocks_new_ones() -> None:
    bench = Bench(FakeBackend(), embedder=FakeEmbedder(n_part=1))
    bench.submit("ahead", range(1, 600), max_tokens=0, background=True)
    bench.step()
    bench.embed("a", FIRST)
    bench.submit("another", range(1, 600), max_tokens=0, background=True)
    bench.step()
    for name in ("ahead", "another"):
        assert bench.events(name)[-1] == Finished(StopCause.YIELDED)


def test_the_embedder_frees_its_memory_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedder = FakeEmbedder()
    bench = Bench(FakeBackend(), embedder=embedder)
    bench.embed("a", SECOND)
    bench.run()
    bench.step()
    assert embedder.journal == [SECOND]
    monkeypatch.setattr(embedding_queue, "REST_SECONDS", 0.0)
    bench.embed("b", SECOND)
    bench.run()
    bench.step()
    assert embedder.journal == [SECOND, SECOND, "rest"]
