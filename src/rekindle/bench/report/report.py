"""The report of a run: tables for the terminal, and files with tables, rows and pictures.

`python -m rekindle.bench.report.report FOLDER` writes the files again from its `report.json`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.box import ASCII
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rekindle.bench.peers.contenders import WITHOUT_DRAFTS
from rekindle.bench.report import plots
from rekindle.bench.report.results import BurstRow, RequestRow, Run, WorkloadRow
from rekindle.bench.report.summary import (
    Measure,
    acceptance_of,
    bursts_of,
    decode_rates_of,
    decode_workloads_of,
    failures_of,
    medians,
    n_rounds_of,
    notes_of,
    ratio_of,
    servers_of,
    workloads_of,
)
from rekindle.bench.report.tables import markdown_table, write_csv
from rekindle.replay.numbers import NOTHING, count_text, decimal_text

BEST = "*"
LONGEST_NAME = 26  # letters in a line; picked: leaves room for 4 servers in 100 columns
MIB = 1024 * 1024
JSON_NAME = "report.json"
BURST_TITLES = {
    "prefill_tokens_per_second": "prefill, tokens/s",
    "first_token_ms": "first token, ms",
    "decode_tokens_per_second": "decode, tokens/s",
    "cached_first_token_ms": "first token of a cached prompt, ms",
}
# Includes the time that a stream waits for the prefill of others: not the clients' rate.
ONLY_IN_CSV = {"decode_tokens_per_second_by_server"}
PLOTS: dict[str, Callable[[Run], str]] = {
    "amplification.svg": plots.amplification,
    "first-token.svg": plots.first_token,
    "total-time.svg": plots.total_time,
    "story.svg": plots.story,
}
_RUN = TypeAdapter(Run)


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column holds names."""

    title: str
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Shown = tuple[Measure, Callable[[float], str]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A table with two numbers in each cell."""

    title: str
    caption: str
    first: Shown
    second: Shown


FIRST_TOKEN = Pair(
    "Time to first token, ms: p50 / p95",
    "Over the requests of a workload.",
    (lambda row: row.first_token_p50_seconds, lambda value: count_text(value * 1000)),
    (lambda row: row.first_token_p95_seconds, lambda value: count_text(value * 1000)),
)
SPEED = Pair(
    "Total time, s / tokens per second",
    "Tokens of prompts and replies.",
    (lambda row: row.total_seconds, lambda value: decimal_text(value, 2)),
    (lambda row: row.tokens_per_second, count_text),
)
COST = Pair(
    "Written to disk, MiB / peak memory, MiB",
    "Of all processes of the server; their peaks are added up.",
    (lambda row: row.written_bytes, lambda value: decimal_text(value / MIB, 1)),
    (lambda row: row.peak_memory_bytes, lambda value: count_text(value / MIB)),
)


def print_report(run: Run, console: Console) -> None:
    for name, value in _facts(run):
        console.print(f"{name}: {value}", markup=False, highlight=False)
    console.print(f"Command: {run.command}", markup=False, highlight=False)
    for grid in grids_of(run):
        console.print()
        console.print(Text(grid.title, style="bold"))
        console.print(_rich_table(grid))
        console.print(Text(grid.caption, style="dim"))
    if notes := notes_of(run):
        console.print()
        console.print(Text("Notes", style="bold"))
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)


def write_report(run: Run, folder: Path) -> list[Path]:
    """Write all files and return their paths. Only workloads that measure prefill have pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, tuple[type[Any], Sequence[Any]]] = {
        "requests.csv": (RequestRow, run.requests),
        "workloads.csv": (WorkloadRow, run.workloads),
        "throughput.csv": (BurstRow, run.bursts),
    }
    for name, (kind, rows) in tables.items():
        write_csv(folder / name, [field.name for field in fields(kind)], map(astuple, rows))
    texts = {"report.md": markdown_of(run), JSON_NAME: _RUN.dump_json(run, indent=1).decode()}
    if workloads_of(run):
        texts |= {name: draw(run) for name, draw in PLOTS.items()}
    for name, text in texts.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", "utf-8", newline="\n")
    return [folder / name for name in (*tables, *texts)]


def load_run(folder: Path) -> Run:
    return _RUN.validate_json((folder / JSON_NAME).read_bytes())


def grids_of(run: Run) -> list[Grid]:
    """Return the tables of everything that was measured."""
    grids = []
    if workloads_of(run):
        grids.append(amplification_grid(run))
        grids += [pair_grid(run, pair) for pair in (FIRST_TOKEN, SPEED, COST)]
    if decode_workloads_of(run):
        grids.append(decode_grid(run))
    if run.bursts:
        grids.append(throughput_grid(run))
    return grids


def amplification_grid(run: Run) -> Grid:
    servers, failed = servers_of(run), failures_of(run)
    values = medians(run, lambda row: row.amplification)
    n_prompt = medians(run, lambda row: row.prompt_tokens)
    n_floor = medians(run, lambda row: row.floor_tokens)
    rows = []
    for workload in workloads_of(run):
        # Prompts contain earlier replies, so their token counts differ a little between servers.
        counted = next((s for s in servers if (workload, s) in n_floor), servers[0])
        fair = {
            # A value below 1 means that the floor was counted a few tokens too high.
            server: max(round(values[workload, server], 3), 1.0)
            for server in servers
            if (workload, server) in values and (workload, server) not in failed
        }
        least = min(fair.values()) if len(fair) > 1 else None
        cells = [
            Cell(
                decimal_text(values.get((workload, server)), 3),
                is_best=least is not None and fair.get(server) == least,
            )
            for server in servers
        ]
        counts = [count_text(n.get((workload, counted))) for n in (n_prompt, n_floor)]
        rows.append([Cell(workload), *map(Cell, counts), *cells])
    return Grid(
        "Amplification: prefilled tokens / floor",
        "The floor is the number of tokens that were new to the server; 1 is the minimum. The best"
        " is marked, unless it has failed requests. Prompt and floor tokens are counted on"
        f" {servers[0]}, or else on the next server that has counts.",
        ["workload", "prompt", "floor", *servers],
        rows,
    )


def decode_grid(run: Run) -> Grid:
    """Return one row for each server, because variants make more servers than fit in columns."""
    rows = []
    for workload in decode_workloads_of(run):
        rates = decode_rates_of(run, workload)
        for server, by_round in rates.items():
            if not by_round:
                continue
            ratio = ratio_of(by_round, rates.get(WITHOUT_DRAFTS, {}))
            drafts = acceptance_of(run, workload, server)
            share = drafts.n_accepted / drafts.n_tokens if drafts.n_tokens else None
            cells = [server, _rate(by_round), decimal_text(ratio, 2), count_text(drafts.n_tokens)]
            shown = NOTHING if share is None else f"{share:.0%}"
            rows.append([Cell(workload), *map(Cell, (*cells, shown))])
    return Grid(
        "Decoding, tokens per second",
        f"By the client's clock, after the first token. The ratio is to {WITHOUT_DRAFTS}, the"
        " median of each round's ratio. Drafted tokens are those of all rounds.",
        ["workload", "server", "tokens/s", "ratio", "drafted", "accepted"],
        rows,
    )


def throughput_grid(run: Run) -> Grid:
    ours, *peers = servers_of(run)
    rows = []
    for (measure, n_streams), by_server in bursts_of(run).items():
        if measure in ONLY_IN_CSV:
            continue
        title = BURST_TITLES.get(measure, measure.replace("_", " "))
        cells = [_rate(by_server.get(ours, {}))]
        for peer in peers:
            ratio = ratio_of(by_server.get(ours, {}), by_server.get(peer, {}))
            behind = "" if ratio is None else f" ({ratio:.3f})"
            cells.append(f"{_rate(by_server.get(peer, {}))}{behind}")
        rows.append([Cell(title), Cell(str(n_streams)), *map(Cell, cells)])
    return Grid(
        "Throughput of bursts that share nothing",
        f"In brackets: {ours} / that server, the median of each round's ratio. Above 1 is better"
        " for rates, below 1 for times.",
        ["burst", "streams", ours, *peers],
        rows,
    )


def markdown_of(run: Run) -> str:
    facts = [f"- {name}: {_inline(value)}" for name, value in _facts(run)]
    parts = ["## Benchmark", "\n".join(facts), f"```sh\n{run.command}\n```"]
    for grid in grids_of(run):
        parts += [f"### {_inline(grid.title)}", _markdown_grid(grid), _inline(grid.caption)]
    if notes := notes_of(run):
        parts += ["### Notes", "\n".join(f"- {_inline(note)}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    console = Console(stderr=True)
    if len(arguments) != 1:
        console.print("usage: python -m rekindle.bench.report.report FOLDER", markup=False)
        return 2
    try:
        run = load_run(Path(arguments[0]))
    except (OSError, ValidationError) as error:
        console.print(f"{arguments[0]} holds no report: {error}", markup=False)
        return 1
    for path in write_report(run, Path(arguments[0])):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "Machine", run.machine
    yield "Model", run.model
    yield "Servers", ", ".join(f"{each.name} {each.version}".strip() for each in run.contenders)
    if run.commit:
        yield "Commit", run.commit
    if (n_rounds := n_rounds_of(run)) > 1:
        yield "Numbers", f"medians of {n_rounds} rounds"


def pair_grid(run: Run, pair: Pair) -> Grid:
    known = [(medians(run, measure), show) for measure, show in (pair.first, pair.second)]
    rows = []
    for workload in workloads_of(run):
        row = [Cell(workload)]
        for server in servers_of(run):
            key = (workload, server)
            parts = [show(values[key]) if key in values else NOTHING for values, show in known]
            row.append(Cell(NOTHING if set(parts) == {NOTHING} else " / ".join(parts)))
        rows.append(row)
    return Grid(pair.title, pair.caption, ["workload", *servers_of(run)], rows)


def _rich_table(grid: Grid) -> Table:
    table = Table(box=ASCII, show_edge=False, pad_edge=False)
    for number, heading in enumerate(grid.headings):
        table.add_column(Text(heading), justify="right" if number else "left", overflow="fold")
    columns = zip(*grid.rows, strict=True)
    is_marked = [any(cell.is_best for cell in column) for column in columns]
    for row in grid.rows:
        cells = zip(row[1:], is_marked[1:], strict=True)
        table.add_row(
            Text("\n".join(wrap(row[0].text, LONGEST_NAME))),
            *(_rich_cell(cell, in_marked_column=marked) for cell, marked in cells),
        )
    return table


def _rich_cell(cell: Cell, *, in_marked_column: bool) -> Text:
    """Give the mark a column of its own, so that digits align."""
    mark = (BEST if cell.is_best else " ") if in_marked_column else ""
    return Text(cell.text + mark, style="bold green" if cell.is_best else "")


def _markdown_grid(grid: Grid) -> str:
    rows = [[_markdown_cell(cell) for cell in row] for row in grid.rows]
    return markdown_table([[_inline(heading) for heading in grid.headings], *rows])


def _markdown_cell(cell: Cell) -> str:
    return f"**{_inline(cell.text)}**" if cell.is_best else _inline(cell.text)


def _inline(text: str) -> str:
    """Escape markup and line breaks: names and errors come from outside."""
    escaped = "".join(f"\\{each}" if each in "\\`*|<>[]" else each for each in text)
    return " ".join(escaped.split())


def _rate(by_round: Mapping[int, float]) -> str:
    return f"{median(by_round.values()):,.1f}" if by_round else NOTHING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
