"""Composition root: builds models, engine, chat and API from the settings, and runs them."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from rekindle import __version__
from rekindle.api.app import create_app
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.http.context import ApiSettings
from rekindle.api.http.drain import Drain
from rekindle.cache.memory.tier import machine_memory_bytes
from rekindle.cache.shared.connection import SharedStore, open_shared_store
from rekindle.chat.accounts.accounts import Accounts
from rekindle.config import CacheSettings, EngineKind, ServerSettings, Settings
from rekindle.config_sources import api_keys
from rekindle.errors import StartupError
from rekindle.generation.status import CacheStatus
from rekindle.generation.stored_responses import ResponseStore
from rekindle.models.llama_model import SWITCH_SECONDS, OpenedModel
from rekindle.models.loader import ModelLoader
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import SILENT, LoadProgress, ServerParts
from rekindle.models.source import ModelFile, NamedModel, named_models
from rekindle.models.stores import response_store
from rekindle.observe.otel import SpanSender, span_sender
from rekindle.observe.telemetry import Telemetry, total
from rekindle.observe.trace import SentRequests, Trace
from rekindle.priming.warm_list import WarmList, asgi_sender

if TYPE_CHECKING:  # `vllm_model` imports an HTTP client, which few servers need
    from rekindle.models.vllm_model import UpstreamSource

if sys.platform == "win32":
    uvloop = None
else:
    import uvloop

_log = logging.getLogger("rekindle")

CUT_SECONDS = 5.0  # for streams to send their error after the grace time; picked
FLUSH_SECONDS = 15.0  # to write rows (10 s in the engine) and turns (5 s)


@dataclass(frozen=True, slots=True)
class Assembly:
    app: FastAPI
    pool: ModelPool
    responses: ResponseStore
    feed: Feed
    drain: Drain
    recorders: list[SpanSender | Trace]
    shared: SharedStore | None

    def close(self) -> None:
        self.pool.close()
        self.responses.close()
        for recorder in self.recorders:
            recorder.close()
        if self.shared is not None:
            self.shared.close()


def assemble(
    settings: Settings,
    first: "ModelFile | UpstreamSource | None",
    progress: LoadProgress = SILENT,
    opened: OpenedModel | None = None,
) -> Assembly:
    """Build a server. Load `first` now; it answers requests that name no model.

    `first` is None when all models are loaded on first use. `opened`: its file is being read.
    """
    history, telemetry = HourHistory(), Telemetry()
    recorders = _recorders(settings.server, telemetry)
    shared = _open_shared(settings.cache)
    observers = (history.observe, telemetry.observe, *(each.observe for each in recorders))
    named = None
    if first is not None:
        named = NamedModel(settings.model.alias or first.name, str(first.path))
    sources = named_models(settings.model, named)
    loader = ModelLoader(sources, ServerParts(settings, Accounts(), observers), shared)
    has_upstreams = settings.engine.engine is EngineKind.VLLM
    pool = ModelPool(
        list(sources),
        loader,
        default=named.name if named else None,
        memory_bytes=settings.model.models_memory
        if settings.model.models_memory is not None
        else machine_memory_bytes() // 2,
        # An upstream model takes no memory here, and unloading it would lose its counters.
        keep_alive_seconds=0.0 if has_upstreams else settings.model.keep_alive,
    )
    caches = partial(_upstream_caches, pool) if has_upstreams else loader.cache_statuses
    telemetry.watch(lambda: total(pool.statuses(), caches(), loader.past()))
    responses = response_store(settings.cache)
    feed = Feed(pool, history)
    drain = Drain()
    app = create_app(pool, _api_settings(settings), telemetry, responses, feed, drain)
    if recorders:
        keeps_bodies = settings.server.trace is not None and settings.server.trace_prompts
        app.add_middleware(SentRequests, keeps_bodies=keeps_bodies)
    assembly = Assembly(app, pool, responses, feed, drain, recorders, shared)
    if first is not None and named is not None:
        try:
            pool.adopt(named.name, loader.load_from(named.name, first, progress, opened))
        except BaseException:
            assembly.close()
            raise
    return assembly


def _api_settings(settings: Settings) -> ApiSettings:
    return ApiSettings(
        api_keys=api_keys(settings.server),
        cors_origins=settings.server.cors,
        body_limit_bytes=settings.server.body_limit,
        ping_seconds=settings.server.ping_interval,
        namespace_by=settings.cache.namespace_by,
        explains=settings.server.explain,
    )


def _upstream_caches(pool: ModelPool) -> list[CacheStatus]:
    return [status.cache for status in pool.statuses() if status.cache is not None]


def _open_shared(settings: CacheSettings) -> SharedStore | None:
    if settings.cache_shared is None:
        if settings.cache_shared_key is not None:
            raise StartupError("--cache-shared-key requires --cache-shared.")
        return None
    return open_shared_store(settings.cache_shared, settings.cache_shared_key)


def _recorders(settings: ServerSettings, telemetry: Telemetry) -> list[SpanSender | Trace]:
    """Return the observers that write records of replies elsewhere: the spans, and the trace."""
    recorders: list[SpanSender | Trace] = []
    if sender := span_sender(asked_for=settings.otel):
        recorders.append(sender)
    if settings.trace is not None:
        trace = Trace(
            settings.trace,
            max_bytes=settings.trace_size,
            has_prompts=settings.trace_prompts,
        )
        telemetry.watch_trace(trace.counts)
        recorders.append(trace)
    return recorders


def run(assembly: Assembly, settings: Settings, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    try:
        run_event_loop(_serve(assembly, settings, sock))
    finally:
        assembly.close()


@contextmanager
def background(assembly: Assembly) -> Iterator[str]:
    """Serve on a free loopback port from another thread. Yield the base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = _UvicornServer(_uvicorn_config(assembly.app))

    async def serve() -> None:
        assembly.pool.start()
        await server.serve(sockets=[sock])
        await assembly.pool.shut_down(0)

    thread = threading.Thread(target=lambda: run_event_loop(serve()), name="server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        assembly.close()


def run_event_loop(main: Coroutine[None, None, None]) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        runner.run(main)


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handling, which raises signals again and loses the exit code."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


async def _serve(assembly: Assembly, settings: Settings, sock: socket.socket) -> None:
    server = _UvicornServer(_uvicorn_config(assembly.app))
    logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
    loop = asyncio.get_running_loop()
    grace_seconds = settings.server.shutdown_grace
    draining: list[asyncio.Task[None]] = []

    n_signals = 0

    def stop() -> None:
        nonlocal n_signals
        n_signals += 1
        if n_signals == 1:
            _log.info("server: stopping, running requests have %g s to finish", grace_seconds)
            draining.append(loop.create_task(drain(assembly, server, warm, grace_seconds)))
        elif n_signals == 2:
            _log.info("server: stopping now, running requests are cancelled")
            assembly.pool.cut()
        else:
            server.should_exit = server.force_exit = True

    def on_signal(*_: object) -> None:
        # The last records are written after the loop is closed, and a signal may come then.
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    assembly.pool.start()
    key = next(iter(api_keys(settings.server)), None)
    persist = settings.cache.cache_disk > 0 and settings.engine.engine is EngineKind.LLAMA
    warm = WarmList(settings.chat.warm, asgi_sender(assembly.app, key, persist=persist))
    warm.start()
    host, port = sock.getsockname()[:2]
    _log.info(
        "rekindle %s serves %s on http://%s:%d%s",
        __version__,
        ", ".join(model.id for model in assembly.pool.listed()),
        f"[{host}]" if ":" in host else host,
        port,
        _room_of(assembly.pool),
    )
    await server.serve(sockets=[sock])
    _log.info("stopped")


async def drain(
    assembly: Assembly, server: uvicorn.Server, warm: WarmList, grace_seconds: float
) -> None:
    """Let running requests end, store what the models hold, then close the port.

    Until then new requests get a 503, which tells a load balancer more than a closed port.
    """
    assembly.drain.expect_end(grace_seconds + CUT_SECONDS + FLUSH_SECONDS)
    assembly.feed.close()
    running = set(server.server_state.tasks)
    try:
        await asyncio.gather(warm.close(), assembly.pool.shut_down(grace_seconds))
        if running:
            await asyncio.wait(running, timeout=CUT_SECONDS)
        assembly.drain.expect_end(FLUSH_SECONDS)
        await assembly.pool.flush()
    finally:
        server.should_exit = True


def _room_of(pool: ModelPool) -> str:
    """Describe the context of the model that is loaded at the start."""
    for status in pool.statuses():
        return f" ({status.n_slots} slots, {status.n_cells} tokens of context)"
    return ""


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Hide the traceback that uvicorn logs when it cuts a client that does not read."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(CUT_SECONDS),  # for clients that do not read
    )
