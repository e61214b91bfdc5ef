"""The unfinished requests of one engine: limit, cancellation and draining.

Both engines use it: the engine for GGUF files once for replies and once for embeddings, and
the engine for vLLM for replies. All of it runs on the event loop's thread.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from rekindle.errors import Overloaded, RekindleError, ShuttingDown
from rekindle.generation.events import Embedded, Finished

MAX_RETRY_SECONDS = 60
_LAST_EVENTS = (Finished, Embedded)
_ENDINGS = (*_LAST_EVENTS, RekindleError)

E = TypeVar("E")


class RequestStream(Generic[E]):
    """The events of one request. Its queue is unbounded: a reply is no longer than the context."""

    def __init__(self, request_id: str, queue: "RequestQueue[E]", *, background: bool) -> None:
        self.request_id = request_id
        self.background = background
        self.events: asyncio.Queue[E | RekindleError] = asyncio.Queue()
        self.started_at = time.monotonic()
        self._queue = queue

    async def __aiter__(self) -> AsyncGenerator[E]:
        try:
            while True:
                event = await self.events.get()
                if isinstance(event, RekindleError):
                    raise event
                yield event
                if isinstance(event, _LAST_EVENTS):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._queue.cancel(self)


class RequestQueue(Generic[E]):
    """`on_cancel` gets the id of each request that is cancelled before its last event."""

    def __init__(self, *, max_waiting: int, on_cancel: Callable[[str], None]) -> None:
        self._max_waiting = max_waiting
        self._on_cancel = on_cancel
        self._streams: dict[str, RequestStream[E]] = {}
        self._mean_seconds = 1.0  # of a request, for Retry-After
        self._is_closed = False
        self._is_drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_idle(self) -> bool:
        return all(each.background for each in self._streams.values())

    def open(self, request_id: str, *, n_slots: int, background: bool) -> RequestStream[E]:
        """Register a request. Raises ShuttingDown, or Overloaded when too many requests wait."""
        self.check_open()
        n_waiting = sum(not each.background for each in self._streams.values()) - n_slots
        if n_waiting >= self._max_waiting and not background:
            seconds = self._mean_seconds * (1 + n_waiting / max(n_slots, 1))
            raise Overloaded(
                f"Too many requests: {n_slots} running, {n_waiting} waiting.",
                retry_after_seconds=min(MAX_RETRY_SECONDS, max(1, round(seconds))),
            )
        assert request_id not in self._streams
        stream = RequestStream(request_id, self, background=background)
        self._streams[request_id] = stream
        return stream

    def check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("The server is shutting down.")

    def deliver(self, request_id: str, event: E | RekindleError) -> bool:
        """Hand an event to the request's reader. Return False if the request is not in this queue.

        The engine may still send events of a request that was cancelled a moment ago.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.events.put_nowait(event)
        if isinstance(event, _ENDINGS):
            self._remove(stream)
        return True

    def cancel(self, stream: RequestStream[E]) -> None:
        """Harmless after the end, and when repeated."""
        if stream.request_id in self._streams:
            self._remove(stream)
            self._on_cancel(stream.request_id)

    def close(self) -> None:
        """Refuse requests from now on. Any thread may call it."""
        self._is_closed = True

    async def drained(self) -> None:
        """Wait until a closed queue is empty."""
        if self._streams:
            await self._is_drained.wait()

    def end_background(self, event: E) -> None:
        """Cancel every background request; `event` is the last one its reader gets."""
        self._end([each for each in self._streams.values() if each.background], event)

    def cut(self) -> None:
        """Close the queue and cancel every request; its reader gets ShuttingDown."""
        self.close()
        self._end(list(self._streams.values()), ShuttingDown("The server is shutting down."))

    def _end(self, streams: list[RequestStream[E]], event: E | RekindleError) -> None:
        for stream in streams:
            stream.events.put_nowait(event)
            self.cancel(stream)

    def _remove(self, stream: RequestStream[E]) -> None:
        del self._streams[stream.request_id]
        if not stream.background:
            self._mean_seconds += 0.1 * (time.monotonic() - stream.started_at - self._mean_seconds)
        if self._is_closed and not self._streams:
            self._is_drained.set()
