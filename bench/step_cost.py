"""Measure a decode step apart from the model: plan, fill, sample, emit.

The engine runs as in the server: in a process of its own, with streams read on an event loop here.
The numbers include the link between the two. The time between two batches has two parts: native
code that reads every logit to choose a token (numpy or a llama.cpp sampler chain), and the rest,
which is Python. A stub in place of llama.cpp shows the loop's share alone. `arrival_us` is the time
from the end of a batch to its tokens here: sampling, one frame, and the event loop.

    python -m bench.step_cost [--quick]

Only steps count in which every sequence decodes one token.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from unittest.mock import patch

from bench.engine_run import scratch_directory
from bench.parts.clocked_engine import NOTES_VARIABLE, STUB, Visit
from bench.report import BenchRow, run_alone
from rekindle.config.cache import CacheSettings
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.generation.events import TokenSampled
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.link.messages import Begin, Load
from rekindle.models.source import resolve_model
from rekindle.server.serving import run_event_loop
from rekindle.supervisor.engine import SupervisedEngine
from rekindle.supervisor.process import EngineProcess

NAME = "step_cost"
PROMPT_TOKENS = 16
N_CELLS = 4096
GREEDY = Sampling(temperature=0)
STUB_SAMPLINGS = {"stub": GREEDY, "stub, without drafts": GREEDY}  # nothing to draft in both
SAMPLINGS = {"llama, greedy": GREEDY, "llama, sampled": Sampling(seed=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    n_sequences: tuple[int, ...] = (1, 4, 8)
    n_steps: int = 128


@dataclass(frozen=True, slots=True)
class Burst:
    """Sequences that decoded together. Times are of the clock that all processes share."""

    case: str
    n_sequences: int
    began_at: float
    ended_at: float
    arrivals: list[float]  # of tokens


class ClockedProcess(EngineProcess):
    module = "bench.parts.clocked_engine"


def main(*, quick: bool = False) -> list[BenchRow]:
    rows: list[BenchRow] = []
    plan = StepPlan(n_sequences=(1, 2), n_steps=16) if quick else StepPlan()

    async def measure() -> None:
        rows.extend(await _measure(STUB, STUB_SAMPLINGS, plan))
        rows.extend(await _measure(resolve_model(None).path, SAMPLINGS, plan))

    run_event_loop(measure())
    return rows


def measure_stub(plan: StepPlan) -> dict[int, float]:
    """Return the microseconds of Python in a step, by the number of sequences."""
    rows: list[BenchRow] = []

    async def measure() -> None:
        rows.extend(await _measure(STUB, {"stub": GREEDY}, plan))

    run_event_loop(measure())
    python = [row.value for row in rows if row.measure == "python_us"]
    return dict(zip(plan.n_sequences, python, strict=True))


async def _measure(model: Path, samplings: dict[str, Sampling], plan: StepPlan) -> list[BenchRow]:
    with scratch_directory() as folder:
        notes = folder / "notes.json"
        # The engine process does not look for modules in the folder that it is started in.
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        added = {NOTES_VARIABLE: str(notes), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with patch.dict(os.environ, added):
            engine = await asyncio.to_thread(_start, model, max(plan.n_sequences))
        engine.start()
        bursts = [
            await _burst(engine, name, sampling, n_sequences, plan.n_steps)
            for name, sampling in samplings.items()
            for n_sequences in plan.n_sequences
        ]
        await asyncio.to_thread(engine.close)
        visits = [Visit(*each) for each in json.loads(notes.read_text())]
    return [row for burst in bursts for row in _summary(visits, burst)]


def _start(model: Path, n_slots: int) -> SupervisedEngine:
    settings = EngineSettings(ctx_size=N_CELLS, parallel=n_slots, threads=os.cpu_count())
    load = Load(model, settings, logging.WARNING)
    begin = Begin("bench", CacheSettings(cache_disk=Bytes(0)), 0)
    process = ClockedProcess()
    loaded = process.load(load, lambda _: True)
    process.send(begin)
    return SupervisedEngine(
        process,
        loaded,
        load,
        begin,
        start_process=ClockedProcess,
        check_files=lambda: None,
        queue_size=0,
        hang_seconds=0.0,
    )


async def _burst(
    engine: SupervisedEngine, name: str, sampling: Sampling, n_sequences: int, n_steps: int
) -> Burst:
    began_at = time.perf_counter()
    arrivals: list[float] = []
    requests = [
        _request(number, sampling, n_steps, speculate="without drafts" not in name)
        for number in range(n_sequences)
    ]
    await asyncio.gather(*(_read_stream(engine, each, arrivals) for each in requests))
    case = f"{name}, {n_sequences} sequence{'s' if n_sequences > 1 else ''}"
    return Burst(case, n_sequences, began_at, time.perf_counter(), arrivals)


async def _read_stream(
    engine: SupervisedEngine, request: GenerationRequest, arrivals: list[float]
) -> None:
    async for event in engine.submit(request):
        if isinstance(event, TokenSampled):
            arrivals.append(time.perf_counter())


def _request(
    number: int, sampling: Sampling, n_steps: int, *, speculate: bool
) -> GenerationRequest:
    return GenerationRequest(
        id=f"step-{number}",
        prompt=tuple(range(100 + number, 100 + number + PROMPT_TOKENS)),
        boundaries=(),
        sampling=sampling,
        max_tokens=n_steps,
        cache_prompt=False,
        speculate=speculate,
    )


def _summary(visits: Sequence[Visit], burst: Burst) -> list[BenchRow]:
    """Only steps between two batches in which every sequence decoded one token."""
    own = [visit for visit in visits if burst.began_at <= visit.entered <= burst.ended_at]
    steps = [
        (visit.left - visit.entered, following.entered - visit.left, following.choosing)
        for visit, following in pairwise(own)
        if visit.n_tokens == following.n_tokens == burst.n_sequences
    ]
    arrived = [
        min(later) - visit.left
        for visit in own
        if visit.n_tokens == burst.n_sequences
        and (later := [each for each in burst.arrivals if each > visit.left])
    ]
    values = {
        "step_us": median(inside + outside for inside, outside, _ in steps),
        "in_llama_decode_us": median(inside for inside, _, _ in steps),
        "reading_logits_us": median(choosing for _, _, choosing in steps),
        "python_us": median(outside - choosing for _, outside, choosing in steps),
        "arrival_us": median(arrived),
    }
    return [
        BenchRow(NAME, burst.case, measure, seconds * 1e6) for measure, seconds in values.items()
    ]


if __name__ == "__main__":
    run_alone(main)
