"""The whole run: every workload on every server, round by round."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.bench.peers.contenders import Contender, Program, in_turn
from rekindle.bench.play import Conditions, Play
from rekindle.bench.report.results import Progress
from rekindle.bench.throughput import BurstPlan, run_bursts
from rekindle.bench.workloads.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    contenders: Sequence[Contender]
    variants: Sequence[Program] = ()  # only for workloads that measure decoding
    workloads: Sequence[Workload]
    bursts: BurstPlan | None
    conditions: Conditions
    n_rounds: int

    @property
    def n_steps(self) -> int:
        n_plays = self.n_rounds * sum(len(self.servers_for(each)) for each in self.workloads)
        return n_plays + (0 if self.bursts is None else self.bursts.n_bursts(self.contenders))

    def servers_for(self, workload: Workload) -> Sequence[Contender]:
        return (*self.contenders, *(self.variants if workload.measures_decode else ()))


async def run_all(plan: Plan, progress: Progress) -> None:
    """Run the plan. SIGTERM cancels it as Ctrl-C does, so no server is left running."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    for round_number in range(1, plan.n_rounds + 1):
        for index, workload in enumerate(plan.workloads):
            for contender in in_turn(plan.servers_for(workload), index + round_number - 1):
                await Play(contender, workload, round_number, plan.conditions, progress).run()
    if plan.bursts is not None:
        await run_bursts(plan.bursts, plan.contenders, plan.conditions, progress)
