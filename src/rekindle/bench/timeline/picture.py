"""A timeline as SVG: some requests of a workload, each with its server, engine and stores."""

from collections.abc import Iterator, Sequence
from html import escape

from rekindle.bench.report.bars import MARGIN, SIZES, WIDTH, Page, text_width
from rekindle.bench.timeline.stages import BETWEEN, ELSEWHERE, Lanes, Segment, Window
from rekindle.replay.charts import line_shape, text_shape

MAX_REQUESTS = 8  # in one picture; picked
LANE, LANE_GAP, REQUEST_GAP = 14, 3, 18  # pixels
NAMES = 64  # width of the lanes' names
COLOURS = {
    "read body": "#9a6fb0",
    "render": "#5b8def",
    "tokenise": "#2f6fb3",
    "store turns": "#8a8f98",
    "look up": "#e0b23c",
    "restore": "#3aa17e",
    "plan": "#a3c14a",
    "batch": "#d9480f",
    "sample": "#c2255c",
    "deliver": "#7a6f9b",
    "export": "#1098ad",
    BETWEEN: "#6b4f3a",
    "write": "#66a3ad",
    "read": "#74b816",
    ELSEWHERE: "#ced4da",
}
STYLE = "\n" + "\n".join(
    f".{'t' + str(number)} {{ fill: {colour}; }}" for number, colour in enumerate(COLOURS.values())
)
CLASSES = {stage: f"t{number}" for number, stage in enumerate(COLOURS)}


def picture_of(title: str, lanes: Lanes, windows: Sequence[Window]) -> str:
    page = Page()
    page.title(title)
    page.paragraph(
        "Each request from its sending to its last token, as wide as the picture; the line is its"
        " first token. The engine may work for other requests at the same time."
    )
    _legend(page)
    for window in _some(windows):
        _request(page, lanes, window)
    return page.svg(title, STYLE)


def _some(windows: Sequence[Window]) -> Sequence[Window]:
    """Return at most so many as fit into a picture, evenly spread."""
    step = max(1, -(-len(windows) // MAX_REQUESTS))
    return windows[::step]


def _legend(page: Page) -> None:
    x, step = float(MARGIN), SIZES["note"] * 1.5
    page.y += 6
    for stage, kind in CLASSES.items():
        width = 14 + text_width(stage, SIZES["note"])
        if x + width > WIDTH - MARGIN:
            x, page.y = float(MARGIN), page.y + step
        page.shapes.append(_box(kind, x, page.y, 10, 10, stage))
        page.shapes.append(text_shape("note", x + 14, page.y + 10, stage))
        x += width + 12
    page.y += step + 6


def _request(page: Page, lanes: Lanes, window: Window) -> None:
    seconds = window.ended - window.sent
    scale = (WIDTH - 2 * MARGIN - NAMES) / max(seconds, 1e-9)
    first = window.first_token - window.sent
    page.shapes.append(
        text_shape(
            "panel",
            MARGIN,
            page.y + SIZES["panel"],
            f"{window.name}: first token {1e3 * first:.0f} ms, whole reply {1e3 * seconds:.0f} ms",
        )
    )
    page.y += SIZES["panel"] * 1.5
    top = page.y
    for name, segments in (
        ("server", lanes.server),
        ("engine", lanes.engine),
        ("stores", lanes.stores),
    ):
        page.shapes.append(text_shape("tick-name note", MARGIN, page.y + LANE - 3, name))
        page.shapes += _lane(segments, window, page.y, scale)
        page.y += LANE + LANE_GAP
    x = MARGIN + NAMES + first * scale
    page.shapes.append(line_shape("grid", x, top, x, page.y))
    page.y += REQUEST_GAP


def _lane(segments: Sequence[Segment], window: Window, y: float, scale: float) -> Iterator[str]:
    yield _box(
        CLASSES[ELSEWHERE], MARGIN + NAMES, y, (window.ended - window.sent) * scale, LANE, ""
    )
    for segment in segments:
        began, ended = max(segment.began, window.sent), min(segment.ended, window.ended)
        if ended <= began:
            continue
        x = MARGIN + NAMES + (began - window.sent) * scale
        text = f"{segment.stage} {1e3 * (ended - began):.2f} ms"
        text += f", {segment.n_tokens} tokens" if segment.n_tokens else ""
        yield _box(CLASSES[segment.stage], x, y, (ended - began) * scale, LANE, text)


def _box(kind: str, x: float, y: float, width: float, height: float, text: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}">'
        f"<title>{escape(text)}</title></rect>"
    )
