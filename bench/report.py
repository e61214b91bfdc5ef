"""What was measured, as a table for the terminal and a CSV file to keep."""

import csv
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from pathlib import Path
from statistics import median

from rich.table import Table

RESULTS = Path(__file__).parent / "results"


class Measure(StrEnum):
    PREFILL = "prefill_tokens_per_second"
    FIRST_TOKEN = "first_token_ms"
    DECODE = "decode_tokens_per_second"
    DECODE_BY_SERVER = "decode_tokens_per_second_by_server"  # kept in the CSV only
    STEP = "step_us"
    STEP_IN_LLAMA = "step_in_llama_us"
    STEP_CHOOSING = "step_choosing_us"
    STEP_COST = "step_cost_us"


TITLES = {
    Measure.PREFILL: "prefill, tokens/s",
    Measure.FIRST_TOKEN: "first token, ms",
    Measure.DECODE: "decode, tokens/s",
    Measure.STEP: "whole step, us",
    Measure.STEP_IN_LLAMA: "in llama_decode, us",
    Measure.STEP_CHOOSING: "reading logits, us",
    Measure.STEP_COST: "Python, us",
}


@dataclass(frozen=True, slots=True)
class Sample:
    measure: Measure
    streams: int
    server: str
    round: int
    value: float


def comparison_table(samples: Sequence[Sample], ours: str, peer: str) -> Table:
    table = Table(title="Throughput: medians over the rounds")
    for heading in ("", "streams", ours, peer, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    last = None
    for measure, streams in _rows(samples):
        if last not in (None, measure):
            table.add_section()
        last = measure
        row_values = [_values(samples, measure, streams, server) for server in (ours, peer)]
        medians = [f"{median(values.values()):,.1f}" if values else "-" for values in row_values]
        table.add_row(TITLES[measure], str(streams), *medians, _ratio(*row_values))
    return table


def step_table(samples: Sequence[Sample]) -> Table:
    table = Table(title="One decode step: medians")
    columns = (
        Measure.STEP,
        Measure.STEP_IN_LLAMA,
        Measure.STEP_CHOOSING,
        Measure.STEP_COST,
    )
    for heading in ("backend", "sequences", *(TITLES[measure] for measure in columns)):
        is_name = heading == "backend"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for server, streams in dict.fromkeys((sample.server, sample.streams) for sample in samples):
        values = (_values(samples, measure, streams, server) for measure in columns)
        table.add_row(server, str(streams), *(f"{median(v.values()):,.0f}" for v in values))
    return table


def write_csv(samples: Sequence[Sample], label: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{label}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Sample))
        writer.writerows(astuple(sample) for sample in samples)
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
        result = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    commit = git("rev-parse", "--short", "--verify", "HEAD") or "uncommitted"
    return f"{commit}-modified" if git("status", "--porcelain") else commit


def _rows(samples: Sequence[Sample]) -> list[tuple[Measure, int]]:
    order = list(Measure)
    found = {(s.measure, s.streams) for s in samples if s.measure in TITLES}
    return sorted(found, key=lambda row: (order.index(row[0]), row[1]))


def _values(
    samples: Sequence[Sample], measure: Measure, streams: int, server: str
) -> dict[int, float]:
    """Round -> value."""
    return {
        sample.round: sample.value
        for sample in samples
        if (sample.measure, sample.streams, sample.server) == (measure, streams, server)
    }


def _ratio(ours: dict[int, float], peers: dict[int, float]) -> str:
    """Round by round, because a slow moment of the machine hits both halves of a round."""
    ratios = [ours[number] / peers[number] for number in ours.keys() & peers.keys()]
    return f"{median(ratios):.3f}" if ratios else "-"
