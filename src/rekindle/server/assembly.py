"""Builds a server from its settings: models, shared store, observers, API."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI

from rekindle.api.admission.hosts import server_names
from rekindle.api.admission.keys import Keys
from rekindle.api.app import create_app
from rekindle.api.connections.limits import OpenConnections
from rekindle.api.connections.open_files import connections_within_file_limit
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.http.context import ApiSettings
from rekindle.api.http.drain import Drain
from rekindle.api.http.usage_window import usage_windows
from rekindle.cache.memory.tier import machine_memory_bytes
from rekindle.cache.shared.connection import (
    SharedStore,
    is_on_this_machine,
    open_shared_store,
)
from rekindle.chat.accounts.accounts import Accounts
from rekindle.config.cache import CacheSettings
from rekindle.config.choices import EngineKind, NamespaceBy
from rekindle.config.server import ServerSettings
from rekindle.config.settings import Settings
from rekindle.config.sources import api_keys
from rekindle.errors import StartupError
from rekindle.generation.forgetting import Place, Tombstones
from rekindle.generation.stored_responses import ResponseStore
from rekindle.models.forgetting import Forgetting, Records
from rekindle.models.llama_model import OpenedModel
from rekindle.models.loader import ModelLoader
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import SILENT, LoadProgress, ServerParts
from rekindle.models.source import ModelFile, NamedModel, check_model_names, named_models
from rekindle.models.stores import check_cache_directory, response_store, stored_in
from rekindle.observe.otel import SpanSender, span_sender
from rekindle.observe.telemetry import Telemetry, total
from rekindle.observe.trace import SentRequests, Trace
from rekindle.observe.watchdog import EventLoopWatchdog

if TYPE_CHECKING:  # `vllm_model` imports an HTTP client, which few servers need
    from rekindle.models.vllm_model import UpstreamSource

_log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    app: FastAPI
    api: ApiSettings
    pool: ModelPool
    responses: ResponseStore
    feed: Feed
    drain: Drain
    connections: OpenConnections
    recorders: list[SpanSender | Trace]
    shared: SharedStore | None
    watchdog: EventLoopWatchdog
    forgetting: Forgetting

    def start(self) -> None:
        """Begin to watch and to serve, on the event loop."""
        self.watchdog.start()
        self.pool.start()
        self.forgetting.start()

    def close(self) -> None:
        self.watchdog.stop()
        self.forgetting.close()
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
    check_cache_directory(settings.cache)
    forgotten = Tombstones()
    history, telemetry, watchdog = HourHistory(forgotten), Telemetry(), EventLoopWatchdog()
    telemetry.watch_event_loop(watchdog.stalls)
    recorders = _recorders(settings.server, telemetry)
    shared = _open_shared(settings.cache)
    observers = (history.observe, telemetry.observe, *(each.observe for each in recorders))
    named = None
    if first is not None:
        named = NamedModel(settings.model.alias or first.name, str(first.path))
    sources = named_models(settings.model, named)
    check_model_names(settings, list(sources))
    accounts = Accounts(forgotten)
    loader = ModelLoader(sources, ServerParts(settings, accounts, observers, forgotten), shared)
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
        own_keep_alive={}
        if has_upstreams
        else {name: settings.of(name).model.keep_alive for name in sources},
        pinned=[name for name in sources if settings.of(name).model.pin],
    )
    telemetry.watch(lambda: total(pool.statuses(), loader.past(), loader.past_restarts()))
    responses = response_store(settings.cache, forgotten)
    feed = Feed(pool, history)
    drain = Drain()
    forgetting = Forgetting(
        pool,
        forgotten,
        (
            Records(Place.TURNS, loader.forget, blocks=True),
            Records(Place.RESPONSES, responses.forget, blocks=True),
            Records(Place.PROMPTS, accounts.forget, blocks=False),
            Records(Place.PROMPTS, feed.forget, blocks=False),
        ),
        directory=stored_in(settings.cache),
        shared=shared,
    )
    forgetting.restore()
    api = _api_settings(settings)
    connections = OpenConnections(
        max_running=connections_within_file_limit(settings.server.max_connections),
        receive_seconds=settings.server.receive_timeout,
        on_refused=telemetry.count_refused,
    )
    app = create_app(pool, api, telemetry, responses, feed, drain, forgetting.forget)
    if recorders:
        keeps_bodies = settings.server.trace is not None and settings.server.trace_prompts
        app.add_middleware(SentRequests, keeps_bodies=keeps_bodies)
    assembly = Assembly(
        app=app,
        api=api,
        pool=pool,
        responses=responses,
        feed=feed,
        drain=drain,
        connections=connections,
        recorders=recorders,
        shared=shared,
        watchdog=watchdog,
        forgetting=forgetting,
    )
    if first is not None and named is not None:
        try:
            pool.adopt(named.name, loader.load_from(named.name, first, progress, opened))
        except BaseException:
            assembly.close()
            raise
    return assembly


def _api_settings(settings: Settings) -> ApiSettings:
    server = settings.server
    if server.admin_metrics and server.admin_key is None:
        raise StartupError("--admin-metrics requires --admin-key.")
    keys = Keys(api_keys(server), server.admin_key)
    return ApiSettings(
        keys=keys,
        admin_metrics=server.admin_metrics,
        cors_origins=settings.server.cors,
        server_names=server_names(settings.server.host, settings.server.allowed_hosts),
        receive_seconds=settings.server.receive_timeout,
        body_limit_bytes=settings.server.body_limit,
        ping_seconds=settings.server.ping_interval,
        separates_keys=_separates_keys(settings.cache.namespace_by, keys),
        serves_slots=settings.server.slots,
        serves_dashboard=settings.server.ui,
        explains=settings.server.explain,
        media=settings.chat.media,
        usage_windows=usage_windows(settings.server.usage_window),
    )


def _separates_keys(namespace_by: NamespaceBy, keys: Keys) -> bool:
    """Return whether each key has a namespace of its own."""
    if namespace_by is NamespaceBy.AUTO:
        return len(keys.clients) > 1
    return namespace_by is NamespaceBy.API_KEY


def _open_shared(settings: CacheSettings) -> SharedStore | None:
    url, key = settings.cache_shared, settings.cache_shared_key
    if url is None:
        if key is not None:
            raise StartupError("--cache-shared-key requires --cache-shared.")
        return None
    if key is None and not settings.cache_shared_encrypt:
        raise StartupError("--no-cache-shared-encrypt requires --cache-shared-key.")
    if key is None and not is_on_this_machine(url):
        _log.warning(
            "cache: the shared store has no key: everyone who can write to it can change prompts"
            " and replies of this server. Set --cache-shared-key."
        )
    return open_shared_store(url, key, encrypts=settings.cache_shared_encrypt)


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
