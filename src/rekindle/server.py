"""The composition root: builds model, engine, chat and API from the settings, and runs them."""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rekindle import __version__
from rekindle.api.app import ApiSettings, create_app
from rekindle.api.model_card import ModelCard
from rekindle.chat.guard import Guard
from rekindle.chat.prompt import PromptBuilder
from rekindle.chat.responder import Responder
from rekindle.chat.template import CHATML, ChatTemplate
from rekindle.config import EngineSettings, Settings, api_keys
from rekindle.engine.handle import EngineHandle
from rekindle.errors import StartupError
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.model import Model
from rekindle.llama.threads import physical_cores
from rekindle.telemetry import Telemetry

if sys.platform == "win32":
    uvloop = None
else:
    import uvloop

_log = logging.getLogger("rekindle")

# How long the event loop may keep the engine from the GIL. Python's default of 5 ms is half a
# decode step of a small model.
SWITCH_SECONDS = 0.0005

CUT_SECONDS = 5.0  # for streams to say goodbye after the grace time; picked


@dataclass(frozen=True, slots=True)
class Assembly:
    app: FastAPI
    engine: EngineHandle
    model: Model

    def close(self) -> None:
        self.engine.close()
        self.model.close()


def assemble(
    settings: Settings,
    path: Path,
    name: str,
    on_load_progress: Callable[[float], bool] | None = None,
) -> Assembly:
    model = Model(path, gpu_layers=settings.engine.gpu_layers, on_progress=on_load_progress)
    backend = LlamaBackend(model, _context_params(settings.engine, model))
    engine = EngineHandle(backend, queue_size=settings.engine.queue_size)
    vocabulary = model.vocabulary
    template_source = _template_source(settings.model.chat_template, model)
    template = ChatTemplate(
        template_source,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        guard=Guard(vocabulary.special_strings),
    )
    responder = Responder(
        engine, vocabulary, PromptBuilder(template, vocabulary), model.facts.default_sampling
    )
    card = ModelCard(
        id=settings.model.alias or name,
        path=str(path),
        created=int(time.time()),
        n_ctx=backend.n_ctx,
        n_ctx_train=model.facts.n_ctx_train,
        n_vocab=vocabulary.n_vocab,
        n_params=model.facts.n_params,
        size_bytes=model.facts.size_bytes,
        architecture=model.facts.architecture,
        quantization=model.facts.quantization,
        chat_template=template_source,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
    )
    api = ApiSettings(
        api_keys=api_keys(settings.server),
        cors_origins=settings.server.cors,
        body_limit_bytes=settings.server.body_limit,
        keep_alive_seconds=settings.server.keep_alive,
    )
    telemetry = Telemetry()
    telemetry.watch(engine.status)
    return Assembly(create_app(responder, card, api, telemetry), engine, model)


def run(assembly: Assembly, settings: Settings, sock: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""
    try:
        run_event_loop(_serve(assembly, settings, sock))
    finally:
        assembly.close()
    return 0


@contextmanager
def background(assembly: Assembly, settings: Settings) -> Iterator[str]:
    """Serves from a thread on a free loopback port; gives the base URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = _Server(_uvicorn_config(assembly.app, settings))

    async def serve() -> None:
        assembly.engine.start()
        await server.serve(sockets=[sock])

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


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again at the end, and the exit code is lost."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


async def _serve(assembly: Assembly, settings: Settings, sock: socket.socket) -> None:
    server = _Server(_uvicorn_config(assembly.app, settings))
    logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
    loop = asyncio.get_running_loop()
    grace_seconds = settings.server.shutdown_grace
    draining: list[asyncio.Task[None]] = []

    n_signals = 0

    def stop() -> None:
        nonlocal n_signals
        n_signals += 1
        if n_signals == 2:
            _log.info("stopping now: streams are cut")
            assembly.engine.cut()
        if n_signals > 2:
            server.force_exit = True
        if n_signals > 1:
            return
        _log.info("stopping: no new requests, streams may go on for %g s", grace_seconds)
        server.should_exit = True
        draining.append(loop.create_task(assembly.engine.shut_down(grace_seconds)))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    assembly.engine.start()
    host, port = sock.getsockname()[:2]
    status = assembly.engine.status()
    _log.info(
        "rekindle %s serves %s on http://%s:%d (%d slots, %d tokens of context)",
        __version__,
        assembly.model.path.name,
        f"[{host}]" if ":" in host else host,
        port,
        status.n_slots,
        status.n_cells,
    )
    await server.serve(sockets=[sock])
    _log.info("stopped")


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """At the end a client that does not read is cut; uvicorn would show that as a bug of ours."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(settings.server.shutdown_grace + CUT_SECONDS),
    )


def _context_params(settings: EngineSettings, model: Model) -> ContextParams:
    return ContextParams(
        n_cells=settings.ctx_size or model.facts.n_ctx_train,
        n_slots=settings.parallel,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        n_threads=settings.threads or physical_cores(),
        flash_attn=settings.flash_attn.value,
        type_k=settings.cache_type_k.value,
        type_v=settings.cache_type_v.value,
        swa_full=settings.swa_full,
    )


def _template_source(setting: str | None, model: Model) -> str:
    """A path, Jinja text, or a built-in name; else the model's own; else ChatML."""
    if setting is None:
        return model.facts.chat_template or CHATML
    if setting == "chatml":
        return CHATML
    if "{%" in setting or "{{" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The chat template {setting} cannot be read: {error}.") from error
