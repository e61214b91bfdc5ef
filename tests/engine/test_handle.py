"""The engine from the event loop's side: real threads, a fake backend."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rekindle.engine import handle as handle_module
from rekindle.engine.handle import EngineHandle
from rekindle.errors import EngineError, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from rekindle.generation.events import TokenSampled, TokenStream
from rekindle.generation.request import GenerationRequest, Grammar, GrammarKind, Sampling
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.fake_embedder import FakeEmbedder


def request(
    name: str,
    *,
    n_prompt: int = 20,
    max_tokens: int | None = 8,
    start: int = 1,
    background: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt=tuple(range(start, start + n_prompt)),
        boundaries=(),
        sampling=Sampling(),
        max_tokens=max_tokens,
        background=background,
    )


def new_handle(backend: FakeBackend, *, queue_size: int) -> EngineHandle:
    return EngineHandle(backend, cache_opener(), queue_size=queue_size, embedder=FakeEmbedder())


@asynccontextmanager
async def running(backend: FakeBackend, *, queue_size: int = 8) -> AsyncIterator[EngineHandle]:
    handle = new_handle(backend, queue_size=queue_size)
    handle.start()
    try:
        yield handle
    finally:
        await asyncio.to_thread(handle.close)


async def reply(stream: TokenStream) -> list[int]:
    return [event.token async for event in stream if isinstance(event, TokenSampled)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the engine thread gives no event to wait for
            await asyncio.sleep(0.001)


def test_concurrent_requests_each_get_their_own_reply() -> None:
    async def scenario() -> None:
        async with running(FakeBackend(n_slots=3), queue_size=32) as handle:
            names = [f"r{index}" for index in range(20)]
            streams = [
                handle.submit(request(name, start=100 * index, n_prompt=5 + index))
                for index, name in enumerate(names)
            ]
            replies = await asyncio.gather(*map(reply, streams))
            for index, tokens in enumerate(replies):
                prompt = range(100 * index, 100 * index + 5 + index)
                assert tokens == expected_reply(list(prompt), 8)

    asyncio.run(scenario())


def test_leaving_a_stream_early_frees_its_slot() -> None:
    async def scenario() -> None:
        backend = FakeBackend(n_slots=1)
        async with running(backend) as handle:
            stream = handle.submit(request("a", max_tokens=None))
            events = aiter(stream)
            await anext(events)
            await events.aclose()
            await until(lambda: handle.status().n_running == 0)
            assert handle.status().n_running == 0
            assert await reply(handle.submit(request("b"))) == expected_reply(range(1, 21), 8)

    asyncio.run(scenario())


def test_cancelling_twice_or_after_the_end_is_harmless() -> None:
    async def scenario() -> None:
        async with running(FakeBackend()) as handle:
            stream = handle.submit(request("a"))
            await reply(stream)
            stream.cancel()
            stream.cancel()
            assert len(await reply(handle.submit(request("b")))) == 8

    asyncio.run(scenario())


def test_a_full_queue_is_refused_with_a_time_to_retry() -> None:
    async def scenario() -> None:
        async with running(FakeBackend(n_slots=1), queue_size=2) as handle:
            streams = [handle.submit(request(f"r{i}", max_tokens=None)) for i in range(3)]
            with pytest.raises(Overloaded) as refusal:
                handle.submit(request("too many"))
            assert 1 <= refusal.value.retry_after_seconds <= 60
            for stream in streams:
                stream.cancel()
            assert len(await reply(handle.submit(request("now there is room")))) == 8

    asyncio.run(scenario())


@pytest.mark.parametrize(("n_prompt", "fits"), [(63, True), (64, False), (65, False)])
def test_a_prompt_must_leave_room_for_one_token(n_prompt: int, *, fits: bool) -> None:
    """Anything shorter runs whole."""

    async def scenario() -> None:
        async with running(FakeBackend(n_slots=1, n_cells=64)) as handle:
            if fits:
                stream = handle.submit(request("a", n_prompt=n_prompt, max_tokens=32_000))
                assert len(await reply(stream)) == 1
                return
            with pytest.raises(PromptTooLong) as refusal:
                handle.submit(request("a", n_prompt=n_prompt))
            assert (refusal.value.n_prompt, refusal.value.n_ctx) == (n_prompt, 64)

    asyncio.run(scenario())


def test_shutdown_lets_a_short_reply_end_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        async with running(FakeBackend()) as handle:
            stream = handle.submit(request("a"))
            ending = asyncio.create_task(handle.shut_down(grace_seconds=30))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                handle.submit(request("b"))
            assert len(await reply(stream)) == 8
            await ending

    asyncio.run(scenario())


def test_shutdown_fails_requests_that_outlast_the_grace_time() -> None:
    async def scenario() -> None:
        # An endless reply: nothing but the cut can end it.
        backend = FakeBackend(n_cells=10**9)
        async with running(backend) as handle:
            stream = handle.submit(request("a", max_tokens=None))
            ending = asyncio.create_task(handle.shut_down(grace_seconds=0.05))
            with pytest.raises(ShuttingDown):
                await reply(stream)
            await ending

    asyncio.run(scenario())


def test_closing_the_engine_ends_every_stream_with_an_error() -> None:
    async def scenario() -> None:
        handle = new_handle(FakeBackend(n_cells=10**9), queue_size=1)
        handle.start()
        stream = handle.submit(request("a", max_tokens=None))
        await asyncio.to_thread(handle.close)
        with pytest.raises(ShuttingDown):
            await reply(stream)

    asyncio.run(scenario())


def test_an_exception_in_a_step_fails_its_requests_and_the_engine_continues() -> None:
    class Exploding(FakeBackend):
        fuse = 3

        def decode(self, *batch: list[int]) -> None:
            self.fuse -= 1
            if self.fuse == 0:
                raise RuntimeError("boom")
            super().decode(*batch)

    async def scenario() -> None:
        async with running(Exploding()) as handle:
            with pytest.raises(EngineError, match="boom"):
                await reply(handle.submit(request("a")))
            assert len(await reply(handle.submit(request("b")))) == 8

    asyncio.run(scenario())


def test_a_bad_grammar_is_the_clients_error() -> None:
    handle = new_handle(FakeBackend(), queue_size=1)
    with pytest.raises(InvalidRequest):
        handle.check_grammar(Grammar(GrammarKind.LARK, "bad"))


class Grammars(FakeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.is_ready = threading.Event()

    def check_grammar(self, grammar: Grammar) -> None:
        self.is_ready.set()


def test_grammars_are_prepared_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle_module, "SETTLE_SECONDS", 0.0)

    async def scenario() -> None:
        backend = Grammars()
        async with running(backend):
            assert await asyncio.to_thread(backend.is_ready.wait, 10)

    asyncio.run(scenario())


def test_an_engine_that_stops_early_prepares_no_grammars() -> None:
    async def scenario() -> Grammars:
        backend = Grammars()
        async with running(backend):
            pass
        return backend

    assert not asyncio.run(scenario()).is_ready.is_set()
