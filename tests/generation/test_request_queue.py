"""The queue of requests that both engines use: refusal, cancellation, drain."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rekindle.errors import Overloaded, ShuttingDown
from rekindle.generation.events import Finished, StopCause, TokenEvent, TokenSampled
from rekindle.generation.request_queue import MAX_RETRY_SECONDS, RequestQueue, RequestStream

END = Finished(StopCause.LENGTH)


class Played:
    """A queue and the ids that it has cancelled."""

    def __init__(self, *, max_waiting: int = 8) -> None:
        self.cancelled: list[str] = []
        self.queue: RequestQueue[TokenEvent] = RequestQueue(
            max_waiting=max_waiting, on_cancel=self.cancelled.append
        )

    def open(self, name: str, *, background: bool = False) -> RequestStream[TokenEvent]:
        return self.queue.open(name, n_slots=1, background=background)


def play(scenario: Callable[[Played], Awaitable[None]], *, max_waiting: int = 8) -> None:
    async def main() -> None:
        await scenario(Played(max_waiting=max_waiting))

    asyncio.run(main())


def test_a_stream_ends_with_its_last_event_and_cancels_nothing() -> None:
    async def scenario(played: Played) -> None:
        stream = played.open("a")
        for event in (TokenSampled(1), END):
            assert played.queue.deliver("a", event)
        assert [event async for event in stream] == [TokenSampled(1), END]
        assert not played.queue.deliver("a", TokenSampled(2)), "it has ended"
        assert played.cancelled == []

    play(scenario)


def test_requests_beyond_the_bound_are_refused_and_background_ones_do_not_count() -> None:
    async def scenario(played: Played) -> None:
        for name in ("runs", "waits"):
            played.open(name)
        for name in ("b1", "b2"):
            played.open(name, background=True)
        with pytest.raises(Overloaded, match="1 running, 1 waiting") as refusal:
            played.open("too many")
        assert 1 <= refusal.value.retry_after_seconds <= MAX_RETRY_SECONDS

    play(scenario, max_waiting=1)


def test_a_closed_queue_refuses_requests_and_is_drained_when_the_last_one_is_cancelled() -> None:
    async def scenario(played: Played) -> None:
        stream = played.open("a")
        played.queue.close()
        with pytest.raises(ShuttingDown):
            played.open("b")
        waiting = asyncio.create_task(played.queue.drained())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.cancel()
        stream.cancel()
        await asyncio.wait_for(waiting, 10)
        assert played.cancelled == ["a"]

    play(scenario)


def test_a_cut_ends_every_request_with_an_error_and_cancels_it_in_the_engine() -> None:
    async def scenario(played: Played) -> None:
        streams = [played.open(name) for name in ("a", "b")]
        played.queue.cut()
        assert played.cancelled == ["a", "b"]
        for stream in streams:
            with pytest.raises(ShuttingDown):
                await anext(aiter(stream))

    play(scenario)
