"""`make bench`: throughput beside another llama.cpp server, and the cost of a decode step."""

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import (
    Sample,
    commit_label,
    comparison_table,
    machine_label,
    step_table,
    write_csv,
)
from bench.servers import BenchError, Contender, Flags, find_peer, running, this_server
from bench.step_cost import StepPlan, measure_steps
from bench.throughput import Plan, run_rounds
from rekindle.errors import StartupError
from rekindle.model_source import resolve_model

QUICK = Plan(n_rounds=1, prefill_words=64, decode_words=16, decode_tokens=32)

IDLE_LOAD = 0.5  # picked


def main(
    *,
    model: Annotated[str | None, typer.Option(help="GGUF file; else the embedded one.")] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="The server to compare with; else from PATH, or xllamacpp.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians over.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Else one per core.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test, not a result.")] = False,
) -> None:
    """Nothing else should run on the machine meanwhile."""
    console = Console()
    plan = QUICK if quick else Plan(n_rounds=rounds)
    if (load := os.getloadavg()[0]) > IDLE_LOAD:
        console.print(f"The load average is {load:.1f}: other work will distort the results.")
    try:
        flags = Flags(
            model=resolve_model(model).path,
            ctx_size=plan.n_ctx_needed,
            parallel=max(plan.streams),
            threads=threads or os.cpu_count() or 1,
        )
        with tempfile.TemporaryDirectory() as scratch:
            ours = this_server(flags, Path(scratch))
            peer = find_peer(llama_server, flags, Path(scratch))
            console.print(f"{machine_label()}, {flags.model.name}, {flags.threads} threads")
            console.print(f"{ours.name} {ours.version} against {peer.name} {peer.version}")
            samples = _compare(ours, peer, plan, console)
    except (BenchError, StartupError) as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False)
        sys.exit(2)
    console.print(comparison_table(samples, ours.name, peer.name))
    steps = measure_steps(flags.model, flags.threads, StepPlan(n_steps=16) if quick else StepPlan())
    console.print(step_table(steps))
    label = f"{machine_label()}-{commit_label()}{'-quick' if quick else ''}"
    console.print(f"Every round: {write_csv([*samples, *steps], label)}", soft_wrap=True)


def _compare(ours: Contender, peer: Contender, plan: Plan, console: Console) -> list[Sample]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(contender, max(plan.streams))) for contender in (ours, peer)
        ]
        progress = stack.enter_context(Progress(*columns, TimeElapsedColumn(), console=console))
        task = progress.add_task("starting", total=plan.n_bursts * len(servers))

        def show(description: str) -> None:
            progress.update(task, description=description, advance=1)

        return list(run_rounds(servers, plan, show))


if __name__ == "__main__":
    typer.run(main)
