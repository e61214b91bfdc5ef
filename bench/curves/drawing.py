"""Curves as SVG: lines on two logarithmic axes, a panel for times and one for bytes."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10

from bench.curves.curve import BYTES, MILLISECONDS, Curve, CurvePoint
from rekindle.bench.report.bars import (
    COLOURS,
    DARK_COLOURS,
    MARGIN,
    SIZES,
    WIDTH,
    LogScale,
    Page,
    colour_class,
)
from rekindle.replay.charts import line_shape, text_shape

LEFT, RIGHT = 80, 24  # room for the numbers of the y axis, and for half of the last tick
PANEL_HEIGHT, PANEL_TITLE, TICKS_HEIGHT = 220, 26, 26
DOT = 4
TITLES = {MILLISECONDS: "Time", BYTES: "Memory"}
STYLE = "\n".join(
    [
        "",
        ".line { stroke-width: 2; } .line.s0 { stroke: #d9480f; } .ytick { text-anchor: end;",
        f" font-size: {SIZES['tick']}px; fill: #656d76; }} .linear {{ stroke: #8c959f;",
        " stroke-dasharray: 4 4; }",
        *(f".line.s{n} {{ stroke: {colour}; }}" for n, colour in enumerate(COLOURS, 1)),
        "@media (prefers-color-scheme: dark) { .line.s0 { stroke: #ff8a3d; }",
        ".ytick { fill: #9198a1; }",
        *(f".line.s{n} {{ stroke: {colour}; }}" for n, colour in enumerate(DARK_COLOURS, 1)),
        "}",
    ]
)


def svg_of(about: str, curves: Sequence[Curve], footer: str) -> str:
    """Draw all curves of one axis."""
    page = Page()
    title = f"Cost by the number of {about}"
    page.title(title)
    page.paragraph("Both axes are logarithmic. A dashed line is linear growth.")
    page.legend([f"{curve.name}: exponent {curve.last_exponent:.2f}" for curve in curves])
    for unit, panel_title in TITLES.items():
        numbered = [(n, curve) for n, curve in enumerate(curves) if curve.unit == unit]
        if numbered:
            page.y += 12
            page.shapes += _panel(panel_title, numbered, page.y)
            page.y += PANEL_TITLE + PANEL_HEIGHT + TICKS_HEIGHT
    page.y += 8
    page.paragraph(footer)
    return page.svg(title, STYLE)


def value_text(value: float, unit: str) -> str:
    """Return the value with the unit that people use."""
    steps = (
        ((1e3, "us"), (1e3, "ms"), (1e3, "s"))
        if unit == MILLISECONDS
        else ((1e3, "B"), (1e3, "kB"), (1e3, "MB"), (1e3, "GB"))
    )
    number = value * 1e3 if unit == MILLISECONDS else value
    for factor, name in steps[:-1]:
        if number < factor * 0.9995:
            return f"{number:.3g} {name}"
        number /= factor
    return f"{number:.3g} {steps[-1][1]}"


def _panel(title: str, numbered: Sequence[tuple[int, Curve]], top: float) -> Iterator[str]:
    points = [point for _, curve in numbered for point in curve.points]
    place = _Place(points, top + PANEL_TITLE)
    unit = numbered[0][1].unit
    yield text_shape("panel", MARGIN, top + SIZES["panel"], title)
    for tick in place.value_scale.ticks(PANEL_HEIGHT):
        y = place.y(tick)
        yield line_shape("grid tick-line", LEFT, y, WIDTH - RIGHT, y)
        yield text_shape("ytick", LEFT - 8, y + 4, value_text(tick, unit))
    for size in sorted({point.size for point in points}):
        x = place.x(size)
        yield line_shape("grid tick-line", x, place.top, x, place.bottom)
        yield text_shape("tick", x, place.bottom + 16, f"{size:,}")
    yield from _linear(place, max(numbered, key=lambda each: each[1].points[-1].value)[1])
    for number, curve in numbered:
        yield from _line(place, colour_class(number), curve)


class _Place:
    """Where a point lies in a panel."""

    def __init__(self, points: Sequence[CurvePoint], top: float) -> None:
        values = [point.value for point in points]
        sizes = [point.size for point in points]
        self.value_scale = LogScale(10.0 ** floor(log10(min(values))), max(values))
        self._size_scale = LogScale(min(sizes), max(sizes))
        self.top, self.bottom = top, top + PANEL_HEIGHT

    def x(self, size: float) -> float:
        return LEFT + self._size_scale.share(size) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.bottom - self.value_scale.share(value) * PANEL_HEIGHT


def _linear(place: _Place, curve: Curve) -> Iterator[str]:
    """Yield the line of linear growth that ends where the curve ends, as far as it fits."""
    first, last = curve.points[0], curve.points[-1]
    bottom = place.value_scale.lowest
    size = max(float(first.size), last.size * bottom / last.value)
    value = last.value * size / last.size
    yield line_shape(
        "linear", place.x(size), place.y(value), place.x(last.size), place.y(last.value)
    )


def _line(place: _Place, colour: str, curve: Curve) -> Iterator[str]:
    for a, b in pairwise(curve.points):
        kind = f"line {colour}"
        yield line_shape(kind, place.x(a.size), place.y(a.value), place.x(b.size), place.y(b.value))
    for point in curve.points:
        label = f"{curve.name}, {point.size:,}: {value_text(point.value, curve.unit)}"
        yield (
            f'<circle class="{colour}" cx="{place.x(point.size):.2f}"'
            f' cy="{place.y(point.value):.2f}" r="{DOT}"><title>{escape(label)}</title></circle>'
        )
