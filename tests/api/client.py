"""The app on fakes: in process through httpx, or behind a real uvicorn where sockets matter."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from rekindle.api.app import create_app
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.http.context import ApiSettings
from rekindle.api.http.drain import Drain
from rekindle.api.models import Models
from rekindle.cache.responses.store import MemoryResponses
from rekindle.generation.forgetting import Deleted, Scope, Tombstones
from rekindle.generation.stored_responses import ResponseStore
from rekindle.observe.telemetry import Telemetry
from tests.api.fakes import CARD, FakeResponder, FixedModels, api_settings

USER = {"role": "user", "content": "hi"}


def app_of(
    responder: FakeResponder,
    settings: ApiSettings | None = None,
    stored_responses: ResponseStore | None = None,
) -> FastAPI:
    return app_on(FixedModels(responder, CARD), settings, stored_responses)


def app_on(
    models: Models,
    settings: ApiSettings | None = None,
    stored_responses: ResponseStore | None = None,
    *,
    telemetry: Telemetry | None = None,
    feed: Feed | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    return create_app(
        models,
        settings or api_settings(),
        telemetry or Telemetry(),
        stored_responses or MemoryResponses(Tombstones()),
        feed or Feed(models, HourHistory(Tombstones())),
        drain or Drain(),
        forget_nothing,
    )


async def forget_nothing(_scope: Scope, _at: float) -> Deleted:
    return Deleted(counts={})


@asynccontextmanager
async def client_of(
    responder: FakeResponder, settings: ApiSettings | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_of(responder, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def post(
    path: str, body: object, responder: FakeResponder | None = None, **headers: str
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(responder or FakeResponder()) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


def chat(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/v1/chat/completions", {"messages": [USER], **fields}, responder)


def complete(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/v1/completions", {"prompt": "Once", **fields}, responder)


@contextmanager
def serving(responder: FakeResponder, settings: ApiSettings | None = None) -> Iterator[str]:
    """The address of a uvicorn that serves the app from another thread."""
    config = uvicorn.Config(app_of(responder, settings), port=0, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
