"""The event feed of the dashboard: a snapshot each second, and one event per finished request.

One sampler reads the engines for all readers, and stops while there are none. A reader that
falls too far behind is disconnected.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator

from pydantic_core import to_json

from rekindle.api.dashboard.bodies import Hour
from rekindle.api.dashboard.history import BUCKET_SECONDS, HourHistory
from rekindle.api.dashboard.views import request_seen, snapshot_of
from rekindle.api.models import Models
from rekindle.generation.forgetting import Tombstone
from rekindle.observe.request_record import RequestRecord

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
MAX_BEHIND = 64  # frames queued for one reader; picked


class FeedReader:
    """The queued frames of one connection, which sees one namespace; None: all of them."""

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.is_cut = False
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self._writer: asyncio.Task[object] | None = None

    def put(self, frame: bytes | None) -> None:
        """Queue a frame. None ends the stream."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.is_cut = True
            if self._writer is not None:
                self._writer.cancel()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the frames to one task, which is cancelled when it falls behind."""
        self._writer = asyncio.current_task()
        while (frame := await self._frames.get()) is not None:
            yield frame


class Feed:
    def __init__(
        self, models: Models, history: HourHistory, *, sample_seconds: float = SAMPLE_SECONDS
    ) -> None:
        self._models = models
        self._history = history
        self._sample_seconds = sample_seconds
        self._readers: set[FeedReader] = set()
        self._sampler: asyncio.Task[None] | None = None
        self._last_frames: dict[str | None, bytes] = {}  # by namespace
        self._sampled_at = -math.inf  # a monotonic clock may start at 0
        self._is_closed = False
        history.listen(self._send_request)

    def join(self, namespace: str | None) -> FeedReader:
        reader = FeedReader(namespace)
        reader.put(self._hour(namespace))
        if self._is_closed:
            reader.put(None)
            return reader
        if namespace in self._last_frames:
            reader.put(self._last_frames[namespace])
        self._readers.add(reader)
        if self._sampler is None:
            self._sampler = asyncio.create_task(self._sample())
        return reader

    def leave(self, reader: FeedReader) -> None:
        self._readers.discard(reader)
        if not self._readers and self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
            self._last_frames = {}  # outdated for the next reader

    def forget(self, tombstone: Tombstone) -> int:
        """Drop the requests that the deletion covers, and the last snapshots. Return how many."""
        self._last_frames = {}
        return self._history.forget(tombstone)

    def close(self) -> None:
        """End all streams: an open page must not delay the shutdown."""
        self._is_closed = True
        for reader in list(self._readers):
            reader.put(None)

    async def _sample(self) -> None:
        while True:
            due = self._sampled_at + self._sample_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._sampled_at = time.monotonic()
            await self._models.refresh()
            self._last_frames = {
                each: _frame("snapshot", snapshot_of(self._models, self._history, each))
                for each in {reader.namespace for reader in self._readers}
            }
            for reader in self._readers:
                reader.put(self._last_frames[reader.namespace])

    def _send_request(self, record: RequestRecord) -> None:
        readers = [each for each in self._readers if each.namespace in (None, record.namespace)]
        if readers:
            frame = _frame("request", request_seen(record))
            for reader in readers:
                reader.put(frame)

    def _hour(self, namespace: str | None) -> bytes:
        hour = Hour(
            bucket_seconds=BUCKET_SECONDS,
            buckets=self._history.buckets(namespace),
            requests=[request_seen(each) for each in self._history.requests(namespace)],
        )
        return _frame("hour", hour)


def _frame(event: str, body: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), to_json(body))
