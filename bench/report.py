"""What was measured: rows of numbers, tables for the terminal, a CSV file to keep."""

import csv
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
CONSOLE = Console(width=max(Console().width, 132), highlight=False)


class Benchmark(Protocol):
    def __call__(self, *, quick: bool) -> "list[Row]":
        """Quick: a smoke test, not a result."""
        ...


class Target(NamedTuple):
    bound: str  # <= or >=
    value: float

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.bound == "<=" else value >= self.value

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}"


class Row(NamedTuple):
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
    """The median, and what one in a hundred takes."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def run_alone(measure: Benchmark) -> None:
    """`python -m bench.NAME [--quick]`."""
    quick = sys.argv[1:] == ["--quick"]
    if sys.argv[1:] and not quick:
        sys.exit("It takes --quick, which is a smoke test and no result, or nothing.")
    rows = measure(quick=quick)
    show(rows)
    CONSOLE.print(write_csv(rows, rows[0].benchmark, quick=quick), soft_wrap=True)


def show(rows: Sequence[Row]) -> None:
    """A table per benchmark: a line for each case, a column for each measure."""
    for name in dict.fromkeys(row.benchmark for row in rows):
        CONSOLE.print(_table(name, [row for row in rows if row.benchmark == name]))


def missed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.target and not row.target.is_met(row.value)]


def write_csv(rows: Sequence[Row], name: str, *, quick: bool) -> Path:
    RESULTS.mkdir(exist_ok=True)
    label = f"{name}-{machine_label()}-{commit_label()}{'-quick' if quick else ''}"
    path = RESULTS / f"{label}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows((*row[:4], row.target or "") for row in rows)
    return path


def machine_label() -> str:
    """The processor and its number of cores; no name that someone gave to the machine."""
    name = platform.machine()
    if shutil.which("lscpu"):
        listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        if found := re.search(r"^Model name:\s*(.+)$", listing, re.MULTILINE):
            name = found[1]
    elif platform.system() == "Darwin":
        brand = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(brand, capture_output=True, text=True, check=True).stdout
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{slug}-{os.cpu_count()}-cores"


def commit_label() -> str:
    def git(*arguments: str) -> str:
        if shutil.which("git") is None:
            return ""
        result = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    commit = git("rev-parse", "--short", "--verify", "HEAD") or "uncommitted"
    return f"{commit}-modified" if git("status", "--porcelain") else commit


def _table(title: str, rows: Sequence[Row]) -> Table:
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


def _shown(row: Row | None) -> str:
    if row is None:
        return ""
    number = f"{row.value:,.0f}" if abs(row.value) >= 100 else f"{row.value:.3g}"
    if row.target is None:
        return number
    is_met = row.target.is_met(row.value)
    return f"[green]{number} ok[/]" if is_met else f"[red]{number} missed[/]"
