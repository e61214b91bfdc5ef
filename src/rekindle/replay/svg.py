"""Pieces of SVG charts: text, lines and round numbers for their axes."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import count
from math import floor, log10


def text_shape(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>'


def line_shape(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def round_numbers(at_least: float, digits: Sequence[float]) -> Iterator[float]:
    """Yield the digits times powers of ten, from `at_least` upwards, without end."""
    for power in count(floor(log10(at_least))):
        for digit in digits:
            number = float(f"{digit}e{power}")
            if number >= at_least * 0.999:
                yield number
