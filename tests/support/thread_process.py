"""An engine process that is a thread of the test: real link, page, service and loop, fake backend.

It dies and hangs where a `Fate` says. A death looks as in a real process: nothing is stored, the
activity page stays as it was, and the server still reads what was sent before.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

from rekindle.cache.fingerprint import Identity
from rekindle.config.cache import CacheSettings
from rekindle.config.declare import MIB, Bytes
from rekindle.config.engine import EngineSettings
from rekindle.engine.orders import Stop
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.engine_process.service import EngineService
from rekindle.errors import StartupError
from rekindle.generation.model_state import Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling
from rekindle.link.activity_page import ActivityPage, new_page_file
from rekindle.link.messages import Begin, Load, LoadedModel
from rekindle.supervisor.engine import SupervisedEngine
from rekindle.supervisor.process import EngineProcess
from tests.support.fake_backend import FakeBackend, FakeSampler
from tests.support.fake_embedder import FakeEmbedder

_pids = count(1)
MEMORY_ONLY = CacheSettings(cache_disk=Bytes(0), cache_min_tokens=0, cache_recompute=False)


def on_disk(directory: Path) -> CacheSettings:
    return CacheSettings(
        cache_disk=Bytes(64 * MIB),
        cache_dir=directory,
        cache_min_tokens=0,
        cache_recompute=False,
    )


class Died(BaseException):
    """Unwinds the engine thread of a process that has died."""


@dataclass
class Fate:
    """When the processes of one engine die. Numbers count from 0, over all lives."""

    at_decodes: set[int] = field(default_factory=set)
    hang_at_decodes: set[int] = field(default_factory=set)
    of_tokens: set[int] = field(default_factory=set)  # in a batch
    of_inputs: set[int] = field(default_factory=set)  # tokens in the part of an embedding
    of_grammars: set[str] = field(default_factory=set)  # sources
    at_imports: set[int] = field(default_factory=set)
    at_loads: set[int] = field(default_factory=set)
    refused_loads: set[int] = field(default_factory=set)  # the file cannot be loaded
    held_loads: set[int] = field(default_factory=set)  # wait for `release`
    release: threading.Event = field(default_factory=threading.Event)
    before_death: Callable[[], None] = lambda: None  # at a decode; may wait for a write
    code: int = -signal.SIGSEGV
    lives: list["ThreadProcess"] = field(default_factory=list)
    n_decodes: int = 0
    n_imports: int = 0
    seeds: list[int | None] = field(default_factory=list)  # of the samplers, in order
    batches: list[list[int]] = field(default_factory=list)  # tokens of each decode

    @property
    def now(self) -> "ThreadProcess":
        return self.lives[-1]


class MortalBackend(FakeBackend):
    def __init__(self, fate: Fate, process: "ThreadProcess", **options: Any) -> None:
        super().__init__(**options)
        self._fate = fate
        self._process = process

    def decode(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        fate = self._fate
        self._process.live_on()
        index = fate.n_decodes
        fate.n_decodes += 1
        fate.batches.append(list(tokens))
        if index in fate.at_decodes or fate.of_tokens & set(tokens):
            fate.before_death()
            self._process.die(fate.code)
        if index in fate.hang_at_decodes:
            self._process.hang()
        super().decode(tokens, positions, slots, outputs)

    def warm_up(self) -> None:
        self._process.live_on()

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> FakeSampler:
        self._fate.seeds.append(sampling.seed)
        return super().new_sampler(
            sampling,
            tokens,
            n_reply,
            n_top_logprobs,
            n_left=n_left,
            is_landing=is_landing,
            state=state,
        )

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        index = self._fate.n_imports
        self._fate.n_imports += 1
        if index in self._fate.at_imports:
            self._process.die(self._fate.code)
        super().import_rows(slot, start, stop, rows)

    def export_rows(self, slot: int, start: int, stop: int) -> memoryview:
        self._process.live_on()
        return super().export_rows(slot, start, stop)

    def check_grammar(self, grammar: Grammar) -> None:
        if grammar.source in self._fate.of_grammars:
            self._process.die(self._fate.code)
        super().check_grammar(grammar)


class MortalEmbedder(FakeEmbedder):
    def __init__(self, fate: Fate, process: "ThreadProcess", **options: Any) -> None:
        super().__init__(**options)
        self._fate = fate
        self._process = process

    def advance(self) -> bytes | None:
        self._process.live_on()
        if self._fate.of_inputs & set(self._tokens):
            self._process.die(self._fate.code)
        return super().advance()


class _EnginePage(ActivityPage):
    """The page as the engine writes it. Nobody writes after a death."""

    is_frozen = False  # by a death
    is_stopped = False  # as a whole process that got SIGSTOP: no heartbeat

    def beat(self) -> None:
        if not self.is_frozen and not self.is_stopped:
            super().beat()

    def begin_step(self) -> None:
        if not self.is_frozen:
            super().begin_step()

    def prepare(self, number: int, preparer: int) -> None:
        if not self.is_frozen:
            super().prepare(number, preparer)

    def _set(self, activity: int, count: int) -> None:
        if not self.is_frozen:
            super()._set(activity, count)  # type: ignore[arg-type]


class _ThreadPopen:
    """The part of `subprocess.Popen` that `EngineProcess` uses, for a thread."""

    def __init__(self, process: "ThreadProcess", run: Callable[[], None]) -> None:
        self.pid = next(_pids)
        self.returncode: int | None = None
        self._process = process
        self._run = run
        self._thread = threading.Thread(target=self._live, name="thread-process", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        code = 0
        try:
            self._run()
        except Died:
            pass
        except Exception:
            logging.getLogger(__name__).exception("the fake engine process failed")
            code = 1
        self._process.end(code)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.note_death(-signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            assert timeout is not None
            raise subprocess.TimeoutExpired("thread", timeout)
        self.returncode = self._process.code
        assert self.returncode is not None
        return self.returncode


class ThreadProcess(EngineProcess):
    """Everything but its start and its native part is the real `EngineProcess`."""

    def __init__(
        self,
        fate: Fate,
        *,
        backend: dict[str, Any] | None = None,
        embedder: dict[str, Any] | None = None,
    ) -> None:
        self._fate = fate
        self._life = len(fate.lives)
        self.sock, self._theirs = socket.socketpair()
        page_file = new_page_file()
        self.page, self.engine_page = ActivityPage(page_file), _EnginePage(page_file)
        os.close(page_file)
        self.code: int | None = None
        self.is_hanging = threading.Event()
        self._lock = threading.Lock()
        self._killed = threading.Event()
        self.backend = MortalBackend(fate, self, **(backend or {}))
        self.embedder = MortalEmbedder(fate, self, **(embedder or {}))
        self.service = EngineService(
            self._theirs,
            self.engine_page,
            load=self._load,
            log_to=lambda _handler, _level: None,  # the log of the test has its own settings
            give_up=lambda: self.note_death(1),
        )
        self.was_hung = False
        self._began_at = time.monotonic()
        self._lines: deque[str] = deque(["the last line"])
        self._listener = threading.Thread(target=lambda: None)
        self._listener.start()
        self._process = cast("subprocess.Popen[bytes]", _ThreadPopen(self, self.service.run))
        self.pid = self._process.pid
        fate.lives.append(self)

    def _load(self, order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine:
        on_progress(0.5)
        if self._life in self._fate.held_loads:
            self.is_hanging.set()
            while not self._fate.release.wait(0.01):
                self.live_on()
        if self._life in self._fate.at_loads:
            self.die(self._fate.code)
        if self._life in self._fate.refused_loads:
            raise StartupError("The file is gone.")
        return loaded_engine(order, self.backend, self.embedder)

    def close(self) -> None:
        super().close()
        self._theirs.close()

    # -- dying --

    def live_on(self) -> None:
        """Unwind the thread if the process is dead."""
        if self._killed.is_set():
            raise Died

    def die(self, code: int) -> None:
        """Die on the thread of the caller."""
        self.note_death(code)
        raise Died

    def hang(self) -> None:
        """Block the caller until the process is killed."""
        self.is_hanging.set()
        self._killed.wait()
        raise Died

    def note_death(self, code: int) -> None:
        self.engine_page.is_frozen = True
        with self._lock:
            if self.code is None:
                self.code = code
        self._killed.set()
        if self.service._loop is not None:
            self.service._loop.inbox.put(Stop())  # the thread may wait for an order
        self._hang_up_theirs()

    def end(self, code: int) -> None:
        """The engine thread has ended."""
        with self._lock:
            if self.code is None:
                self.code = code
        self._hang_up_theirs()
        stores = self.service._stores
        cache = stores._cache if stores is not None else None
        if cache is not None and self._killed.is_set():
            cache.close(0.0)  # its threads would end with a real process
        if (loop := self.service._loop) is not None and self._killed.is_set():
            loop._samplers.close()  # as above
        gc.unfreeze()  # a service freezes what it has loaded

    def _hang_up_theirs(self) -> None:
        with suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)


def loaded_engine(order: Load, backend: FakeBackend, embedder: FakeEmbedder) -> LoadedEngine:
    about = LoadedModel(
        architecture="fake",
        quantization="none",
        n_params=1,
        size_bytes=1,
        n_ctx_train=backend.n_ctx,
        n_embd=embedder.n_dimensions,
        default_sampling=Sampling(),
        n_slots=backend.n_slots,
        n_cells=backend.n_cells,
        n_ctx=backend.n_ctx,
        embedding_n_ctx=embedder.n_ctx,
        embedding_n_dimensions=embedder.n_dimensions,
        ranks=embedder.ranks,
    )
    return LoadedEngine(backend, embedder, about, order.engine.queue_size, _identity)


def _identity(weights: str, _adapters: tuple[str, ...], traits: StateTraits) -> Identity:
    return Identity(
        weights=weights,
        model_class=traits.model_class,
        type_k="f16",
        type_v="f16",
        flash_attn="on",
        swa_full=False,
        rope_n_ctx=None,
        attn_rot_disable=None,
        state_version="1",
    )


def new_engine(
    fate: Fate,
    *,
    cache: CacheSettings = MEMORY_ONLY,
    queue_size: int = 32,
    hang_seconds: float = 0.0,
    backend: dict[str, Any] | None = None,
    embedder: dict[str, Any] | None = None,
) -> SupervisedEngine:
    """Return an engine whose first process has loaded its model, as a server would have it."""

    def start_process() -> ThreadProcess:
        return ThreadProcess(fate, backend=backend, embedder=embedder)

    level = logging.getLogger("rekindle").level
    load = Load(Path("fake.gguf"), EngineSettings(queue_size=queue_size), level)
    begin = Begin("weights", cache, 64 * MIB)
    process = start_process()
    model = process.load(load, lambda _: True)
    process.send(begin)
    return SupervisedEngine(
        process,
        model,
        load,
        begin,
        start_process=start_process,
        check_files=lambda: None,
        queue_size=queue_size,
        hang_seconds=hang_seconds,
    )


@asynccontextmanager
async def running(fate: Fate | None = None, **options: Any) -> AsyncIterator[SupervisedEngine]:
    engine = new_engine(fate or Fate(), **options)
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)
