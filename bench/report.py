"""Results of a microbenchmark: rows, tables for the terminal, and a CSV file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

from rekindle.bench.machine import commit_label, machine_label
from rekindle.bench.report.tables import write_csv
from rekindle.replay.numbers import percentile

RESULTS = Path(__file__).parent / "results"
CONSOLE = Console(width=max(Console().width, 132), highlight=False)


class Benchmark(Protocol):
    def __call__(self, *, quick: bool) -> "list[BenchRow]":
        """Measure. `quick` is a smoke test, not a result."""
        ...


class Target(NamedTuple):
    bound: str  # <= or >=
    value: float

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.bound == "<=" else value >= self.value

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}"


class BenchRow(NamedTuple):
    benchmark: str
    case: str
    measure: str  # with its unit: p50_ms, gigabytes_per_second
    value: float
    target: Target | None = None


def at_most(value: float) -> Target:
    return Target("<=", value)


def at_least(value: float) -> Target:
    return Target(">=", value)


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    p50, p99 = percentile(seconds, 50), percentile(seconds, 99)
    assert p50 is not None
    assert p99 is not None
    return p50 * 1e3, p99 * 1e3


def run_alone(measure: Benchmark) -> None:
    """Run one benchmark: `python -m bench.NAME [--quick]`."""
    quick = sys.argv[1:] == ["--quick"]
    if sys.argv[1:] and not quick:
        sys.exit("The only option is --quick: a smoke test, not a result.")
    rows = measure(quick=quick)
    show(rows)
    CONSOLE.print(write_rows(rows, rows[0].benchmark, quick=quick), soft_wrap=True)


def show(rows: Sequence[BenchRow]) -> None:
    """Print a table for each benchmark: a line for each case, a column for each measure."""
    for name in dict.fromkeys(row.benchmark for row in rows):
        CONSOLE.print(_table(name, [row for row in rows if row.benchmark == name]))


def missed(rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [row for row in rows if row.target and not row.target.is_met(row.value)]


def write_rows(rows: Sequence[BenchRow], name: str, *, quick: bool) -> Path:
    RESULTS.mkdir(exist_ok=True)
    commit = commit_label() or "uncommitted"
    path = RESULTS / f"{name}-{machine_label()}-{commit}{'-quick' if quick else ''}.csv"
    write_csv(path, BenchRow._fields, [(*row[:4], row.target or "") for row in rows])
    return path


def _table(title: str, rows: Sequence[BenchRow]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    measures = list(dict.fromkeys(row.measure for row in rows))
    for measure in measures:
        targets = {str(row.target) for row in rows if row.measure == measure and row.target}
        heading = measure.replace("_", " ")
        table.add_column("\n".join([heading, *sorted(targets)]), justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        values = {row.measure: row for row in rows if row.case == case}
        table.add_row(case, *(_shown(values.get(measure)) for measure in measures))
    return table


def _shown(row: BenchRow | None) -> str:
    if row is None:
        return ""
    number = f"{row.value:,.0f}" if abs(row.value) >= 100 else f"{row.value:.3g}"
    if row.target is None:
        return number
    is_met = row.target.is_met(row.value)
    return f"[green]{number} ok[/]" if is_met else f"[red]{number} missed[/]"
