"""The whole run: every workload on every server, round by round, the servers taking turns."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.bench.peers.contenders import Contender
from rekindle.bench.play import Conditions, Play, Results
from rekindle.bench.report.results import BurstRow, RequestRow, WorkloadRow
from rekindle.bench.throughput import BurstPlan, run_bursts
from rekindle.bench.workloads.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    contenders: Sequence[Contender]
    workloads: Sequence[Workload]
    bursts: BurstPlan | None
    conditions: Conditions
    n_rounds: int = 1

    @property
    def n_steps(self) -> int:
        n_plays = self.n_rounds * len(self.workloads) * len(self.contenders)
        return n_plays + (0 if self.bursts is None else self.bursts.n_bursts(self.contenders))


@dataclass(slots=True)
class Progress:
    """What there is so far, so that an interruption leaves it."""

    on_step: Callable[[str], None]  # what runs now
    on_done: Callable[[], None]
    on_trouble: Callable[[str], None]  # with a burst; workloads have notes
    requests: list[RequestRow] = field(default_factory=list)
    workloads: list[WorkloadRow] = field(default_factory=list)
    bursts: list[BurstRow] = field(default_factory=list)

    def add(self, results: Results) -> None:
        self.workloads.append(results.workload)
        self.requests += results.requests
        self.on_done()


async def run_all(plan: Plan, progress: Progress) -> None:
    """Being terminated is like Ctrl-C: no server is left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    for round_number in range(1, plan.n_rounds + 1):
        for index, workload in enumerate(plan.workloads):
            for contender in in_turn(plan.contenders, index + round_number - 1):
                await _play(plan, contender, workload, round_number, progress)
    if plan.bursts is not None:
        rows = run_bursts(
            plan.bursts,
            plan.contenders,
            plan.conditions,
            on_step=progress.on_step,
            on_done=progress.on_done,
            on_trouble=progress.on_trouble,
        )
        async for row in rows:
            progress.bursts.append(row)


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Whoever goes first meets a cooler processor, so they take turns at that."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


async def _play(
    plan: Plan, contender: Contender, workload: Workload, round_number: int, progress: Progress
) -> None:
    def show(what: str) -> None:
        progress.on_step(f"{workload.name}  {contender.name}  {what}")

    play = Play(contender, workload, round_number, plan.conditions, show)
    await play.run(progress.add)
