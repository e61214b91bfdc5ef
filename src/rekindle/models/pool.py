"""Which models are loaded: each on first use, until others need its memory or nobody uses it.

Everything here runs on the event loop; what takes long is done in worker threads, one load or
unload at a time, in the order of arrival. A model that is in use is never unloaded.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from rekindle.api.models import (
    Lease,
    ListedModel,
    ModelInUse,
    ModelLoadFailed,
    ModelState,
    UnknownModel,
)
from rekindle.chat.responder import Responder
from rekindle.errors import RekindleError, ShuttingDown
from rekindle.generation.status import EngineStatus
from rekindle.models.card import ModelCard

_log = logging.getLogger("rekindle.models")

PROGRESS_SECONDS = 5.0  # between two lines about one load; picked
MIN_WATCH_SECONDS = 0.01  # picked


class PooledModel(Protocol):
    """A model that is loaded."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def responder(self) -> Responder: ...

    @property
    def n_bytes(self) -> int: ...

    def start(self) -> None:
        """On the event loop, once."""
        ...

    def status(self) -> EngineStatus: ...

    async def shut_down(self, grace_seconds: float) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None:
        """Blocking."""
        ...


class Loader(Protocol):
    """Blocking, in worker threads. Raises RekindleError."""

    def n_bytes(self, name: str) -> int:
        """How much memory it will take, about."""
        ...

    def load(self, name: str, on_progress: Callable[[float], bool]) -> PooledModel:
        """Gives up when `on_progress` says False."""
        ...


class _Entry:
    """One model, loaded or not, and who uses it."""

    def __init__(self, name: str, clock: Callable[[], float], on_idle: Callable[[], None]) -> None:
        self.name = name
        self.created = int(time.time())
        self.loaded: PooledModel | None = None
        self.loading: asyncio.Task[None] | None = None
        self.is_leaving = False  # nobody new may use it
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

    @property
    def state(self) -> ModelState:
        if self.loading is not None:
            return ModelState.LOADING
        return ModelState.UNLOADED if self.loaded is None else ModelState.LOADED


class ModelPool:
    """`default`: who answers when no model is named; None: the last one used, or the first."""

    def __init__(
        self,
        names: Sequence[str],
        loader: Loader,
        *,
        default: str | None,
        memory_bytes: int,
        keep_alive_seconds: float = 0.0,  # 0: for ever
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries = {name: _Entry(name, clock, self._notice_idle) for name in names}
        self._loader = loader
        self._default = default
        self._memory_bytes = memory_bytes
        self._keep_alive_seconds = keep_alive_seconds
        self._clock = clock
        self._changing = asyncio.Lock()  # held by whoever loads or unloads
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, name: str, loaded: PooledModel) -> None:
        """Before `start`: one that is loaded already."""
        self._entries[name].loaded = loaded

    def start(self) -> None:
        for entry in self._loaded():
            assert entry.loaded is not None
            entry.used_at = self._clock()
            entry.loaded.start()
        if self._keep_alive_seconds:
            self._spawn(self._watch())

    async def lease(self, name: str | None) -> Lease:
        entry = self._wanted(name)
        while True:
            if self._is_closing:
                raise ShuttingDown("The server is shutting down.")
            if entry.loaded is not None and not entry.is_leaving:
                return Lease(entry.loaded.responder, entry.loaded.card, entry)
            await self._load(entry)

    def listed(self) -> list[ListedModel]:
        return [_listed(entry) for entry in self._entries.values()]

    def find(self, name: str) -> ListedModel:
        return _listed(self._exactly(name))

    async def load(self, name: str) -> None:
        entry = self._exactly(name)
        if entry.loaded is None or entry.is_leaving:
            await self._load(entry)

    async def unload(self, name: str) -> None:
        entry = self._exactly(name)
        _refuse_in_use(entry)
        async with self._changing:
            _refuse_in_use(entry)
            if entry.loaded is not None:
                await self._close(entry, "it was asked for")

    def status(self, name: str | None) -> EngineStatus | None:
        loaded = self._wanted(name).loaded
        return loaded.status() if loaded is not None else None

    def statuses(self) -> list[EngineStatus]:
        """Of all that are loaded."""
        return [entry.loaded.status() for entry in self._loaded() if entry.loaded is not None]

    async def unload_idle(self) -> None:
        """Those that nobody has used for as long as they are kept."""
        for entry in self._loaded():
            async with self._changing:
                if self._is_expired(entry):
                    await self._close(entry, f"idle for {self._keep_alive_seconds:g} s")

    async def shut_down(self, grace_seconds: float) -> None:
        self._is_closing = True
        loaded = [entry.loaded for entry in self._loaded() if entry.loaded is not None]
        await asyncio.gather(*(each.shut_down(grace_seconds) for each in loaded))

    def cut(self) -> None:
        self._is_closing = True
        for entry in self._loaded():
            if entry.loaded is not None:
                entry.loaded.cut()

    async def flush(self) -> None:
        """After `shut_down`: all store what they hold and are closed, side by side."""
        closing: list[PooledModel] = []
        for entry in self._loaded():
            if entry.loaded is not None and not entry.is_leaving:  # or it is being closed
                closing.append(entry.loaded)
                entry.loaded = None
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in closing))

    def close(self) -> None:
        """After the event loop. Blocking."""
        self._is_closing = True
        for entry in self._loaded():
            if entry.loaded is not None:
                entry.loaded.close()
                entry.loaded = None

    def _wanted(self, name: str | None) -> _Entry:
        """Where there is one model, it answers to every name: clients send fixed ones."""
        if len(self._entries) == 1:
            return next(iter(self._entries.values()))
        return self._exactly(name) if name else self._default_entry()

    def _exactly(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UnknownModel(name, list(self._entries))
        return self._entries[name]

    def _default_entry(self) -> _Entry:
        if self._default is not None:
            return self._entries[self._default]
        present = self._loaded() or list(self._entries.values())[:1]
        return max(present, key=lambda entry: entry.used_at)

    def _loaded(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.loaded is not None]

    @property
    def _n_bytes(self) -> int:
        return sum(entry.loaded.n_bytes for entry in self._entries.values() if entry.loaded)

    async def _load(self, entry: _Entry) -> None:
        """Whoever comes first starts it; all wait for the same outcome."""
        if entry.loading is None:
            entry.loading = self._spawn(self._load_now(entry))
        await asyncio.shield(entry.loading)

    async def _load_now(self, entry: _Entry) -> None:
        try:
            async with self._changing:
                n_bytes = await asyncio.to_thread(self._loader.n_bytes, entry.name)
                await self._make_room(n_bytes)
                _log.info("model=%s loading", entry.name)
                began = self._clock()
                loaded = await asyncio.to_thread(
                    self._loader.load, entry.name, self._progress_of(entry.name)
                )
                loaded.start()
                entry.loaded = loaded
                entry.used_at = self._clock()
                _log.info("model=%s loaded in %.1f s", entry.name, entry.used_at - began)
        except Exception as error:
            if self._is_closing:
                raise ShuttingDown("The server is shutting down.") from error
            raise _load_failure(entry.name, error) from error
        finally:
            entry.loading = None

    async def _make_room(self, n_bytes: int) -> None:
        """Who was used last stays longest. One alone may be larger than all the memory."""
        while self._n_bytes + n_bytes > self._memory_bytes and (present := self._loaded()):
            entry = min(present, key=lambda each: (each.n_uses > 0, each.used_at))
            entry.is_leaving = True  # who asks for it now waits its turn
            try:
                await entry.is_idle.wait()
                await self._close(entry, "another needs its memory")
            finally:
                entry.is_leaving = False

    async def _close(self, entry: _Entry, why: str) -> None:
        """By whoever holds `_changing`, when nobody uses the model."""
        loaded = entry.loaded
        assert loaded is not None
        assert entry.n_uses == 0
        entry.is_leaving = True
        try:
            await loaded.shut_down(0)  # what it computes ahead, it need not
            await asyncio.to_thread(loaded.close)
            _log.info("model=%s unloaded, %s", entry.name, why)
        finally:
            entry.loaded = None
            entry.is_leaving = False
            del loaded
            await asyncio.to_thread(_collect)

    def _is_expired(self, entry: _Entry) -> bool:
        is_unused = entry.loaded is not None and entry.n_uses == 0
        return is_unused and self._clock() - entry.used_at >= self._keep_alive_seconds

    async def _watch(self) -> None:
        while True:
            idle = [entry for entry in self._loaded() if entry.n_uses == 0]
            kept_for = [entry.used_at + self._keep_alive_seconds - self._clock() for entry in idle]
            seconds = min([*kept_for, self._keep_alive_seconds])
            await asyncio.sleep(max(seconds, MIN_WATCH_SECONDS))
            await self.unload_idle()

    def _notice_idle(self) -> None:
        """How much memory a context takes shows only when it is there."""
        if len(self._loaded()) > 1 and self._n_bytes > self._memory_bytes:
            self._spawn(self._shrink())

    async def _shrink(self) -> None:
        async with self._changing:
            while len(self._loaded()) > 1 and self._n_bytes > self._memory_bytes:
                idle = [entry for entry in self._loaded() if entry.n_uses == 0]
                if not idle:
                    return
                oldest = min(idle, key=lambda entry: entry.used_at)
                await self._close(oldest, "the models take more memory than they may")

    def _progress_of(self, name: str) -> Callable[[float], bool]:
        shown_at = self._clock()

        def note(fraction: float) -> bool:
            nonlocal shown_at
            if self._clock() - shown_at >= PROGRESS_SECONDS:
                shown_at = self._clock()
                _log.info("model=%s loading, %d%%", name, int(fraction * 100))
            return not self._is_closing

        return note

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_note_outcome)
        return task


def _listed(entry: _Entry) -> ListedModel:
    card = entry.loaded.card if entry.loaded is not None else None
    return ListedModel(entry.name, entry.created, entry.state, card)


def _refuse_in_use(entry: _Entry) -> None:
    if entry.loading is not None:
        raise ModelInUse(f"The model `{entry.name}` is being loaded.")
    if entry.n_uses:
        raise ModelInUse(f"The model `{entry.name}` answers {entry.n_uses} requests.")


def _load_failure(name: str, error: Exception) -> ModelLoadFailed:
    if not isinstance(error, RekindleError):
        _log.error("model=%s failed to load", name, exc_info=error)
        return ModelLoadFailed(f"The model `{name}` cannot be loaded. The log has the details.")
    _log.error("model=%s failed to load: %s", name, error.message)
    return ModelLoadFailed(f"The model `{name}` cannot be loaded: {error.message}")


def _note_outcome(task: asyncio.Task[None]) -> None:
    """Whoever waited for a load was told; an unload has nobody to tell."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if not isinstance(error, RekindleError):
        _log.error("a model could not be unloaded", exc_info=error)


def _collect() -> None:
    """What a model held is in cycles, and may be many gigabytes.

    The collector looks past what was frozen, as all was when the cache of the model was opened.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
