"""Charts as inline SVG, by hand: no script and nothing to load. Colours are the page's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import floor, log10

WIDTH, HEIGHT = 900, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 24
MAX_BAR_WIDTH = 28
N_TICKS = 4
DOTS_UP_TO = 200  # points of a line; picked: more run into each other
N_COLOURS = 6  # that the page has


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    bottom: float
    top: float  # stands on the bottom one


@dataclass(frozen=True, slots=True)
class Point:
    label: str
    value: float | None  # None: there is a gap


def stacked_bars(bars: Sequence[Bar], *, highest: float, title: str) -> str:
    """`highest` is given so that charts of several servers have one scale."""
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
    """A line for each; the n-th has the n-th colour. The scale goes up to `at_least`."""
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
        self.tick = _round_step((highest or 1.0) / N_TICKS)
        n_ticks = int(-(-(highest or 1.0) // self.tick))
        self.ticks = [self.tick * number for number in range(n_ticks + 1)]

    def x(self, index: int) -> float:
        return LEFT + self.step * (index + 0.5)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.ticks[-1]


def _round_step(least: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power: float = 10.0 ** floor(log10(least))
    return next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= least * 0.999)


def _line(points: Sequence[Point], number: int, scale: _Scale) -> Iterator[str]:
    colour = f"s{number % N_COLOURS}"
    placed = [
        (scale.x(index), scale.y(point.value), point)
        for index, point in enumerate(points)
        if point.value is not None
    ]
    for (x, y, _), (next_x, next_y, _) in pairwise(placed):
        if next_x - x < scale.step * 1.5:  # else a gap is between them
            yield (
                f'<line class="{colour}" x1="{x:.2f}" y1="{y:.2f}" x2="{next_x:.2f}"'
                f' y2="{next_y:.2f}"/>'
            )
    radius = 3 if len(points) <= DOTS_UP_TO else 1
    for x, y, point in placed:
        yield (
            f'<circle class="{colour}" cx="{x:.2f}" cy="{y:.2f}" r="{radius}">'
            f"<title>{escape(point.label)}</title></circle>"
        )


def _axes(scale: _Scale) -> Iterator[str]:
    for tick in scale.ticks:
        y = scale.y(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.2f}" x2="{WIDTH - RIGHT}" y2="{y:.2f}"/>'
        yield f'<text class="y" x="{LEFT - 8}" y="{y + 4:.2f}">{_number(tick)}</text>'
    if scale.n_places:
        for place in sorted({0, scale.n_places // 2, scale.n_places - 1}):
            x = scale.x(place)
            yield f'<text class="x" x="{x:.2f}" y="{HEIGHT - 6}">{place + 1}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _svg(title: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(shapes)
        + "</svg>"
    )
