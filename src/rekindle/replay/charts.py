"""Charts as inline SVG, without scripts. The page has the colours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, pairwise
from math import floor, log10

WIDTH, HEIGHT = 900, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 24
MAX_BAR_WIDTH = 28
N_TICKS = 4
DOTS_UP_TO = 200  # points of a line; picked: more would overlap
N_COLOURS = 6  # of the page


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    bottom: float
    top: float  # drawn above the bottom part


@dataclass(frozen=True, slots=True)
class Point:
    label: str
    value: float | None  # None: a gap in the line


def stacked_bars(bars: Sequence[Bar], *, highest: float, title: str) -> str:
    """Draw one bar for each entry. `highest` gives the charts of several servers one scale."""
    scale = _Scale(len(bars), highest)
    width = min(scale.step * 0.8, MAX_BAR_WIDTH)
    shapes = []
    for index, bar in enumerate(bars):
        x = scale.x(index) - width / 2
        shapes.append(f"<g><title>{escape(bar.label)}</title>")
        for name, start, stop in (
            ("bottom", 0.0, bar.bottom),
            ("top", bar.bottom, bar.bottom + bar.top),
        ):
            y, height = scale.y(stop), scale.y(start) - scale.y(stop)
            shapes.append(
                f'<rect class="{name}" x="{x:.2f}" y="{y:.2f}"'
                f' width="{width:.2f}" height="{height:.2f}"/>'
            )
        shapes.append("</g>")
    return _svg(title, [*_axes(scale), *shapes])


def lines(series: Sequence[Sequence[Point]], *, title: str, at_least: float = 0.0) -> str:
    """Draw a line for each series, in the n-th colour. The scale ends at `at_least` or above."""
    values = [point.value for points in series for point in points if point.value is not None]
    n_places = max((len(points) for points in series), default=0)
    scale = _Scale(n_places, max([at_least, *values]))
    shapes = [
        shape for number, points in enumerate(series) for shape in _line(points, number, scale)
    ]
    return _svg(title, [*_axes(scale), *shapes])


class _Scale:
    def __init__(self, n_places: int, highest: float) -> None:
        self.n_places = n_places
        self.step = (WIDTH - LEFT - RIGHT) / max(n_places, 1)
        tick = next(round_numbers((highest or 1.0) / N_TICKS, (1, 2, 2.5, 5)))
        n_ticks = int(-(-(highest or 1.0) // tick))
        self.ticks = [tick * number for number in range(n_ticks + 1)]

    def x(self, index: int) -> float:
        return LEFT + self.step * (index + 0.5)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.ticks[-1]


def _line(points: Sequence[Point], number: int, scale: _Scale) -> Iterator[str]:
    colour = f"s{number % N_COLOURS}"
    placed = [
        (scale.x(index), scale.y(point.value), point)
        for index, point in enumerate(points)
        if point.value is not None
    ]
    for (x, y, _), (next_x, next_y, _) in pairwise(placed):
        if next_x - x < scale.step * 1.5:  # else there is a gap between them
            yield line_shape(colour, x, y, next_x, next_y)
    radius = 3 if len(points) <= DOTS_UP_TO else 1
    for x, y, point in placed:
        yield (
            f'<circle class="{colour}" cx="{x:.2f}" cy="{y:.2f}" r="{radius}">'
            f"<title>{escape(point.label)}</title></circle>"
        )


def _axes(scale: _Scale) -> Iterator[str]:
    for tick in scale.ticks:
        y = scale.y(tick)
        yield line_shape("grid", LEFT, y, WIDTH - RIGHT, y)
        yield text_shape("y", LEFT - 8, y + 4, _number(tick))
    if scale.n_places:
        for place in sorted({0, scale.n_places // 2, scale.n_places - 1}):
            yield text_shape("x", scale.x(place), HEIGHT - 6, str(place + 1))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


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


def _svg(title: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(shapes)
        + "</svg>"
    )
