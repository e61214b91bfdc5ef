"""Runs an assembled server: uvicorn, signals, the warm list, draining."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import uvicorn

from rekindle import __version__
from rekindle.api.connections.protocol import BoundedProtocol
from rekindle.api.http.context import ApiSettings
from rekindle.config.choices import EngineKind
from rekindle.config.settings import Settings
from rekindle.local_hosts import is_loopback
from rekindle.models.pool import ModelPool
from rekindle.priming.warm_list import WarmList, asgi_sender
from rekindle.server.assembly import Assembly

if sys.platform == "win32":
    uvloop = None
else:
    import uvloop

_log = logging.getLogger("rekindle")

# How long one thread may hold the GIL while the event loop waits for it. Python's default is 5 ms.
SWITCH_SECONDS = 0.0005
CUT_SECONDS = 5.0  # for streams to send their error after the grace time; picked
FLUSH_SECONDS = 25.0  # to write rows (20 s with the end of the process) and turns (5 s)


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
    server = _UvicornServer(_uvicorn_config(assembly))

    async def serve() -> None:
        assembly.start()
        await server.serve(sockets=[sock])
        await assembly.pool.shut_down(0)
        await assembly.pool.flush()

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
    server = _UvicornServer(_uvicorn_config(assembly))
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
    assembly.start()
    persist = settings.cache.cache_disk > 0 and settings.engine.engine is EngineKind.LLAMA
    warm = WarmList(
        settings.chat.warm, asgi_sender(assembly.app, _warm_keys(assembly.api), persist=persist)
    )
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
    if line := describe_sharing(assembly.api):
        _log.info("server: %s", line)
    if not is_loopback(host) and not assembly.api.keys.clients:
        _log.warning("server: no key is set, so whoever reaches %s can use it (--api-key)", host)
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
        most = f", {status.n_ctx} for one prompt" if status.n_ctx < status.n_cells else ""
        return f" ({status.n_slots} slots, {status.n_cells} tokens of context{most})"
    return ""


def describe_sharing(api: ApiSettings) -> str | None:
    """Describe which clients find each other's prompts. None: there are no keys to tell apart."""
    n_keys = len(api.keys.clients)
    if api.separates_keys and not n_keys:
        return (
            "no API keys: each key that a client sends names a namespace, and protects nothing"
            " (--namespace-by api-key)"
        )
    if api.separates_keys:
        return (
            f"{n_keys} API keys, each with a namespace of its own: no key finds another's prompts"
        )
    if n_keys > 1:
        return (
            f"{n_keys} API keys share one namespace (--namespace-by none): each finds, reads and"
            " deletes the prompts of the others"
        )
    return None


def _warm_keys(api: ApiSettings) -> tuple[str, ...]:
    """Return one key of each namespace."""
    return api.keys.clients if api.separates_keys else api.keys.clients[:1]


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Hide the traceback that uvicorn logs when it cuts a client that does not read."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _uvicorn_config(assembly: Assembly) -> uvicorn.Config:
    protocol: Any = partial(BoundedProtocol, open_connections=assembly.connections)
    return uvicorn.Config(
        assembly.app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(CUT_SECONDS),  # for clients that do not read
    )
