"""When the head of a stream goes out, and what comes with it; no socket, no clock."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from starlette.types import Message

from rekindle.api.replies import Replies, Sink
from rekindle.api.sse import KEEP_ALIVE, EventStream
from rekindle.chat.reply.events import ReplyEvent, ReplyProgress, ReplyText
from rekindle.errors import DecodeFailed
from rekindle.generation.events import NO_SPANS, CacheSource

FOUND = ReplyProgress(10, 10, 4, 0.5, NO_SPANS.extended(CacheSource.DISK, 4))
NEVER = 3600.0


class Numbered:
    """An encoder whose frames tell the order in which they were made."""

    def __init__(self) -> None:
        self._n = 0

    def begin(self) -> bytes:
        return self._frame("begin")

    def encode(self, index: int, event: ReplyEvent) -> bytes:
        return self._frame(f"event of {index}")

    def fail(self, error_body: bytes) -> bytes:
        return self._frame("fail")

    def end(self) -> bytes:
        return self._frame("end")

    def _frame(self, name: str) -> bytes:
        self._n += 1
        return f"{self._n} {name}".encode()


Pour = Callable[[Sink], Coroutine[Any, Any, None]]


class PouredReplies:
    def __init__(self, pour: Pour) -> None:
        self.pour = pour
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Client:
    """Reads one stream, and leaves when it is told to."""

    def __init__(self, pour: Pour, *, keep_alive_seconds: float = NEVER) -> None:
        self.sent: list[Message] = []
        self.leaves = asyncio.Event()
        self.has_sign_of_life = asyncio.Event()
        self.replies = PouredReplies(pour)
        self._stream = EventStream(
            cast(Replies, self.replies),
            Numbered(),
            keep_alive_seconds=keep_alive_seconds,
            keep_alive=KEEP_ALIVE,
        )

    async def read(self) -> None:
        scope = {"type": "http", "request_id": "id", "path": "/v1/chat/completions"}
        await self._stream(scope, self._receive, self._send)

    @property
    def cache_header(self) -> str:
        [value] = [v for k, v in self.sent[0]["headers"] if k == b"x-rekindle-cache"]
        assert isinstance(value, bytes)
        return value.decode()

    @property
    def frames(self) -> list[str]:
        assert [each["type"] for each in self.sent].count("http.response.start") == 1
        assert self.sent[0]["type"] == "http.response.start"
        return [each["body"].decode() for each in self.sent[1:]]

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await asyncio.sleep(0)  # as a socket that is busy
        self.sent.append(message)
        if message.get("body") == KEEP_ALIVE:
            self.has_sign_of_life.set()


def test_the_head_waits_for_the_first_event_and_has_its_cache_report() -> None:

    async def run() -> None:
        async def pour(sink: Sink) -> None:
            for _ in range(10):
                await asyncio.sleep(0)
            assert client.sent == []
            await sink(0, FOUND)
            await sink(0, ReplyText("a"))

        client = Client(pour)
        await client.read()
        assert client.cache_header == "hit=4/10 from=disk"
        assert client.frames == ["1 begin", "2 event of 0", "3 event of 0", "4 end"]

    asyncio.run(run())


def test_a_quiet_stream_begins_when_it_is_time_for_a_sign_of_life() -> None:
    async def run() -> None:
        begun = asyncio.Event()

        async def pour(sink: Sink) -> None:
            await begun.wait()
            await sink(0, FOUND)

        client = Client(pour, keep_alive_seconds=0.001)
        reading = asyncio.create_task(client.read())
        await client.has_sign_of_life.wait()
        begun.set()
        await reading
        assert client.cache_header == "pending"
        assert client.frames[0] == "1 begin"
        assert client.frames[1] == ": keep-alive\n\n"
        assert client.frames[-1] == "3 end"

    asyncio.run(run())


def test_an_error_before_the_first_event_is_sent_in_the_stream() -> None:
    async def run() -> None:
        async def pour(_: Sink) -> None:
            raise DecodeFailed("llama.cpp ran out of memory.")

        client = Client(pour)
        await client.read()
        assert client.sent[0]["status"] == 200
        assert client.frames == ["1 begin", "2 fail"]

    asyncio.run(run())


def test_replies_that_come_at_once_begin_one_stream() -> None:
    async def run() -> None:
        async def pour(sink: Sink) -> None:
            await asyncio.gather(sink(0, FOUND), sink(1, ReplyText("a")))

        client = Client(pour)
        await client.read()
        assert client.cache_header == "hit=4/10 from=disk"
        assert client.frames[0] == "1 begin"
        assert sorted(frame[2:] for frame in client.frames) == [
            "begin",
            "end",
            "event of 0",
            "event of 1",
        ]

    asyncio.run(run())


def test_a_reply_that_fails_while_another_one_begins_does_not_begin_the_stream_twice() -> None:
    async def run() -> None:
        async def pour(sink: Sink) -> None:
            first = asyncio.ensure_future(sink(0, FOUND))
            await asyncio.sleep(0)
            first.cancel()
            raise DecodeFailed("llama.cpp ran out of memory.")

        client = Client(pour)
        await client.read()
        assert client.frames == ["1 begin", "2 fail"]

    asyncio.run(run())


def test_a_client_that_leaves_before_the_first_event_is_noticed() -> None:
    async def run() -> None:
        waits = asyncio.Event()

        async def pour(_: Sink) -> None:
            waits.set()
            await asyncio.Event().wait()

        client = Client(pour)
        reading = asyncio.create_task(client.read())
        await waits.wait()
        client.leaves.set()
        await reading
        assert client.replies.is_closed
        assert client.sent[0]["status"] == 499  # nobody reads it but the counters

    asyncio.run(run())
