"""Tables as Markdown and as CSV files, for `rekindle bench` and for `python -m bench`."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Draw the lines below each other. The first holds the headings, the first column names."""
    headings, *rows = lines
    rule = ["---", *("---:" for _ in headings[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def write_csv(path: Path, headings: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(headings)
        writer.writerows(rows)
