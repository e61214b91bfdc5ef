"""Texts from clients, archives and model files never control the terminal."""

import io
import logging

import pytest
from rich.text import Text

from rekindle.cli.plain import SafeConsole, SafeFormatter, filled_table, printable

HOSTILE = "ann\x1b[2J\x1b]0;owned\x07\x9b31m\u202etxt\ud800"


def test_no_escape_of_a_stored_text_reaches_the_terminal() -> None:
    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True, color_system="truecolor", width=100)
    console.print(filled_table([{"session": HOSTILE}], numbers=()))
    console.print(Text(HOSTILE, style="red"))
    console.print(HOSTILE, markup=False)
    shown = screen.getvalue()
    assert shown.count("ann") == 3
    assert "\x1b[2J" not in shown
    assert not {"\x07", "\x9b", "\u202e", "\ud800"} & set(shown)
    assert "\x1b[31m" in shown  # our own colour


def test_no_escape_reaches_the_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "x", 1, "model=%s", (HOSTILE,), None)
    assert SafeFormatter("%(message)s").format(record).isprintable()


@pytest.mark.parametrize("text", ["a b", "\u00e9\u4e2d\U0001f600", "a\n\tb", "a\u00a0b\u3000c"])
def test_ordinary_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text
