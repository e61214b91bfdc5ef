"""How commands print: plain tables and words, the same on a terminal and in a pipe."""

import json
import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

SHORT_KEY = 12  # hex digits; picked
SHORT_MODEL = 8
_SPACES = "\n\t\u00a0\u3000"  # which Python does not call printable
_PIPE_WIDTH = 1000  # a pipe has no width of its own, and its lines must not be folded


def printable(text: str) -> str:
    """Return the text without characters that move the cursor, change colours or hide text.

    Names come from clients, archives and model files.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in _SPACES else "\ufffd" for each in text)


class SafeConsole(Console):
    """A console that prints texts from anywhere: only its own styles reach the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


class SafeFormatter(logging.Formatter):
    """Formats log lines that hold texts from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def plain_console(pipe_width: int = _PIPE_WIDTH) -> Console:
    width = None if sys.stdout.isatty() else pipe_width
    return SafeConsole(width=width, highlight=False, markup=False)


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


def print_difference(console: Console, before: str, expected: str, got: str) -> None:
    """Print the expected and the actual text, each after the words they share."""
    if not expected and not got:
        return
    for mark, text, style in (("-", expected, "red"), ("+", got, "green")):
        line = Text(f"  {mark} ", style=style)
        line.append(_on_one_line(before), style="dim")
        line.append(_on_one_line(text), style=style)
        console.print(line, soft_wrap=True)


def _on_one_line(text: str) -> str:
    """Escape control characters, which could break the line or the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


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
