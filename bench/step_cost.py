"""Measure a decode step apart from the model: plan, fill, sample, emit.

The engine runs as in the server: in its own thread, with streams read on an event loop. The time
between two batches has two parts: native code that reads every logit to choose a token (numpy or
a llama.cpp sampler chain), and the rest, which is Python. A stub in place of llama.cpp shows the
loop's share alone.

    python -m bench.step_cost [--quick]

Only steps count in which every sequence decodes one token.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from bench.engine_run import context_params
from bench.report import BenchRow, run_alone
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend, Embedder
from rekindle.engine.handle import EngineHandle
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.request import GenerationRequest, Grammar, Sampling
from rekindle.llama import context, sampler
from rekindle.llama.context import LlamaBackend
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model
from rekindle.server import run_event_loop

NAME = "step_cost"
PROMPT_TOKENS = 16
STUB_SECONDS = 0.005  # long enough for the event loop to run, as beside llama.cpp
SAMPLINGS = {
    "llama, greedy": Sampling(temperature=0),
    "llama, sampled": Sampling(seed=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    n_sequences: tuple[int, ...] = (1, 4, 8)
    n_steps: int = 128


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


def main(*, quick: bool = False) -> list[BenchRow]:
    rows: list[BenchRow] = []
    plan = StepPlan(n_sequences=(1, 2), n_steps=16) if quick else StepPlan()

    async def measure() -> None:
        rows.extend(await _measure(resolve_model(None).path, plan))

    run_event_loop(measure())
    return rows


async def _measure(model: Path, plan: StepPlan) -> list[BenchRow]:
    n_slots = max(plan.n_sequences)
    visits = Visits()
    # The stub has only the methods that a decode step uses.
    stub = cast(Backend, _StubBackend(n_slots, visits))
    rows = await _measure_backend(stub, visits, {"stub": Sampling(temperature=0)}, plan)
    loaded = GgufModel(model, gpu_layers=-1)
    with _noted_by(visits):
        backend = LlamaBackend(loaded, context_params(n_cells=4096, n_slots=n_slots))
        rows += await _measure_backend(backend, visits, SAMPLINGS, plan)
    loaded.close()
    return rows


async def _measure_backend(
    backend: Backend, visits: Visits, samplings: dict[str, Sampling], plan: StepPlan
) -> list[BenchRow]:
    backend.eog_tokens = frozenset()  # no sequence ends early
    embedder = cast(Embedder, SimpleNamespace(rest=lambda: None))  # never asked to compute
    handle = EngineHandle(backend, _no_cache, queue_size=0, embedder=embedder)
    handle.start()
    rows: list[BenchRow] = []
    for name, sampling in samplings.items():
        for n_sequences in plan.n_sequences:
            visits.done.clear()
            streams = [
                _read_stream(handle, _request(number, sampling, plan.n_steps))
                for number in range(n_sequences)
            ]
            await asyncio.gather(*streams)
            rows += _summary(visits.done, name, n_sequences)
    handle.close()
    return rows


def _no_cache(_traits: StateTraits, _notify: Callable[[], None]) -> PrefixCache:
    return PrefixCache.switched_off("A step is measured.")


async def _read_stream(handle: EngineHandle, request: GenerationRequest) -> None:
    async for _ in handle.submit(request):
        pass


def _request(number: int, sampling: Sampling, n_steps: int) -> GenerationRequest:
    return GenerationRequest(
        id=f"step-{number}",
        prompt=tuple(range(100 + number, 100 + number + PROMPT_TOKENS)),
        boundaries=(),
        sampling=sampling,
        max_tokens=n_steps,
    )


def _summary(visits: Sequence[Visit], name: str, n_sequences: int) -> list[BenchRow]:
    """Only steps between two batches in which every sequence decoded one token."""
    steps = [
        (visit.left - visit.entered, following.entered - visit.left, following.choosing)
        for visit, following in pairwise(visits)
        if visit.n_tokens == following.n_tokens == n_sequences
    ]
    case = f"{name}, {n_sequences} sequence{'s' if n_sequences > 1 else ''}"
    values = {
        "step_us": median(inside + outside for inside, outside, _ in steps),
        "in_llama_decode_us": median(inside for inside, _, _ in steps),
        "reading_logits_us": median(choosing for _, _, choosing in steps),
        "python_us": median(outside - choosing for _, outside, choosing in steps),
    }
    return [BenchRow(NAME, case, measure, seconds * 1e6) for measure, seconds in values.items()]


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
    def close(self) -> None:
        pass


class _StubBackend:
    n_cells = n_ctx = 4096
    n_ubatch = 512
    pays_for_holes = False

    traits = StateTraits(
        ModelClass.DENSE, has_rows=True, has_checkpoints=False, off_because="It is a stub."
    )

    def check_grammar(self, grammar: Grammar) -> None:
        pass

    def __init__(self, n_slots: int, visits: Visits) -> None:
        self.n_slots = n_slots
        self.eog_tokens: frozenset[int] = frozenset()
        self._visits = visits

    def decode(self, tokens: Sequence[int], *_rest: Sequence[int]) -> None:
        self._visits.enter(len(tokens))
        time.sleep(STUB_SECONDS)
        self._visits.leave()

    def sample(self, samplers: Sequence[Any], rows: Sequence[int]) -> list[TokenSampled]:
        return [TokenSampled(1) for _ in rows]

    def new_sampler(self, *_arguments: object) -> _StubSampler:
        return _StubSampler()

    def warm_up(self) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    run_alone(main)
