"""The lives of an engine process: it is connected, watched, and started again when it dies."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from rekindle.errors import EngineDied, RekindleError
from rekindle.generation.status import DeathCause, ProcessState, ProcessStatus
from rekindle.link.messages import (
    Begin,
    Load,
    LoadedModel,
    Order,
    Report,
    SetMemoryBudget,
    StopEngine,
)
from rekindle.supervisor.link import EngineLink, connect
from rekindle.supervisor.process import START_SECONDS, Death, EngineProcess
from rekindle.supervisor.restarts import HangWatch, Restarts

T = TypeVar("T")
_log = logging.getLogger("rekindle.engine")

LOOK_SECONDS = 0.5  # between two looks at a running engine, at most; picked
LOAD_HANG_SECONDS = 30.0  # without a heartbeat while a process loads, at least; picked
STOP_SECONDS = 20.0  # to store rows (10 s in the engine) and send the last reports


class Listener(Protocol):
    """Gets what happens, on the event loop."""

    def on_connected(self) -> None:
        """A process has loaded the model and takes orders."""
        ...

    def on_report(self, report: Report) -> None: ...

    def on_death(self, death: Death) -> None:
        """The process has died. Another one will be started."""
        ...

    def on_failed(self) -> None:
        """The process died several times in a row."""
        ...


class EngineLives:
    """`process` has loaded the model. `load` and `begin` start the next one."""

    def __init__(
        self,
        process: EngineProcess,
        load: Load,
        begin: Begin,
        listener: Listener,
        *,
        start_process: Callable[[], EngineProcess],
        check_files: Callable[[], None],  # raises StartupError if the model's files have changed
        hang_seconds: float,  # 0: an engine that makes no step is left alone
    ) -> None:
        self._start_process = start_process
        self._check_files = check_files
        self._process: EngineProcess | None = process
        self._load = load
        self._begin = begin
        self._listener = listener
        self._hang_seconds = hang_seconds
        self._link: EngineLink | None = None
        self._has_started = False  # the process that is served has warmed up
        self.restarts = Restarts()
        self.state = ProcessState.RUNNING
        self._is_closing = False
        self._closing = asyncio.Event()  # the same, for the event loop
        self._has_ended = threading.Event()  # no process is served any more
        # Of its own: requests that wait for this engine may occupy every shared thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-lives")
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    def send(self, order: Order) -> None:
        """Send an order. Lost while no process is connected: `on_connected` sends again."""
        if self._link is not None:
            self._link.send(order)

    def status(self) -> ProcessStatus:
        return ProcessStatus(
            state=self.state,
            pid=self._process.pid if self._process is not None else None,
            restarts=dict(self.restarts.by_cause),
            last_death=self.restarts.last_death,
        )

    def start(self, on_end: Callable[[], None]) -> None:
        """Serve the process from now on. `on_end` is called after the last life."""
        self._event_loop = asyncio.get_running_loop()
        self._task = self._event_loop.create_task(self._live())

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("engine: supervision failed", exc_info=error)
            on_end()
            self._thread.shutdown(wait=False)
            self._has_ended.set()

        self._task.add_done_callback(ended)

    def set_memory_budget(self, n_bytes: int) -> None:
        self._begin = msgspec.structs.replace(self._begin, memory_bytes=n_bytes)

    def close(self) -> None:
        """Let the process store what it holds and end. Blocks; not on the event loop's thread."""
        self._is_closing = True
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stop)
            if not self._has_ended.wait(STOP_SECONDS) and self._process is not None:
                _log.warning("engine: process does not end, killed pid=%d", self._process.pid)
                self._process.kill()
                self._has_ended.wait(STOP_SECONDS)  # the last reports have been read
        elif self._process is not None:
            self._process.hang_up()
            self._process.wait(STOP_SECONDS)
        if self._process is not None:
            self._process.close()

    def _stop(self) -> None:
        self._closing.set()
        if self._link is not None:
            self._link.send(StopEngine())
        elif self._process is not None:
            self._process.kill()  # it is loading

    async def _live(self) -> None:
        process = self._process
        while process is not None:
            try:
                await self._serve(process)
            except Exception:
                _log.exception("engine: supervision failed, the process is ended")
                process.kill()
            death = await self._in_thread(process.death)
            self._link = None
            if self._is_closing:
                return
            self._process = None
            self._note_death(process, death)
            await self._in_thread(process.close)
            process = await self._start_again()

    async def _serve(self, process: EngineProcess) -> None:
        """Connect a process that has loaded its model, and serve it until it ends."""
        self._has_started = False  # before the link: its first report may say so
        link = await connect(process, self._listener.on_report)
        self._link = link
        if self.state is ProcessState.RESTARTING:
            self.state = ProcessState.RUNNING
        if self._is_closing:
            self._stop()
        try:
            # The budget may have changed since the process was started.
            link.send(SetMemoryBudget(self._begin.memory_bytes))
            self._listener.on_connected()
            await self._watch(process, link.closed, self._hang_seconds)
        except BaseException:
            link.abort()  # also when the event loop ends: it would wait for an open link
            raise

    async def _in_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    def note_started(self) -> None:
        """Note that the engine has warmed up: requests are taken again."""
        self._has_started = True
        self.state = ProcessState.RUNNING

    def note_success(self) -> None:
        """Note that the engine does its work."""
        self.restarts.note_success()
        self.state = ProcessState.RUNNING

    async def _watch(
        self, process: EngineProcess, ended: "asyncio.Future[Any]", hang_seconds: float
    ) -> None:
        """Wait until the process has ended. Kill it if it hangs."""
        look_seconds = LOOK_SECONDS
        watch: HangWatch | None = None
        if hang_seconds:
            look_seconds = min(LOOK_SECONDS, hang_seconds / 4)
            watch = HangWatch(seconds=hang_seconds, look_seconds=look_seconds)
        n_looks = 0
        while not ended.done():
            await asyncio.wait([ended], timeout=look_seconds)
            if watch is None or ended.done():
                continue
            n_looks = 0 if self._has_started else n_looks + 1
            if watch.is_hung(process.page.pulse()) or n_looks * look_seconds > START_SECONDS:
                process.kill(is_hung=True)
                watch = None

    def _note_death(self, process: EngineProcess, death: Death) -> None:
        self.restarts.note_death(death)
        self.state = self.restarts.state
        _log.error(
            "engine: process died cause=%s pid=%d lived_s=%.0f steps=%d activity=%s: %s%s",
            death.cause.value,
            process.pid,
            death.lived_seconds,
            death.doing.n_steps,
            death.doing.activity.name.lower(),
            death,
            f"\n{death.last_words}" if death.last_words else "",
        )
        self._listener.on_death(death)
        self.state = self.restarts.state
        if self.state is ProcessState.FAILED:
            self._listener.on_failed()

    async def _start_again(self) -> EngineProcess | None:
        """Start the process until it has loaded its model; None: the engine is closing."""
        while not await self._pause():
            process = None
            try:
                process = self._process = await self._in_thread(self._start_process)
                await self._load_model(process)
            except Exception as error:
                self._process = None
                if not self._is_closing:
                    await self._note_failed_start(process, error)
                if process is not None:
                    await self._in_thread(process.close)
            else:
                _log.info("engine: process started again pid=%d", process.pid)
                return process
        return None

    async def _pause(self) -> bool:
        """Wait until the next start is due. Return True if the engine is closing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.restarts.delay_seconds):
                await self._closing.wait()
        return self._is_closing

    async def _load_model(self, process: EngineProcess) -> None:
        """Raise EngineDied, StartupError, or ShuttingDown while the engine is closing."""
        if self._is_closing:
            process.kill()
        loading = asyncio.ensure_future(self._in_thread(lambda: self._load_into(process)))
        # Imports take a second or more, without a heartbeat.
        hang_seconds = self._hang_seconds and max(self._hang_seconds, LOAD_HANG_SECONDS)
        await self._watch(process, loading, hang_seconds)
        loading.result()

    async def _note_failed_start(self, process: EngineProcess | None, error: Exception) -> None:
        if process is not None and isinstance(error, EngineDied):
            self._note_death(process, await self._in_thread(process.death))
            return
        reason = error.message if isinstance(error, RekindleError) else f"it cannot start: {error}"
        _log.error("engine: process cannot load the model: %s", reason)
        self.restarts.note_failed_start(DeathCause.EXIT, reason.rstrip("."))
        self.state = self.restarts.state
        if self.state is ProcessState.FAILED:
            self._listener.on_failed()

    def _load_into(self, process: EngineProcess) -> LoadedModel:
        # Before and after: other weights would get the rows of these.
        self._check_files()
        model = process.load(self._load, lambda _: not self._is_closing)
        self._check_files()
        process.send(self._begin)
        return model
