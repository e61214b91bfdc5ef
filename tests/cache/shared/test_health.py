"""The circuit breaker around the shared store, on a clock of its own."""

import logging
import threading
from collections.abc import Iterator

import pytest

from rekindle.cache.shared.health import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    PING_SECONDS,
    StoreHealth,
)
from rekindle.errors import TierFailed

WAIT_SECONDS = 30  # for a thread that needs microseconds


class Scene:
    """A store whose pings are told what to answer, and a clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        self.ping_seconds = 0.0
        self.n_pings = 0
        self.n_pings_to_fail = 0
        self._may_ping = threading.Semaphore(0)
        self._changed = threading.Semaphore(0)
        self._pinged = threading.Semaphore(0)
        self.n_changes = 0
        self.health = StoreHealth(
            "redis://store",
            self._ping,
            ping_seconds=PING_SECONDS,
            now=lambda: self.now,
            wait=self._wait,
        )
        self.health.on_change(self._note_change)

    def let_ping(self, n_times: int = 1) -> None:
        """The wait before that many pings is over."""
        self._may_ping.release(n_times)

    def await_change(self) -> None:
        assert self._changed.acquire(timeout=WAIT_SECONDS)

    def await_ping(self) -> None:
        assert self._pinged.acquire(timeout=WAIT_SECONDS)

    def close(self) -> None:
        self.let_ping(1000)
        self.health.close()

    def _note_change(self) -> None:
        self.n_changes += 1
        self._changed.release()

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        assert self._may_ping.acquire(timeout=WAIT_SECONDS)
        self.now += seconds

    def _ping(self) -> None:
        self.n_pings += 1
        self._pinged.release()
        self.now += self.ping_seconds
        if self.n_pings_to_fail:
            self.n_pings_to_fail -= 1
            raise TierFailed("still down")


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_one_failure_alone_leaves_the_store_in_use(scene: Scene) -> None:
    scene.health.note_failure("a timeout")
    assert scene.health.is_well
    assert scene.health.trouble is None


def test_the_second_failure_in_a_row_opens_the_breaker(scene: Scene) -> None:
    scene.health.note_failure("a timeout")
    scene.health.note_failure("no answer in 5 ms")
    assert not scene.health.is_well
    assert scene.health.trouble == "no answer in 5 ms"


def test_a_success_between_two_failures_keeps_it_closed(scene: Scene) -> None:
    scene.health.note_failure("a timeout")
    scene.health.note_success()
    scene.health.note_failure("a timeout")
    assert scene.health.is_well


def test_an_answer_that_came_too_late_does_not_count_as_a_success(scene: Scene) -> None:
    asked_at = scene.now
    scene.now += 1
    scene.health.note_failure("no answer in 5 ms")
    scene.health.note_success(began_at=asked_at)
    scene.health.note_failure("no answer in 5 ms")
    assert not scene.health.is_well


def test_a_refused_connection_opens_it_at_once(scene: Scene) -> None:
    scene.health.note_failure("connection refused", is_final=True)
    assert scene.health.trouble == "connection refused"


def test_a_ping_that_answers_closes_it_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.n_pings_to_fail = 3
    scene.health.note_failure("connection refused", is_final=True)
    scene.await_change()
    scene.let_ping(4)
    scene.await_change()
    assert scene.health.is_well
    assert scene.waits == [0.5, 1.0, 2.0, 4.0]
    assert caplog.messages == [
        "cache: shared store down, continuing with local tiers: store=redis://store:"
        " connection refused",
        "cache: shared store up again: store=redis://store after=8s",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_failures_of_an_open_breaker_are_not_reported_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        scene.health.note_failure("connection refused", is_final=True)
    assert scene.n_changes == 1
    assert len(caplog.messages) == 1


def test_the_wait_between_pings_grows_to_a_limit(scene: Scene) -> None:
    scene.n_pings_to_fail = 9
    scene.health.note_failure("connection refused", is_final=True)
    scene.await_change()
    scene.let_ping(10)
    scene.await_change()
    assert scene.waits[0] == MIN_WAIT_SECONDS
    assert scene.waits[-4:] == [MAX_WAIT_SECONDS] * 4


def test_a_ping_that_takes_too_long_has_failed(scene: Scene) -> None:
    scene.ping_seconds = PING_SECONDS * 1.5
    scene.health.check()
    scene.await_change()
    assert scene.health.trouble == "a ping took 0.38 s"
    scene.let_ping(2)
    for _ in range(3):
        scene.await_ping()
    assert not scene.health.is_well


def test_only_real_work_that_succeeded_makes_the_next_wait_short(scene: Scene) -> None:
    for _ in range(2):  # pings answer, but nothing else does
        scene.health.note_failure("connection refused", is_final=True)
        scene.await_change()
        scene.let_ping()
        scene.await_change()
    assert scene.waits == [0.5, 1.0]
    scene.health.note_success()
    scene.health.note_failure("connection refused", is_final=True)
    scene.await_change()
    scene.let_ping()
    scene.await_change()
    assert scene.waits == [0.5, 1.0, 0.5]


def test_a_store_that_answers_at_the_start_is_well(scene: Scene) -> None:
    scene.health.check()
    assert scene.health.is_well
    assert scene.n_changes == 0


def test_a_removed_listener_is_not_called(scene: Scene) -> None:
    told: list[str] = []
    end = scene.health.on_change(lambda: told.append("change"))
    end()
    end()
    scene.health.note_failure("connection refused", is_final=True)
    scene.await_change()
    assert told == []


def test_a_closed_breaker_has_no_thread_and_never_opens_again() -> None:
    scene = Scene()
    before = set(threading.enumerate())
    scene.health.note_failure("connection refused", is_final=True)
    scene.close()
    assert set(threading.enumerate()) <= before
    other = Scene()
    other.close()
    other.health.note_failure("connection refused", is_final=True)
    assert other.health.is_well
