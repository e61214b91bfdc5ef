"""How commands print: plain tables and words, the same on a terminal and in a pipe."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

SHORT_KEY = 12  # hex digits; picked
SHORT_MODEL = 8
_PIPE_WIDTH = 1000  # a pipe has no width of its own, and its lines must not be folded


def plain_console(pipe_width: int = _PIPE_WIDTH) -> Console:
    width = None if sys.stdout.isatty() else pipe_width
    return Console(width=width, highlight=False, markup=False)


def progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a bar that shows on a terminal only, and disappears at the end."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def plain_table(*, show_header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)


def filled_table(
    rows: Sequence[Mapping[str, str]],
    *,
    numbers: Collection[str],
    optional: Collection[str] = (),
) -> Table:
    """Return a table of rows with equal headings. Columns in `numbers` are aligned right.

    Columns in `optional` that are empty in every row are left out.
    """
    shown = [each for each in rows[0] if each not in optional or any(row[each] for row in rows)]
    table = plain_table()
    for heading in shown:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def print_pairs(pairs: Mapping[str, str]) -> None:
    table = plain_table(show_header=False)
    for name, value in pairs.items():
        table.add_row(name, value)
    plain_console().print(table)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def ago(seconds: float) -> str:
    return f"{span(max(seconds, 0))} ago"


def span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def until(pinned_until: float | None, now: float) -> str:
    """Return how long a pin still lasts, or an empty text without a pin."""
    if pinned_until is None or pinned_until <= now:
        return ""
    return f"for {span(pinned_until - now)}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"
