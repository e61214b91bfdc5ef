"""The engine process of `bench.step_cost`: it notes each batch and writes the notes at its end.

`bench.step_cost` starts it in place of `rekindle.engine_process`. The variable NOTES_VARIABLE of
its environment names the file for the notes. A model named `stub` is a stub in place of llama.cpp.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from rekindle.cache.fingerprint import Identity
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine_process.__main__ import SWITCH_SECONDS
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.engine_process.loading import load
from rekindle.engine_process.service import EngineService
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.request import Grammar, Sampling
from rekindle.link.activity_page import ActivityPage
from rekindle.link.messages import Load, LoadedModel
from rekindle.llama import context
from rekindle.llama.library import lib
from rekindle.llama.sampling import sampler

NOTES_VARIABLE = "REKINDLE_BENCH_NOTES"
STUB = Path("stub")
STUB_SECONDS = 0.005  # long enough for the server's process to run, as beside llama.cpp


class Visit(NamedTuple):
    """One batch inside llama.cpp."""

    n_tokens: int
    entered: float
    left: float
    choosing: float  # seconds in native sampling before it


@dataclass(slots=True)
class Visits:
    """Filled on the engine's thread; read when nothing runs."""

    done: list[Visit] = field(default_factory=list)
    n_tokens: int = 0
    entered: float = 0.0
    choosing: float = 0.0

    def enter(self, n_tokens: int) -> None:
        self.n_tokens, self.entered = n_tokens, time.perf_counter()

    def leave(self) -> None:
        left = time.perf_counter()
        self.done.append(Visit(self.n_tokens, self.entered, left, self.choosing))
        self.choosing = 0.0

    def clocked(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = choose(*arguments)
            self.choosing += time.perf_counter() - began
            return result

        return run


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    page = ActivityPage(int(sys.argv[2]))
    sys.setswitchinterval(SWITCH_SECONDS)
    visits = Visits()
    with _noted_by(visits):
        EngineService(
            sock,
            page,
            load=_Loader(visits),
            log_to=lambda _handler, _level: None,
            give_up=lambda: os._exit(1),
        ).run()
    Path(os.environ[NOTES_VARIABLE]).write_text(json.dumps(visits.done))
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Loader:
    _visits: Visits

    def __call__(self, order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine:
        if order.path == STUB:
            return _stub_engine(order.engine.parallel, self._visits)
        loaded = load(order, on_progress=on_progress)
        loaded.backend.eog_tokens = frozenset()  # no sequence ends early
        return loaded


def _stub_engine(n_slots: int, visits: Visits) -> LoadedEngine:
    # The stubs have only what a decode step uses.
    stub = _StubBackend(n_slots, visits)
    no_embedder = SimpleNamespace(rest=lambda: None, n_ctx=0, n_dimensions=0, ranks=False)
    embedder = cast(Embedder, no_embedder)
    about = LoadedModel(
        architecture="stub",
        quantization="",
        n_params=0,
        size_bytes=0,
        n_embd=1,
        n_ctx_train=stub.n_ctx,
        default_sampling=Sampling(),
        n_slots=n_slots,
        n_cells=stub.n_cells,
        n_ctx=stub.n_ctx,
        embedding_n_ctx=0,
        embedding_n_dimensions=0,
        ranks=False,
    )
    return LoadedEngine(cast(Backend, stub), embedder, about, 0, _stub_identity)


def _stub_identity(weights: str, _adapters: tuple[str, ...], traits: StateTraits) -> Identity:
    return Identity(
        weights=weights,
        model_class=traits.model_class,
        type_k="f16",
        type_v="f16",
        flash_attn="on",
        swa_full=False,
        rope_n_ctx=None,
        attn_rot_disable=None,
        state_version="",
    )


@contextmanager
def _noted_by(visits: Visits) -> Iterator[None]:
    """Time llama.cpp's own functions: a backend's `decode` also fills the batch."""
    decode, synchronize = lib.llama_decode, lib.llama_synchronize

    def timed_decode(native: Any, batch: Any) -> int:
        visits.enter(batch.n_tokens)
        status: int = decode(native, batch)
        synchronize(native)
        visits.leave()
        return status

    choosers = ((context, "greedy_tokens"), (sampler, "sample_holding_gil"))
    with ExitStack() as patches:
        patches.enter_context(patch.object(lib, "llama_decode", timed_decode))
        for module, name in choosers:
            clocked = visits.clocked(getattr(module, name))
            patches.enter_context(patch.object(module, name, clocked))
        yield


class _StubSampler:
    def forced_tokens(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class _StubBackend:
    n_cells = n_ctx = 2**16  # room for 64 sequences
    n_ubatch = 512
    n_draft_rows = 64
    pays_for_holes = False
    on_gpu = False

    traits = StateTraits(
        ModelClass.DENSE, has_rows=True, has_checkpoints=False, off_because="It is a stub."
    )

    def prepare_grammars(self) -> None:
        pass

    def check_grammar(self, grammar: Grammar) -> None:
        pass

    def __init__(self, n_slots: int, visits: Visits) -> None:
        self.n_slots = n_slots
        self.eog_tokens: frozenset[int] = frozenset()
        self._visits = visits
        self._tokens = count(1)  # never the same twice, so that nothing can be drafted

    def decode(self, tokens: Sequence[int], *_rest: Sequence[int]) -> None:
        self._visits.enter(len(tokens))
        time.sleep(STUB_SECONDS)
        self._visits.leave()

    def wait(self) -> None:
        pass

    def sample(self, samplers: Sequence[Any], rows: Sequence[int]) -> list[TokenSampled]:
        return [TokenSampled(next(self._tokens)) for _ in rows]

    def new_sampler(self, *_arguments: object, **_options: object) -> _StubSampler:
        return _StubSampler()

    def warm_up(self) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    main()
