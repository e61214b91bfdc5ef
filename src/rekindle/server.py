"""The composition root: builds model, engine, chat and API from the settings, and runs them."""

import asyncio
import logging
import os
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
from rekindle.cache.disk_shares import divide
from rekindle.cache.disk_store import WriteRules
from rekindle.cache.fingerprint import (
    DIGESTS_NAME,
    DigestFile,
    Identity,
    default_cache_dir,
    fingerprint,
    turn_fingerprint,
    weights_digest,
)
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.recent_turns import MemoryTurns
from rekindle.cache.response_store import MemoryResponses, ResponseDatabase
from rekindle.cache.tiers.disk import DiskTier
from rekindle.cache.tiers.memory import machine_memory_bytes
from rekindle.cache.transfers import Transfers
from rekindle.cache.turn_database import TurnDatabase
from rekindle.chat.dialects import choose
from rekindle.chat.guard import Guard
from rekindle.chat.prompt import PromptBuilder
from rekindle.chat.responder import Responder
from rekindle.chat.rewarm import Rewarmer
from rekindle.chat.template import CHATML, ChatTemplate
from rekindle.chat.turn_memory import TurnMemory
from rekindle.config import CacheSettings, EngineSettings, Settings
from rekindle.config_sources import api_keys
from rekindle.engine.handle import EngineHandle
from rekindle.engine.loop import OpenCache
from rekindle.errors import StartupError
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.embedder import LlamaEmbedder
from rekindle.llama.library import STATE_VERSION
from rekindle.llama.model import Model, ModelFacts
from rekindle.llama.threads import physical_cores
from rekindle.model_source import ModelFile
from rekindle.model_state import StateTraits
from rekindle.stored_responses import ResponseStore
from rekindle.stored_turns import TurnStore
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
    turns: TurnStore
    responses: ResponseStore

    def close(self) -> None:
        self.engine.close()
        self.turns.close()
        self.responses.close()
        self.model.close()


def assemble(
    settings: Settings,
    file: ModelFile,
    on_load_progress: Callable[[float], bool] | None = None,
    on_digest_progress: Callable[[int, int], None] | None = None,
) -> Assembly:
    weights = _weights_digest(settings.cache, file, on_digest_progress)
    model = Model(file.path, gpu_layers=settings.engine.gpu_layers, on_progress=on_load_progress)
    params = _context_params(settings.engine, model)
    backend = LlamaBackend(model, params)
    open_cache = _cache_opener(settings.cache, weights, model.facts, params)
    engine = EngineHandle(
        backend,
        open_cache,
        queue_size=settings.engine.queue_size,
        embedder=LlamaEmbedder(
            model,
            max_cells=params.n_cells,
            n_threads=params.n_threads,
            flash_attn=params.flash_attn,
        ),
    )
    vocabulary = model.vocabulary
    template_source = _template_source(settings.model.chat_template, model)
    template = ChatTemplate(
        template_source,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        guard=Guard(vocabulary.special_strings),
    )
    traits = template.traits
    dialect = choose(
        template_source,
        supports_tools=traits.tools and traits.calls,
        override=settings.chat.tool_dialect,
    )
    turns = _turn_store(settings.cache, weights)
    prompts = PromptBuilder(
        template, vocabulary, dialect, TurnMemory(turns), settings.chat.reasoning_history
    )
    responder = Responder(
        engine,
        vocabulary,
        prompts,
        dialect,
        model.facts.default_sampling,
        default_cache_prompt=settings.cache.cache_prompt,
        default_overflow=settings.chat.overflow,
        rewarmer=Rewarmer(engine, prompts) if settings.chat.rewarm else None,
        embedding_end_token=vocabulary.added_eos_token,
    )
    card = ModelCard(
        id=settings.model.alias or file.name,
        path=str(file.path),
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
    responses = _response_store(settings.cache)
    app = create_app(responder, card, api, telemetry, responses)
    return Assembly(app, engine, model, turns, responses)


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

    def on_signal(*_: object) -> None:
        # Once the loop is closed what idle slots hold is being stored, which takes seconds.
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
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


def _weights_digest(
    settings: CacheSettings, file: ModelFile, on_progress: Callable[[int, int], None] | None
) -> str:
    if not settings.cache_disk:
        return ""  # nothing outlives the process, and the process has one model
    known = DigestFile(_cache_directory(settings) / DIGESTS_NAME)
    return weights_digest(file.files, known=known, on_progress=on_progress)


def _cache_directory(settings: CacheSettings) -> Path:
    return settings.cache_dir or default_cache_dir()


def _turn_store(settings: CacheSettings, weights: str) -> TurnStore:
    """Tokens mean the same whatever the KV types are: the weights alone are their fingerprint."""
    if not settings.cache_disk:
        return MemoryTurns()
    shares = divide(settings.cache_disk)
    return TurnDatabase(
        _cache_directory(settings),
        fingerprint=turn_fingerprint(weights),
        max_bytes=shares.turns,
        wal_bytes=shares.turn_log,
    )


def _response_store(settings: CacheSettings) -> ResponseStore:
    if not settings.cache_disk:
        return MemoryResponses()
    max_bytes = divide(settings.cache_disk).responses
    return ResponseDatabase(_cache_directory(settings), max_bytes=max_bytes)


def _cache_opener(
    settings: CacheSettings, weights: str, facts: ModelFacts, params: ContextParams
) -> OpenCache:
    """Opens the cache once the engine knows what the model's state is like."""
    policy = CachePolicy(
        memory_bytes=machine_memory_bytes() // 4
        if settings.cache_ram is None
        else settings.cache_ram,
        disk_bytes=settings.cache_disk,
        writes=WriteRules(
            bytes_per_hour=settings.cache_write_budget,
            policy=settings.cache_write_policy,
            min_tokens=settings.cache_min_tokens,
        ),
        may_recompute=settings.cache_recompute,
    )

    def open_cache(traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        identity = Identity(
            weights=weights,
            model_class=traits.model_class,
            type_k=params.type_k,
            type_v=params.type_v,
            flash_attn=params.flash_attn,
            swa_full=params.swa_full,
            rope_n_ctx=params.n_cells if facts.rope_depends_on_n_ctx else None,
            attn_rot_disable=os.environ.get("LLAMA_ATTN_ROT_DISABLE"),
            state_version=STATE_VERSION,
        )
        root = fingerprint(identity)
        transfers = None
        if settings.cache_disk and traits.off_because is None:
            tier = DiskTier(
                _cache_directory(settings),
                fingerprint=root,
                budget_bytes=divide(settings.cache_disk).entries,
                is_leased=lambda key: cache.is_leased(key),
            )
            transfers = Transfers(tier, notify)
        cache = PrefixCache(root, traits, policy, transfers)
        return cache

    return open_cache


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
