"""One round of the gate: workloads on this server, and the reference beside each.

The texts are fixed, replies have a fixed length, and requests are sent one after the other.
Therefore the number of prefilled tokens is always the same.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from bench.engine_run import context_params, random_prompt, timed
from bench.gate.compare import TOTAL, GateRound
from rekindle.bench.meter import metric_in
from rekindle.bench.peers.contenders import Flags, Program
from rekindle.bench.peers.processes import started
from rekindle.bench.report.rows import busy_seconds
from rekindle.bench.stage import Stage
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import WORKLOADS, Workload
from rekindle.errors import RekindleError
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.replay.numbers import sum_if_all_known

NAMES = ("agent-loop", "regenerate-edit", "return-after-eviction")
GATE_WORKLOADS = tuple(each for each in WORKLOADS if each.name in NAMES)
TEXTS = Texts("gate", scale=0.3)
# A load gate compares the speeds of disk and model, so what it prefills depends on the machine.
OUR_ARGUMENTS = ("--no-cache-recompute",)
# Stages, and the samples of /metrics whose sum is their time.
SAMPLES = {
    "queue": ("rekindle_queue_seconds_sum",),
    "render": ("rekindle_render_seconds_sum",),
    "restore": ("rekindle_restore_seconds_sum",),
    "prefill": ("rekindle_prefill_seconds_sum",),
    "decode": ("rekindle_decode_seconds_total",),
    "export": ('rekindle_cache_save_seconds_total{tier="memory"}',),
}
PREFILL_TOKENS, DECODE_TOKENS, N_TIMES = 256, 16, 2


class GateFailed(RekindleError):
    """A workload could not be measured."""


@dataclass(frozen=True, slots=True)
class PlayedTokens:
    """What a server did in one workload."""

    n_prefilled: int
    n_generated: int
    busy_seconds: float
    stage_seconds: dict[str, float]


class Reference(Protocol):
    """Something in the same run whose time shows how fast the machine is now."""

    name: str

    async def before(self, workload: Workload) -> None: ...

    async def seconds(self, workload: Workload, ours: PlayedTokens) -> float:
        """Return the time for the same workload."""
        ...


class Conduct(NamedTuple):
    """What all plays of a run share."""

    model: Path
    threads: int
    scratch: Path


async def measured_round(
    conduct: Conduct, ours: Program, reference: Reference, show: Callable[[str], None]
) -> GateRound:
    tokens: dict[str, int] = {}
    ratios: dict[str, dict[str, float]] = {}
    for workload in GATE_WORKLOADS:
        show(f"{workload.name}: {reference.name}")
        await reference.before(workload)
        show(f"{workload.name}: {ours.name}")
        played = await play(ours, workload, conduct, OUR_ARGUMENTS)
        reference_seconds = await reference.seconds(workload, played)
        spent = {**played.stage_seconds, TOTAL: played.busy_seconds}
        tokens[workload.name] = played.n_prefilled
        ratios[workload.name] = {
            stage: seconds / reference_seconds for stage, seconds in spent.items()
        }
    return GateRound(tokens, ratios)


async def play(
    program: Program, workload: Workload, conduct: Conduct, more_arguments: tuple[str, ...] = ()
) -> PlayedTokens:
    """Play the workload on a new server with an empty folder."""
    flags = Flags(
        model=conduct.model,
        ctx_size=workload.ctx_size,
        parallel=workload.parallel,
        threads=conduct.threads,
        cache_ram_mib=workload.cache_ram_mib,
    )
    async with AsyncExitStack() as stack:
        process = await started(program, flags, conduct.scratch, stack, more_arguments)
        stage = Stage(
            url=process.url,
            process=process,
            texts=TEXTS,
            n_slots=workload.parallel,
            is_quick=True,  # a quarter of the rounds: a gate is run often
            calls_tools=False,
            on_request=lambda _name: None,
        )
        stack.push_async_callback(stage.close)
        await stage.open()
        await workload.play(stage)
        n_prefilled = await stage.n_prefilled()
        if n_prefilled is None:
            n_prefilled = stage.n_prefilled_by_replies()
        n_generated = sum_if_all_known(each.counts.n_reply for each in stage.traffic.answered)
        if len(stage.traffic.answered) < len(stage.traffic.outcomes):
            raise GateFailed(f"{workload.name} on {program.name}: a request failed.")
        if n_prefilled is None or n_generated is None:
            raise GateFailed(f"{workload.name} on {program.name}: a reply has no counts.")
        metrics = (await stage.server.http.get("/metrics")).text
        seconds = busy_seconds(stage.traffic.outcomes)
        return PlayedTokens(n_prefilled, n_generated, seconds, stage_seconds(metrics))


def stage_seconds(metrics: str) -> dict[str, float]:
    """Return the time of each stage that the server reports in the text of /metrics.

    Rendering includes tokenising, and the queue includes the lookup. A stage that did nothing
    has no sample.
    """
    if metric_in(metrics, SAMPLES["prefill"][0]) is None:
        return {}
    return {
        stage: sum(metric_in(metrics, sample) or 0.0 for sample in samples)
        for stage, samples in SAMPLES.items()
    }


class LlamaServerReference:
    """llama-server plays the same workload. Its prompt caches are on."""

    name = "llama-server"

    def __init__(self, program: Program, conduct: Conduct) -> None:
        self._program = program
        self._conduct = conduct
        self._seconds: dict[str, float] = {}

    async def before(self, workload: Workload) -> None:
        played = await play(self._program, workload, self._conduct)
        self._seconds[workload.name] = played.busy_seconds

    async def seconds(self, workload: Workload, ours: PlayedTokens) -> float:
        return self._seconds[workload.name]


class LlamaPace(NamedTuple):
    """Seconds per token of llama.cpp alone."""

    prefill: float
    decode: float

    def seconds_for(self, played: PlayedTokens) -> float:
        return played.n_prefilled * self.prefill + played.n_generated * self.decode


class LlamaReference:
    """llama.cpp alone computes some tokens before and after, in batches and one by one."""

    name = "llama.cpp"

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct
        self._before = LlamaPace(0.0, 0.0)

    async def before(self, workload: Workload) -> None:
        self._before = self._pace()

    async def seconds(self, workload: Workload, ours: PlayedTokens) -> float:
        after = self._pace()
        return statistics.mean([self._before.seconds_for(ours), after.seconds_for(ours)])

    def _pace(self) -> LlamaPace:
        params = replace(
            context_params(n_cells=2 * PREFILL_TOKENS, n_slots=1), n_threads=self._conduct.threads
        )
        with (
            closing(GgufModel(self._conduct.model, gpu_layers=-1)) as model,
            closing(LlamaBackend(model, params)) as backend,
        ):
            backend.warm_up()
            rounds = list(_paces(backend))
        return LlamaPace(min(each.prefill for each in rounds), min(each.decode for each in rounds))


def _paces(backend: LlamaBackend) -> Iterator[LlamaPace]:
    prompt = list(random_prompt(1, PREFILL_TOKENS))

    def prefill() -> None:
        places = list(range(PREFILL_TOKENS))
        backend.decode(prompt, places, [0] * PREFILL_TOKENS, [PREFILL_TOKENS - 1])
        backend.wait()

    def decode() -> None:
        for place in range(PREFILL_TOKENS, PREFILL_TOKENS + DECODE_TOKENS):
            backend.decode(prompt[:1], [place], [0], [0])
            backend.wait()

    for _ in range(N_TIMES):
        backend.clear_slot(0)
        prefill_seconds, decode_seconds = timed(prefill)[1], timed(decode)[1]
        yield LlamaPace(prefill_seconds / PREFILL_TOKENS, decode_seconds / DECODE_TOKENS)
