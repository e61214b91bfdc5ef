"""Bar charts as SVG. The first series has the accent colour.

An image in a README is a document of its own: colours follow the reader's theme by a media
query, fonts are the system's, and the file loads nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from math import ceil, floor, log10
from textwrap import wrap

from rekindle.replay.charts import line_shape, round_numbers, text_shape

# Pixels, all picked by looking at 12 workloads on 4 servers, also on a phone.
WIDTH, MARGIN = 840, 8  # the width of a README on GitHub
NAMES_WIDTH, PANEL_GAP = 168, 24
BAR, PITCH, GROUP_GAP = 13, 17, 13
LABEL_GAP = 6
SHORTEST_BAR = 3  # the lowest value of a scale has length 0, and is often the best
TICK_DISTANCE = 50
SIZES = {"title": 22, "panel": 15, "key": 15, "name": 15, "value": 14, "tick": 12, "note": 13}
EM_WIDTH = 0.63  # average letter; measured in DejaVu Sans, a wide font: up to 0.62
BOLD = 1.12  # factor of bold text; measured: up to 1.1
LINE_HEIGHT = 1.3
HEADING_HEIGHT = 42  # title and ticks of a panel
LONGEST_KEY = 40  # letters
ROUND_DIGITS = (1, 2, 5)
COLOURS = ("#4f6d8c", "#93a9bf", "#7a6f9b", "#5d9490", "#b3a27c")
DARK_COLOURS = ("#86a8cb", "#566f89", "#a296c9", "#6aa8a2", "#a8966d")

STYLE = "\n".join(
    [
        'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial,'
        " sans-serif; fill: #1f2328; }",
        *(f".{name} {{ font-size: {size}px; }}" for name, size in SIZES.items()),
        ".title, .panel { font-weight: 600; } .value { font-variant-numeric: tabular-nums; }",
        ".tick { text-anchor: middle; } .tick, .note, .missing { fill: #656d76; }",
        ".grid { stroke: #d1d9e0; } .tick-line { stroke-opacity: 0.5; }",
        ".s0 { fill: #d9480f; } .ours { font-weight: 600; }",
        *(f".s{n} {{ fill: {colour}; }}" for n, colour in enumerate(COLOURS, 1)),
        "@media (prefers-color-scheme: dark) {",
        "text { fill: #e6edf3; } .tick, .note, .missing { fill: #9198a1; }",
        ".grid { stroke: #3d444d; } .s0 { fill: #ff8a3d; }",
        *(f".s{n} {{ fill: {colour}; }}" for n, colour in enumerate(DARK_COLOURS, 1)),
        "}",
    ]
)


class LogScale:
    """Maps values to shares of the longest bar, and gives ticks that have room on an axis."""

    def __init__(self, lowest: float, highest: float) -> None:
        self.lowest = lowest
        self._highest = max(highest, lowest * 2)  # gives a single value a length
        self._decades = log10(self._highest / self.lowest)

    def share(self, value: float) -> float:
        return log10(max(value, self.lowest) / self.lowest) / self._decades

    def ticks(self, width: float) -> list[float]:
        decade = width / self._decades
        has_room = log10(2) * decade >= TICK_DISTANCE
        numbers = round_numbers(self.lowest, ROUND_DIGITS if has_room else (1,))
        every = 1 if has_room else ceil(TICK_DISTANCE / decade)
        return list(takewhile(lambda tick: tick <= self._highest, numbers))[::every]


class LinearScale:
    """The same as `LogScale`, starting at 0."""

    def __init__(self, highest: float) -> None:
        self._highest = highest or 1.0

    def share(self, value: float) -> float:
        return value / self._highest

    def ticks(self, width: float) -> list[float]:
        least = self._highest * min(TICK_DISTANCE / width, 1)
        step = next(round_numbers(least, ROUND_DIGITS))
        return [step * number for number in range(int(self._highest / step) + 1)]


Scale = LogScale | LinearScale


@dataclass(frozen=True, slots=True)
class Panel:
    """Values by group and series. A missing value is marked as missing."""

    title: str
    values: Mapping[tuple[str, str], float]
    scale: Scale
    text: Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels side by side, with the names of the groups at the left."""

    title: str
    explanation: str
    footer: str
    groups: Sequence[str]  # at least one
    series: Sequence[str]
    panels: Sequence[Panel]
    remarks: Mapping[tuple[str, str], str]  # shown after the value


def svg_of(chart: Chart) -> str:
    page = Page()
    page.title(chart.title)
    page.paragraph(chart.explanation)
    page.legend(chart.series)
    top = page.y + 8
    groups = _groups(chart, top + HEADING_HEIGHT)
    drawings = _drawings(chart, groups)
    for drawing in drawings:
        page.shapes += drawing.shapes(top, longest=_longest_bar(drawing, drawings))
    for group in groups:
        page.shapes += _name(group)
    page.y = groups[-1].bottom + 10
    page.paragraph(chart.footer)
    return page.svg(chart.title)


def text_width(text: str, size: float) -> float:
    """Return an upper bound: fonts differ between systems."""
    return len(text) * size * EM_WIDTH


@dataclass(frozen=True, slots=True)
class _Group:
    """A name and the bars beside it, one below the other."""

    name: str
    lines: Sequence[str]
    top: float
    height: float
    n_bars: int

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def bar_top(self, number: int) -> float:
        spare = self.height - GROUP_GAP - self.n_bars * PITCH
        return self.top + (GROUP_GAP + spare + PITCH - BAR) / 2 + number * PITCH


@dataclass(frozen=True, slots=True)
class _Bar:
    colour: str
    y: float
    value: float | None  # None: unknown
    label: str
    tooltip: str

    @property
    def label_width(self) -> float:
        return LABEL_GAP + text_width(self.label, SIZES["value"] * BOLD)


def _groups(chart: Chart, top: float) -> list[_Group]:
    groups = []
    for name in chart.groups:
        lines = _wrapped(name, "name", NAMES_WIDTH - LABEL_GAP)
        height = max(len(chart.series) * PITCH, len(lines) * SIZES["name"] * LINE_HEIGHT)
        groups.append(_Group(name, lines, top, height + GROUP_GAP, len(chart.series)))
        top = groups[-1].bottom
    return groups


def _bars(chart: Chart, panel: Panel, groups: Sequence[_Group]) -> list[_Bar]:
    bars = []
    for group in groups:
        for number, series in enumerate(chart.series):
            value = panel.values.get((group.name, series))
            shown = "n/a" if value is None else panel.text(value)
            remark = chart.remarks.get((group.name, series))
            label = f"{shown}, {remark}" if remark else shown
            tooltip = f"{group.name}, {series}: {label}"
            bars.append(_Bar(colour_class(number), group.bar_top(number), value, label, tooltip))
    return bars


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A panel with its position."""

    panel: Panel
    bars: Sequence[_Bar]
    left: float
    width: float
    bottom: float

    def shapes(self, top: float, *, longest: float) -> Iterator[str]:
        scale, axis = self.panel.scale, top + HEADING_HEIGHT
        yield text_shape("panel", self.left, top + SIZES["panel"], self.panel.title)
        for tick in scale.ticks(longest):
            x = self.left + scale.share(tick) * longest
            yield line_shape("grid tick-line", x, axis, x, self.bottom)
            yield text_shape("tick", x, axis - 5, _tick_text(self.panel, tick))
        for bar in self.bars:
            yield from _drawn(bar, scale, self.left, longest)

    def room(self) -> float:
        """Return the length of the longest bar that leaves room for every label."""
        share = self.panel.scale.share
        fits = [
            (self.width - bar.label_width) / share(bar.value)
            for bar in self.bars
            if bar.value is not None and share(bar.value) > 0
        ]
        return max(min([self.width * 0.9, *fits]), SHORTEST_BAR)


def _drawings(chart: Chart, groups: Sequence[_Group]) -> list[_Drawing]:
    room = WIDTH - 2 * MARGIN - NAMES_WIDTH
    width = (room - PANEL_GAP * (len(chart.panels) - 1)) / len(chart.panels)
    return [
        _Drawing(
            panel,
            _bars(chart, panel, groups),
            MARGIN + NAMES_WIDTH + (width + PANEL_GAP) * number,
            width,
            groups[-1].bottom,
        )
        for number, panel in enumerate(chart.panels)
    ]


def _longest_bar(drawing: _Drawing, drawings: Sequence[_Drawing]) -> float:
    """Return one length for all panels with this scale, so that bars can be compared."""
    return min(each.room() for each in drawings if each.panel.scale is drawing.panel.scale)


def _drawn(bar: _Bar, scale: Scale, left: float, longest: float) -> Iterator[str]:
    baseline = bar.y + BAR / 2 + SIZES["value"] * 0.35
    yield f"<g><title>{escape(bar.tooltip)}</title>"
    if bar.value is None:
        yield text_shape("value missing", left + LABEL_GAP, baseline, bar.label)
    else:
        length = max(scale.share(bar.value) * longest, SHORTEST_BAR)
        yield (
            f'<rect class="{bar.colour}" x="{left:.2f}" y="{bar.y:.2f}"'
            f' width="{length:.2f}" height="{BAR}" rx="2"/>'
        )
        emphasis = " ours" if bar.colour == "s0" else ""
        yield text_shape(f"value{emphasis}", left + length + LABEL_GAP, baseline, bar.label)
    yield "</g>"


def _name(group: _Group) -> Iterator[str]:
    yield line_shape("grid", MARGIN, group.top, WIDTH - MARGIN, group.top)
    step = SIZES["name"] * LINE_HEIGHT
    first = group.top + group.height / 2 - len(group.lines) * step / 2 + SIZES["name"]
    for number, line in enumerate(group.lines):
        yield text_shape("name", MARGIN, first + number * step, line)


class Page:
    """The picture, drawn from top to bottom."""

    def __init__(self) -> None:
        self.y = float(MARGIN)
        self.shapes: list[str] = []

    def title(self, text: str) -> None:
        self._lines("title", _balanced(_wrapped(text, "title", (WIDTH - 2 * MARGIN) / BOLD)))
        self.y += 4

    def paragraph(self, text: str) -> None:
        self._lines("note", _wrapped(text, "note", WIDTH - 2 * MARGIN))

    def _lines(self, kind: str, lines: Sequence[str]) -> None:
        for line in lines:
            self.shapes.append(text_shape(kind, MARGIN, self.y + SIZES[kind], line))
            self.y += SIZES[kind] * LINE_HEIGHT

    def legend(self, series: Sequence[str]) -> None:
        x, step = float(MARGIN), SIZES["key"] * LINE_HEIGHT + 4
        self.y += 6
        for number, each in enumerate(series):
            name = each if len(each) <= LONGEST_KEY else f"{each[: LONGEST_KEY - 3]}..."
            width = BAR + LABEL_GAP + text_width(name, SIZES["key"] * BOLD)
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, self.y = float(MARGIN), self.y + step
            top = self.y + SIZES["key"] * 0.55 - BAR / 2
            self.shapes.append(
                f'<rect class="{colour_class(number)}" x="{x:.2f}" y="{top:.2f}"'
                f' width="{BAR}" height="{BAR}" rx="2"/>'
            )
            kind = "key ours" if number == 0 else "key"
            place = x + BAR + LABEL_GAP
            self.shapes.append(text_shape(kind, place, self.y + SIZES["key"] * 0.9, name))
            x += width + 12
        self.y += step

    def svg(self, title: str, more_style: str = "") -> str:
        height = floor(self.y + MARGIN)
        body = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img">\n<title>{escape(title)}</title>\n'
            f"<style>\n{STYLE}{more_style}\n</style>\n{body}\n</svg>\n"
        )


def colour_class(number: int) -> str:
    """Return the class of a colour. The first is unique; the others repeat."""
    return "s0" if number == 0 else f"s{(number - 1) % len(COLOURS) + 1}"


def _tick_text(panel: Panel, tick: float) -> str:
    """Return the text of the tick without trailing zeros."""
    if tick == 0:
        return "0"
    number, *rest = panel.text(tick).split(" ")
    digits = number.removesuffix("x")
    shown = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return " ".join([shown + number[len(digits) :], *rest])


def _wrapped(text: str, kind: str, width: float) -> list[str]:
    return wrap(text, int(width / text_width("m", SIZES[kind]))) or [""]


def _balanced(lines: Sequence[str]) -> list[str]:
    """Wrap to the same number of lines of about equal length."""
    text = " ".join(lines)
    longest = max(len(line) for line in lines)
    shortest = -(-len(text) // len(lines))
    fits = (wrap(text, n) for n in range(shortest, longest))
    return next((each for each in fits if len(each) == len(lines)), list(lines))
