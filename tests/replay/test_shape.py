"""The order and concurrency of requests in each shape, on a simulated clock."""

import heapq
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import StartupError
from rekindle.replay.shape import schedule_of, shape_of
from rekindle.replay.traffic import ReplayRequest, Traffic

EVERY_SHAPE = ("recorded", "sequential", "interleaved", "concurrent:1", "concurrent:3")


@dataclass(frozen=True)
class Ran:
    index: int
    start: float
    stop: float


def request(
    started: float | None = None,
    ended: float | None = None,
    conversation: str = "",
    source: int = 0,
) -> ReplayRequest:
    path = "/v1/completions"
    return ReplayRequest("", path, {}, (), conversation, source, started, ended)


def replayed(requests: list[ReplayRequest], shape: str, durations: list[int]) -> list[Ran]:
    """Each takes its duration; in the order they started."""
    schedule = schedule_of(requests, shape)
    now = 0.0
    ran: list[Ran] = []
    running: list[tuple[float, int]] = []
    while True:
        for index in schedule.take_ready():
            ran.append(Ran(index, now, now + durations[index]))
            heapq.heappush(running, (ran[-1].stop, index))
        if not running:
            return ran
        now, index = heapq.heappop(running)
        schedule.end(index)


def most_at_once(spans: list[tuple[float, float]]) -> int:
    return max(sum(one <= start < other for one, other in spans) for start, _ in spans)


@st.composite
def recordings(draw: st.DrawFn) -> list[ReplayRequest]:
    """Whole seconds, so that ends and starts often coincide; some lengths are 0."""
    times = draw(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 5), st.sampled_from("abc")),
            min_size=1,
            max_size=12,
        )
    )
    return [request(t, t + n, name) for t, n, name in sorted(times, key=lambda each: each[0])]


lengths = st.lists(st.integers(1, 9), min_size=12, max_size=12)


@given(recordings(), lengths)
def test_a_request_starts_after_all_that_had_ended_before_it_in_the_recording(
    requests: list[ReplayRequest], durations: list[int]
) -> None:
    ran = {each.index: each for each in replayed(requests, "recorded", durations)}
    assert ran.keys() == set(range(len(requests)))
    for index, later in enumerate(requests):
        for before in range(index):
            ended, started = requests[before].ended, later.started
            assert ended is not None
            assert started is not None
            if ended <= started:
                assert ran[before].stop <= ran[index].start


@given(recordings(), lengths)
def test_never_more_at_once_than_were_recorded_at_once(
    requests: list[ReplayRequest], durations: list[int]
) -> None:
    # An end and a start of the same second: the end came first, unless it is its own.
    spans = [
        (each.started or 0.0, max(each.ended or 0.0, (each.started or 0.0) + 0.5))
        for each in requests
    ]
    ran = replayed(requests, "recorded", durations)
    at_once = most_at_once([(each.start, each.stop) for each in ran])
    assert at_once <= most_at_once(spans)


def test_concurrent_requests_run_concurrently_again_without_think_time() -> None:
    requests = [request(0, 10), request(9, 20), request(100, 101), request(100, 101)]
    ran = replayed(requests, "recorded", [5, 7, 1, 1])
    assert [(each.start, each.stop) for each in ran] == [(0, 5), (0, 7), (7, 8), (7, 8)]


def test_a_cut_off_request_delays_only_the_next_file() -> None:
    requests = [request(0, None), request(5, 6), request(0, 1, source=1)]
    ran = replayed(requests, "recorded", [9, 1, 1])
    assert [each.start for each in ran] == [0, 0, 9]


@pytest.mark.parametrize("shape", EVERY_SHAPE)
@given(recordings(), lengths)
def test_every_request_is_sent_once_and_a_conversation_keeps_its_order(
    shape: str, requests: list[ReplayRequest], durations: list[int]
) -> None:
    order = [each.index for each in replayed(requests, shape, durations)]
    assert sorted(order) == list(range(len(requests)))
    for name in "abc":
        own = [index for index in order if requests[index].conversation == name]
        assert own == sorted(own)


@given(recordings(), lengths)
def test_concurrent_runs_as_many_conversations_as_it_may_and_one_request_of_each(
    requests: list[ReplayRequest], durations: list[int]
) -> None:
    ran = replayed(requests, "concurrent:2", durations)
    spans = [(each.start, each.stop) for each in ran]
    n_conversations = len({each.conversation for each in requests})
    assert most_at_once(spans) == min(2, n_conversations)
    for name in "abc":
        own = [each for each in ran if requests[each.index].conversation == name]
        assert all(one.stop <= other.start for one, other in pairwise(own))


def test_interleaved_takes_the_conversations_in_turn() -> None:
    requests = [request(conversation=name) for name in "aaabbc"]
    order = [each.index for each in replayed(requests, "interleaved", [1] * 6)]
    assert order == [0, 3, 5, 1, 4, 2]


def test_the_shape_is_recorded_where_times_are_known() -> None:
    timed, untimed = Traffic((request(0, 1),), {}), Traffic((request(),), {})
    assert shape_of(timed, None) == "recorded"
    assert shape_of(untimed, None) == "sequential"
    assert shape_of(untimed, "concurrent 4") == shape_of(untimed, "concurrent:4") == "concurrent:4"
    with pytest.raises(StartupError, match="not every request has a time"):
        shape_of(untimed, "recorded")
    for wrong in ("concurrent", "concurrent:0", "parallel"):
        with pytest.raises(StartupError, match="--shape"):
            shape_of(timed, wrong)
