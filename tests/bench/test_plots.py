"""The pictures of a benchmark are well-formed, show the numbers, and nothing overlaps."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

import pytest

from rekindle.bench.report import plots
from rekindle.bench.report.bars import SIZES, LinearScale, LogScale, text_width
from rekindle.bench.report.results import Run
from tests.support.bench_runs import run_of, silent_row, workload_row

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = [plots.story, plots.amplification, plots.first_token, plots.total_time]
SERVERS = ("rekindle", "llama-server", "xllamacpp", "llama_cpp.server")
WORKLOADS = (
    "agent-loop",
    "alternating-windows-of-eight",
    "reasoning-template-that-drops-thinking-of-earlier-turns",
    "averyveryveryverylongnamewithoutanyplacetobreak",
    "a name of words that are each rather short but of which there are many",
)


@dataclass(frozen=True, slots=True)
class Box:
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


def text_boxes(svg: str) -> Iterator[Box]:
    for element in parsed(svg).iter(f"{SVG}text"):
        kind = element.attrib["class"].split()[0]
        x, y, text = float(element.attrib["x"]), float(element.attrib["y"]), element.text or ""
        width = text_width(text, SIZES[kind])
        left = x - width / 2 if kind == "tick" else x
        yield Box(text, left, y - SIZES[kind] * 0.75, left + width, y + SIZES[kind] * 0.2)


def bar_boxes(svg: str) -> Iterator[Box]:
    for element in parsed(svg).iter(f"{SVG}rect"):
        x, y, width, height = (float(element.attrib[n]) for n in ("x", "y", "width", "height"))
        yield Box(element.attrib["class"], x, y, x + width, y + height)


def bars(svg: str) -> dict[str, float]:
    """Return the length of each bar by its tooltip."""
    lengths = {}
    for group in parsed(svg).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        if rect is not None:
            lengths[group.findtext(f"{SVG}title") or ""] = float(rect.attrib["width"])
    return lengths


def crowded_run(n_servers: int) -> Run:
    rows = []
    for number, workload in enumerate(WORKLOADS):
        for place, server in enumerate(SERVERS[:n_servers]):
            worse = 1 + place * (number + 1) * 4.1
            rows.append(
                workload_row(
                    workload,
                    server,
                    amplification=None if server == "llama_cpp.server" else 1.0 * worse,
                    first_token_p50_seconds=0.004 * worse,
                    first_token_p95_seconds=0.9 * worse,
                    total_seconds=3.7 * worse,
                    errors=number % 2 * 12,
                )
            )
    return run_of(*rows, servers=SERVERS[:n_servers], machine="A processor with a long name, " * 6)


@pytest.mark.parametrize("draw", PICTURES)
@pytest.mark.parametrize("n_servers", [1, 2, 4])
def test_nothing_lies_outside_the_picture_and_no_text_overlaps(
    draw: Callable[[Run], str], n_servers: int
) -> None:
    svg = draw(crowded_run(n_servers))
    _, _, width, height = map(float, parsed(svg).attrib["viewBox"].split())
    shown, drawn = list(text_boxes(svg)), list(bar_boxes(svg))
    for box in (*shown, *drawn):
        assert box.left >= 0, box
        assert box.top >= 0, box
        assert box.right <= width, box
        assert box.bottom <= height, box
    for one, other in combinations(shown, 2):
        assert not one.overlaps(other), (one, other)
    for text in shown:
        assert not [bar for bar in drawn if text.overlaps(bar)], text


def test_panels_of_one_scale_have_bars_of_one_length() -> None:
    run = run_of(
        workload_row("loop", "rekindle", first_token_p50_seconds=0.2, first_token_p95_seconds=3.0),
        workload_row("loop", "peer", first_token_p50_seconds=0.1, first_token_p95_seconds=0.2),
    )
    lengths = bars(plots.first_token(run))
    assert lengths["loop, rekindle: 200 ms"] == lengths["loop, peer: 200 ms"]


def test_bars_are_as_long_as_the_logarithm_from_1() -> None:
    run = run_of(
        workload_row("loop", "rekindle", amplification=2.0),
        workload_row("loop", "peer", amplification=8.0),
        workload_row("floor", "rekindle", amplification=1.0),
        workload_row("floor", "peer", amplification=0.9),
    )
    lengths = bars(plots.amplification(run))
    assert lengths["loop, peer: 8.00x"] == pytest.approx(
        3 * lengths["loop, rekindle: 2.00x"], abs=0.02
    )
    assert lengths["floor, rekindle: 1.00x"] == lengths["floor, peer: 0.90x"] > 0


def test_medians_are_drawn() -> None:
    run = run_of(
        *(
            workload_row("loop", "rekindle", round=number, total_seconds=value)
            for number, value in enumerate((1.0, 30.0, 2.5))
        ),
        servers=("rekindle",),
    )
    assert list(bars(plots.total_time(run))) == ["loop, rekindle: 2.50 s"]
    assert "medians of 3 rounds" in words(plots.total_time(run))[-1]


@pytest.mark.parametrize("draw", PICTURES)
def test_a_missing_number_is_shown_as_such(draw: Callable[[Run], str]) -> None:
    run = run_of(
        workload_row("loop", "rekindle"),
        silent_row("loop", "peer"),
        servers=("rekindle", "peer", "absent"),
    )
    missing = [
        element.text
        for element in parsed(draw(run)).iter(f"{SVG}text")
        if "missing" in element.attrib["class"]
    ]
    n_panels = len(bars(draw(run)))
    assert missing == ["n/a", "n/a"] * n_panels


@pytest.mark.parametrize("draw", PICTURES)
def test_a_run_without_any_number_can_be_drawn(draw: Callable[[Run], str]) -> None:
    assert words(draw(run_of(silent_row("loop", "rekindle")))).count("n/a") >= 2


def test_failed_requests_are_shown_at_the_bar() -> None:
    run = run_of(workload_row("loop", "peer", amplification=0.5, errors=4))
    assert "0.50x, 4 failed" in words(plots.amplification(run))


@pytest.mark.parametrize(
    ("ours", "theirs", "title"),
    [
        ((1.0, 1.02), (8.9, 3.0), "rekindle computes at most 1.02, peer up to 8.90"),
        ((3.0, 2.0), (1.1, 1.2), "rekindle computes at most 3.00, peer up to 1.20"),
        ((1.0, 1.0), (None, None), "rekindle computes at most 1.00"),
    ],
)
def test_the_title_names_the_worst_of_each_side(
    ours: tuple[float, ...], theirs: tuple[float | None, ...], title: str
) -> None:
    rows = [
        workload_row(f"workload {number}", server, amplification=value)
        for server, values in (("rekindle", ours), ("peer", theirs))
        for number, value in enumerate(values)
    ]
    assert plots.story_title(run_of(*rows)) == f"For each new token, {title}"


@pytest.mark.parametrize("draw", PICTURES)
def test_names_are_escaped_and_nothing_is_loaded_or_run(draw: Callable[[Run], str]) -> None:
    evil = "<script>alert('&')</script>"
    svg = draw(run_of(workload_row(evil, evil), servers=(evil,), machine=evil))
    root = parsed(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert evil in {element.text for element in root.iter(f"{SVG}text")}
    assert not re.search(r"href|url\(|@import|@font-face", svg)


@pytest.mark.parametrize("draw", PICTURES)
def test_the_colours_follow_the_readers_colour_scheme(
    draw: Callable[[Run], str],
) -> None:
    svg = draw(crowded_run(4))
    _, _, width, height = map(float, parsed(svg).attrib["viewBox"].split())
    assert "@media (prefers-color-scheme: dark)" in svg
    assert all(box.right - box.left < width for box in bar_boxes(svg))
    assert all(box.bottom - box.top < height / 4 for box in bar_boxes(svg))


@pytest.mark.parametrize(
    ("scale", "width", "ticks"),
    [
        (LogScale(1.0, 13.0), 250, [1, 2, 5, 10]),
        (LogScale(1.0, 1.0), 250, [1, 2]),
        (LogScale(0.001, 2.0), 250, [0.001, 0.01, 0.1, 1]),
        (LogScale(0.001, 20.0), 120, [0.001, 0.1, 10]),
        (LinearScale(61.0), 600, [0, 10, 20, 30, 40, 50, 60]),
        (LinearScale(0.0), 300, [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_ticks_are_round_and_have_room(
    scale: LogScale | LinearScale, width: float, ticks: list[float]
) -> None:
    assert scale.ticks(width) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4.2 ms"),
        (0.047, "47 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (61.84, "61.8 s"),
    ],
)
def test_times_have_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert plots.time_text(seconds) == text
