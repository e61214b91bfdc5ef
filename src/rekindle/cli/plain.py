"""How commands print: plain tables and words, the same on a terminal and in a pipe."""

import json
import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table

SHORT_KEY = 12  # hex digits; picked
SHORT_MODEL = 8
_PIPE_WIDTH = 1000  # a pipe has no width of its own: nothing is folded there


def plain_console() -> Console:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False)


def plain_table(*, show_header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)


def filled_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]
) -> Table:
    """`numbers` are the headings of columns to align on the right."""
    table = plain_table()
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)


def ago(seconds: float) -> str:
    return f"{span(max(seconds, 0))} ago"


def span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def until(pinned_until: float | None, now: float) -> str:
    """How long a pin still lasts; nothing: there is none."""
    if pinned_until is None or pinned_until <= now:
        return ""
    return f"for {span(pinned_until - now)}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def count_entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def without_empty_columns(
    headings: list[str], rows: list[list[str]], *, optional: set[str]
) -> tuple[list[str], list[list[str]]]:
    """Those of `optional` go that say nothing in any row."""
    keep = [
        place
        for place, heading in enumerate(headings)
        if heading not in optional or any(row[place] for row in rows)
    ]
    return [headings[place] for place in keep], [[row[place] for place in keep] for row in rows]
