"""The pool of loaded models: loaded on first use, unloaded when idle or when memory runs out.

The pool runs on the event loop. Loads and unloads run in worker threads, one at a time, in the
order of arrival. A model in use is never unloaded.
"""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from rekindle.chat.responder import Responder
from rekindle.errors import ModelInUse, ModelLoadFailed, RekindleError, ShuttingDown, UnknownModel
from rekindle.generation.status import EngineStatus
from rekindle.models.card import FileCard, Lease, ListedModel, ModelState
from rekindle.models.serving_model import ServingModel

_log = logging.getLogger("rekindle.models")

PROGRESS_SECONDS = 5.0  # between two log lines about one load; picked
MIN_WATCH_SECONDS = 0.01  # picked
LATEST = ":latest"  # the tag that Ollama's clients add to a name


class Loader(Protocol):
    """Blocking; called in worker threads. Raises RekindleError."""

    def n_bytes(self, name: str) -> int:
        """Estimate the memory that the model will take."""
        ...

    def file_card(self, name: str) -> FileCard | None:
        """Return what the model's file says; None: it is not known."""
        ...

    def load(self, name: str, on_progress: Callable[[float], bool]) -> ServingModel:
        """Load the model; give up when `on_progress` returns False."""
        ...


class _PooledModel:
    """One model, loaded or not, and its uses."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        on_idle: Callable[[], None],
        keep_alive_seconds: float,
    ) -> None:
        self.name = name
        self.keep_alive_seconds = keep_alive_seconds
        self.created = int(time.time())
        self.loaded: ServingModel | None = None
        self.loading: asyncio.Task[None] | None = None
        self.is_leaving = False  # about to be unloaded: new requests wait for the next load
        self.n_uses = 0
        self.used_at = clock()
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._clock = clock
        self._on_idle = on_idle

    def begin(self) -> None:
        self.n_uses += 1
        self.used_at = self._clock()
        self.is_idle.clear()

    def end(self) -> None:
        self.n_uses -= 1
        self.used_at = self._clock()
        if self.n_uses == 0:
            self.is_idle.set()
            self._on_idle()

    def listed(self) -> ListedModel:
        if self.loading is not None:
            state = ModelState.LOADING
        else:
            state = ModelState.UNLOADED if self.loaded is None else ModelState.LOADED
        card = self.loaded.card if self.loaded is not None else None
        return ListedModel(self.name, self.created, state, card, self.seconds_left)

    @property
    def seconds_left(self) -> float:
        """Return the time until the model is unloaded, if no request comes. inf: it stays."""
        idle_seconds = 0.0 if self.n_uses else self._clock() - self.used_at
        return max(self.keep_alive_seconds - idle_seconds, 0.0)

    def check_unused(self) -> None:
        """Raises ModelInUse."""
        if self.loading is not None:
            raise ModelInUse(f"The model `{self.name}` is being loaded.")
        if self.n_uses:
            raise ModelInUse(f"The model `{self.name}` is in use by {self.n_uses} requests.")


class ModelPool:
    """`default` answers when no model is named; None: the last one used, or the first."""

    def __init__(
        self,
        names: Sequence[str],
        loader: Loader,
        *,
        default: str | None,
        memory_bytes: int,
        keep_alive_seconds: float,  # 0: idle models stay loaded
        own_keep_alive: Mapping[str, float] = MappingProxyType({}),  # of models that differ
        pinned: Collection[str] = (),  # models that stay loaded
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_alive_seconds = {
            name: own_keep_alive.get(name, keep_alive_seconds) or math.inf for name in names
        }
        self._models = {
            name: _PooledModel(name, clock, self._when_idle, seconds)
            for name, seconds in self._keep_alive_seconds.items()
        }
        self._loader = loader
        self._default = default
        self._memory_bytes = memory_bytes
        self._pinned = frozenset(pinned)
        self._clock = clock
        self._has_idle = asyncio.Event()  # the watch looks again
        self._changing = asyncio.Lock()  # held during each load and unload
        self._is_closing = False
        # Called with each model that was loaded later, and the time at which its load began.
        self.on_loaded: Callable[[ServingModel, float], None] = lambda loaded, began: None
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, name: str, loaded: ServingModel) -> None:
        """Add a model that is already loaded. Only before `start`."""
        self._models[name].loaded = loaded

    def start(self) -> None:
        for model in self._loaded():
            model.used_at = self._clock()
        for serving in self.serving():
            serving.engine.start()
            serving.responder.prove_grammars()
        self._spawn(self._watch())

    async def lease(self, name: str | None) -> Lease[Responder]:
        model = self._wanted(name)
        while True:
            if self._is_closing:
                raise ShuttingDown("The server is shutting down.")
            if model.loaded is not None and not model.is_leaving:
                return Lease(model.loaded.responder, model.loaded.card, model)
            await self._load(model)

    def listed(self) -> list[ListedModel]:
        return [model.listed() for model in self._models.values()]

    def find(self, name: str) -> ListedModel:
        return self._exactly(name).listed()

    async def file_card(self, name: str) -> FileCard | None:
        model = self._exactly(name)
        if model.loaded is not None:
            return model.loaded.card
        return await asyncio.to_thread(self._loader.file_card, model.name)

    async def load(self, name: str) -> None:
        model = self._exactly(name)
        if model.loaded is None or model.is_leaving:
            await self._load(model)

    async def unload(self, name: str) -> None:
        model = self._exactly(name)
        model.check_unused()
        async with self._changing:
            model.check_unused()
            if model.loaded is not None:
                await self._unload(model, "requested")

    def keep_alive(self, name: str | None, seconds: float) -> None:
        self._wanted(name).keep_alive_seconds = seconds

    def status(self, name: str | None) -> EngineStatus | None:
        loaded = self._wanted(name).loaded
        return loaded.engine.status() if loaded is not None else None

    def statuses(self) -> list[EngineStatus]:
        """Return the status of every loaded model."""
        return [serving.engine.status() for serving in self.serving()]

    async def refresh(self) -> None:
        """Ask every engine for its status, and wait a moment for the answers."""
        await asyncio.gather(*(serving.engine.refresh() for serving in self.serving()))

    async def unload_idle(self) -> None:
        """Unload models that were idle for as long as they are kept."""
        for model in self._loaded():
            async with self._changing:
                if model in self._unused() and not model.seconds_left:
                    await self._unload(model, f"idle for {model.keep_alive_seconds:g} s")

    async def shut_down(self, grace_seconds: float) -> None:
        self._is_closing = True
        await asyncio.gather(*(each.engine.shut_down(grace_seconds) for each in self.serving()))

    def cut(self) -> None:
        self._is_closing = True
        for serving in self.serving():
            serving.engine.cut()

    async def flush(self) -> None:
        """Store what the models hold and close them, all at the same time. After `shut_down`."""
        closing: list[ServingModel] = []
        for model in self._loaded():
            if model.loaded is not None and not model.is_leaving:  # else it is being closed
                closing.append(model.loaded)
                model.loaded = None
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in closing))

    def close(self) -> None:
        """Close the models that are left. After the event loop has ended. Blocking."""
        self._is_closing = True
        for model in self._loaded():
            if model.loaded is not None:
                model.loaded.close()
                model.loaded = None

    def _wanted(self, name: str | None) -> _PooledModel:
        """Return the model for a name. A single model answers to every name that clients send."""
        if len(self._models) == 1:
            return next(iter(self._models.values()))
        if wanted := name or self._default:
            return self._exactly(wanted)
        candidates = self._loaded() or list(self._models.values())[:1]
        return max(candidates, key=lambda model: model.used_at)

    def _exactly(self, name: str) -> _PooledModel:
        model = self._models.get(name) or self._models.get(name.removesuffix(LATEST))
        if model is None:
            raise UnknownModel(name, list(self._models))
        return model

    def _loaded(self) -> list[_PooledModel]:
        return [model for model in self._models.values() if model.loaded is not None]

    def _unused(self) -> list[_PooledModel]:
        return [model for model in self._unloadable() if model.n_uses == 0]

    def _unloadable(self) -> list[_PooledModel]:
        return [model for model in self._loaded() if model.name not in self._pinned]

    def serving(self) -> list[ServingModel]:
        """Return every loaded model."""
        return [model.loaded for model in self._models.values() if model.loaded is not None]

    @property
    def _n_bytes(self) -> int:
        return sum(serving.n_bytes() for serving in self.serving())

    @property
    def _exceeds_memory(self) -> bool:
        """Whether the models exceed their budget. A single model may do so."""
        return len(self._loaded()) > 1 and self._n_bytes > self._memory_bytes

    async def _load(self, model: _PooledModel) -> None:
        """Join the load that is running, or start one."""
        if model.loading is None:
            model.loading = self._spawn(self._load_now(model))
        await asyncio.shield(model.loading)

    async def _load_now(self, model: _PooledModel) -> None:
        try:
            async with self._changing:
                n_bytes = await asyncio.to_thread(self._loader.n_bytes, model.name)
                await self._make_room(n_bytes)
                _log.info("model=%s loading", model.name)
                began = self._clock()
                loaded = await asyncio.to_thread(
                    self._loader.load, model.name, self._progress_of(model.name)
                )
                loaded.engine.start()
                loaded.responder.prove_grammars()
                model.loaded = loaded
                self.on_loaded(loaded, began)
                model.used_at = self._clock()
                _log.info("model=%s loaded in %.1f s", model.name, model.used_at - began)
        except Exception as error:
            if self._is_closing:
                raise ShuttingDown("The server is shutting down.") from error
            raise _load_failure(model.name, error) from error
        finally:
            model.loading = None

    async def _make_room(self, n_bytes: int) -> None:
        """Unload the least recently used models, idle ones first, until `n_bytes` fit."""
        while self._n_bytes + n_bytes > self._memory_bytes and (loaded := self._unloadable()):
            model = min(loaded, key=lambda each: (each.n_uses > 0, each.used_at))
            model.is_leaving = True
            try:
                await model.is_idle.wait()
                await self._unload(model, "another model needs its memory")
            finally:
                model.is_leaving = False

    async def _unload(self, model: _PooledModel, reason: str) -> None:
        """Close an unused model. The caller holds `_changing`."""
        loaded = model.loaded
        assert loaded is not None
        assert model.n_uses == 0
        model.is_leaving = True
        try:
            await loaded.engine.shut_down(0)  # only background requests can still run
            await asyncio.to_thread(loaded.close)
            _log.info("model=%s unloaded, %s", model.name, reason)
        finally:
            model.loaded = None
            model.is_leaving = False
            model.keep_alive_seconds = self._keep_alive_seconds[model.name]
            del loaded
            await asyncio.to_thread(_collect_garbage)

    async def _watch(self) -> None:
        while True:
            self._has_idle.clear()
            seconds = min((model.seconds_left for model in self._unused()), default=math.inf)
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._has_idle.wait(),
                    None if seconds == math.inf else max(seconds, MIN_WATCH_SECONDS),
                )
            await self.unload_idle()

    def _when_idle(self) -> None:
        """Check the budget again: the size of a context is known only after its first use."""
        self._has_idle.set()
        if self._exceeds_memory:
            self._spawn(self._shrink())

    async def _shrink(self) -> None:
        async with self._changing:
            while self._exceeds_memory and (unused := self._unused()):
                oldest = min(unused, key=lambda model: model.used_at)
                await self._unload(oldest, "the models exceed their memory budget")

    def _progress_of(self, name: str) -> Callable[[float], bool]:
        shown_at = self._clock()

        def on_progress(fraction: float) -> bool:
            nonlocal shown_at
            if self._clock() - shown_at >= PROGRESS_SECONDS:
                shown_at = self._clock()
                _log.info("model=%s loading, %d%%", name, int(fraction * 100))
            return not self._is_closing

        return on_progress

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_bug)
        return task


def _load_failure(name: str, error: Exception) -> ModelLoadFailed:
    if not isinstance(error, RekindleError):
        _log.error("model=%s failed to load", name, exc_info=error)
        return ModelLoadFailed(f"The model `{name}` cannot be loaded. The log has the details.")
    _log.error("model=%s failed to load: %s", name, error.message)
    return ModelLoadFailed(f"The model `{name}` cannot be loaded: {error.message}")


def _log_bug(task: asyncio.Task[None]) -> None:
    """Log a failed unload. The requests that wait for a load get its error themselves."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if not isinstance(error, RekindleError):
        _log.error("models: unload failed", exc_info=error)


def _collect_garbage() -> None:
    """Free the reference cycles of an unloaded model.

    What the start made stays frozen: walking over it stops every reply for 0.1 to 0.3 s. Weights
    and rows are gone already, with the engine process.
    """
    gc.collect()
