"""Shutdown of a server on fakes: which requests it refuses, and what it waits for."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn

from rekindle.api.app import create_app
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.http.drain import Drain
from rekindle.cache.responses.store import MemoryResponses
from rekindle.generation.forgetting import Tombstones
from rekindle.models.pool import ModelPool
from rekindle.observe.telemetry import Telemetry
from rekindle.priming.warm_list import WarmList
from rekindle.server import serving
from rekindle.server.assembly import Assembly
from rekindle.server.serving import drain
from tests.api.client import USER, app_on, forget_nothing
from tests.api.fakes import CARD, FakeResponder, FixedModels, api_settings
from tests.models.test_pool import GIB, FakeLoader, FakeModel

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowModel(FakeModel):
    """Stores what it holds only when it may."""

    def __init__(self, name: str = "a") -> None:
        super().__init__(name, GIB)
        self.began = threading.Event()
        self.may_close = threading.Event()
        self.grace_seconds: float | None = None

    async def shut_down(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds

    def close(self) -> None:
        self.began.set()
        assert self.may_close.wait(10)
        super().close()


class Ending:
    """A server around fake models."""

    def __init__(self, *models: FakeModel) -> None:
        names = [model.card.id for model in models]
        self.pool = ModelPool(
            names, FakeLoader(), default=None, memory_bytes=10 * GIB, keep_alive_seconds=0.0
        )
        for model in models:
            self.pool.adopt(model.card.id, model.serving())
        self.pool.start()
        self.drain = Drain()
        feed = Feed(self.pool, HourHistory(Tombstones()))
        app = create_app(
            self.pool,
            api_settings(),
            Telemetry(),
            MemoryResponses(Tombstones()),
            feed,
            self.drain,
            forget_nothing,
        )
        self.assembly = cast(Assembly, SimpleNamespace(pool=self.pool, drain=self.drain, feed=feed))
        self.tasks: set[asyncio.Task[None]] = set()
        self.http = SimpleNamespace(
            should_exit=False, server_state=SimpleNamespace(tasks=self.tasks)
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def run(self, grace_seconds: float = 0.0) -> None:
        warm = WarmList((), lambda _: None)  # type: ignore[arg-type, return-value]
        await drain(self.assembly, cast(uvicorn.Server, self.http), warm, grace_seconds)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def refusing(**settings: Any) -> tuple[Drain, Clock, httpx.AsyncClient]:
    clock = Clock()
    gate = Drain(clock)
    models = FixedModels(FakeResponder(), CARD)
    app = app_on(models, api_settings(**settings), drain=gate)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return gate, clock, client


def test_new_requests_are_refused_in_the_error_shape_of_their_api() -> None:
    async def scenario() -> None:
        gate, clock, client = refusing()
        body = {"messages": [USER], "max_tokens": 5}
        assert (await client.post(CHAT, json=body)).status_code == 200
        gate.expect_end(12.5)
        clock.now += 3
        for path in (CHAT, "/v1/responses", "/v1/completions", "/tokenize"):
            refusal = await client.post(path, json=body)
            assert refusal.status_code == 503
            assert refusal.headers["retry-after"] == "10"
            assert refusal.json()["error"]["code"] == "shutting_down"
        refusal = await client.post(MESSAGES, json=body)
        assert refusal.status_code == 503
        assert refusal.headers["retry-after"] == "10"
        assert refusal.json()["type"] == "error"
        assert refusal.json()["error"]["type"] == "api_error"

    run(scenario)


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (30, "30"), (3600, "60")])
def test_retry_after_is_what_is_left_within_reason(seconds: float, told: str) -> None:
    async def scenario() -> None:
        gate, _, client = refusing()
        gate.expect_end(seconds)
        assert (await client.get("/v1/models")).headers["retry-after"] == told

    run(scenario)


def test_health_reports_draining_and_liveness() -> None:
    async def scenario() -> None:
        gate, _, client = refusing(api_keys=("k",))
        assert (await client.get("/health?live")).json() == {"status": "ok"}
        gate.expect_end(5)
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "draining"}
        assert (await client.head("/health")).status_code == 503
        assert (await client.get("/health?live")).status_code == 200
        metrics = await client.get("/metrics", headers={"x-api-key": "k"})
        assert metrics.status_code == 200
        # A stranger learns no more than before.
        assert (await client.post(CHAT, json={})).status_code == 401

    run(scenario)


def test_a_body_is_read_before_it_is_refused() -> None:
    """A connection that is closed with its body unread may take the answer with it."""

    async def scenario() -> None:
        gate, _, client = refusing()
        gate.expect_end(5)
        n_sent = 0

        async def pieces() -> Any:
            nonlocal n_sent
            for _ in range(10):
                n_sent += 1
                yield b" " * 100_000

        refusal = await client.post(CHAT, content=pieces())
        assert refusal.status_code == 503
        assert refusal.headers["connection"] == "close"
        assert n_sent == 10

    run(scenario)


def test_the_port_stays_open_until_everything_is_stored() -> None:
    async def scenario() -> None:
        models = [SlowModel("a"), SlowModel("b")]
        ending = Ending(*models)
        draining = asyncio.create_task(ending.run(grace_seconds=7.0))
        for model in models:  # at the same time
            assert await asyncio.to_thread(model.began.wait, 10)
        assert models[0].grace_seconds == 7.0
        assert not ending.http.should_exit
        assert (await ending.client.get("/health")).json() == {"status": "draining"}
        assert (await ending.client.get("/metrics")).status_code == 200
        refusal = await ending.client.post(CHAT, json={"messages": [USER]})
        assert refusal.status_code == 503
        for model in models:
            model.may_close.set()
        await draining
        assert ending.http.should_exit
        assert all(model.is_closed for model in models)
        ending.pool.close()  # as at every end: nothing is left to do

    run(scenario)


def test_what_is_stored_waits_for_replies_that_are_being_sent() -> None:
    """A reply's end remembers its turn: it must not come too late."""

    async def scenario() -> None:
        model = SlowModel()
        model.may_close.set()
        ending = Ending(model)
        is_sent = asyncio.Event()
        reply = asyncio.create_task(cast(Any, is_sent.wait()))
        ending.tasks.add(reply)
        draining = asyncio.create_task(ending.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not model.began.is_set()
        is_sent.set()
        await draining
        assert model.is_closed

    run(scenario)


def test_a_client_that_does_not_read_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CUT_SECONDS", 0.01)

    async def scenario() -> None:
        model = SlowModel()
        model.may_close.set()
        ending = Ending(model)
        stuck = asyncio.create_task(cast(Any, asyncio.Event().wait()))
        ending.tasks.add(stuck)
        await ending.run()
        assert model.is_closed
        assert ending.http.should_exit
        stuck.cancel()

    run(scenario)


def test_a_model_that_cannot_be_stored_does_not_keep_the_server() -> None:
    class Broken(FakeModel):
        def close(self) -> None:
            raise OSError("no disk")

    async def scenario() -> None:
        ending = Ending(Broken("a", GIB))
        with suppress(OSError):
            await ending.run()
        assert ending.http.should_exit

    run(scenario)
