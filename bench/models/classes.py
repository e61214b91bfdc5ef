"""Run the workloads of `rekindle bench` on every class of model state, beside llama-server.

    python -m bench.models.classes [--class NAME] [--only WORKLOAD] [--scale F]
                                   [--llama-server PATH]

The models have a few megabytes of random weights. That is enough: how much of a prompt can be
reused depends on the class of state alone. Times mean nothing here. The exit code is 1 if a target
is missed.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.engine_run import scratch_directory
from bench.models.tiny import write_tiny_model_of_real_words
from bench.report import CONSOLE
from rekindle.bench.peers.contenders import OURS, Contender, find_contenders
from rekindle.bench.play import Conditions
from rekindle.bench.report.results import Progress, WorkloadRow
from rekindle.bench.report.tables import markdown_table
from rekindle.bench.run import Plan, run_all
from rekindle.bench.workloads.recorded import recorded_workload
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import WORKLOADS, Workload
from rekindle.errors import StartupError
from rekindle.replay.numbers import count_text, decimal_text
from tests.support.tiny_models import TinyArchitecture

CLASSES = {
    "dense": TinyArchitecture.LLAMA,
    "sliding-window": TinyArchitecture.GEMMA3,
    "hybrid": TinyArchitecture.QWEN35,
    "hybrid-sliding-window": TinyArchitecture.LFM2_SWA,
    "recurrent": TinyArchitecture.MAMBA2,
}
# Highest amplification. With checkpoints, a prompt that diverges between two of them resumes from
# the first.
LIMITS = {name: 1.02 if name == "dense" else 1.10 for name in CLASSES}
KNOWN = (*WORKLOADS, recorded_workload(None))
SCALE = 0.3
OTHER_PEERS = ("xllamacpp", "llama_cpp.server")
NONCE = "5eed"  # every server and folder is new: no cache has seen the prompts


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    workloads = [each for each in KNOWN if not options.only or each.name in options.only]
    try:
        contenders = find_contenders(
            llama_server=options.llama_server, remotes=(), without=OTHER_PEERS
        )
    except StartupError as error:
        CONSOLE.print(error.message, markup=False)
        return 2
    misses: list[str] = []
    for name in options.classes or CLASSES:
        rows = measure(name, workloads, contenders, options.scale)
        CONSOLE.print(f"### {name}\n\n{table(rows)}\n", markup=False, soft_wrap=True)
        misses += [f"{name}, {miss}" for miss in missed(rows, LIMITS[name])]
    for miss in misses:
        CONSOLE.print(f"missed: {miss}", markup=False, soft_wrap=True)
    return int(bool(misses))


def measure(
    name: str, workloads: Sequence[Workload], contenders: Sequence[Contender], scale: float
) -> list[WorkloadRow]:
    with scratch_directory() as scratch:
        conditions = Conditions(
            model=write_tiny_model_of_real_words(scratch / "tiny.gguf", CLASSES[name]),
            shows_tools=False,
            threads=os.cpu_count() or 1,
            texts=Texts(NONCE, scale),
            is_quick=False,
            scratch=scratch,
        )
        plan = Plan(
            contenders=contenders,
            workloads=workloads,
            bursts=None,
            conditions=conditions,
            n_rounds=1,
        )
        progress = Progress(on_step=lambda _: None, on_done=lambda: None, on_trouble=CONSOLE.print)
        asyncio.run(run_all(plan, progress))
    return progress.workloads


def table(rows: Sequence[WorkloadRow]) -> str:
    """Return a Markdown table with this server first."""
    servers = sorted({row.server for row in rows}, key=lambda server: (server != OURS, server))
    headings = [cell for server in servers for cell in (server, "prefilled", "floor", "failed")]
    lines = [["workload", *headings]]
    for workload, by_server in _by_workload(rows):
        lines.append([workload, *(cell for name in servers for cell in _cells(by_server[name]))])
    return markdown_table(lines)


def missed(rows: Sequence[WorkloadRow], limit: float) -> Iterator[str]:
    for workload, by_server in _by_workload(rows):
        ours = by_server.pop(OURS)
        if ours.errors or ours.amplification is None:
            yield f"{workload}: {ours.note}"
            continue
        amplification = _rounded(ours.amplification)
        if amplification > limit:
            yield f"{workload}: {amplification}, at most {limit} is the target"
        for peer in by_server.values():
            if peer.errors or peer.amplification is None:
                continue  # it did not do all of the work
            if amplification > _rounded(peer.amplification):
                yield f"{workload}: {amplification}, {peer.server} has {peer.amplification:.3f}"


def _by_workload(rows: Sequence[WorkloadRow]) -> Iterator[tuple[str, dict[str, WorkloadRow]]]:
    for workload in dict.fromkeys(row.workload for row in rows):
        yield workload, {row.server: row for row in rows if row.workload == workload}


def _cells(row: WorkloadRow) -> Iterator[str]:
    yield decimal_text(row.amplification, 3)
    yield count_text(row.prefilled_tokens)
    yield count_text(row.floor_tokens)
    yield f"{row.errors} of {row.requests}" if row.errors else "0"


def _rounded(amplification: float) -> float:
    """Round. Below 1, the floor was counted a few tokens too high."""
    return max(round(amplification, 3), 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.models.classes")
    parser.add_argument("--class", action="append", choices=[*CLASSES], dest="classes")
    parser.add_argument("--only", action="append", choices=[each.name for each in KNOWN])
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--llama-server", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
