"""Cost curves: exponents and bounds are judged from made-up numbers; a quick run measures all."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.curves.__main__ import AXES, exit_status, main
from bench.curves.curve import BYTES, FLAT, LINEAR, MILLISECONDS, Curve, CurvePoint
from bench.curves.drawing import svg_of, value_text
from bench.curves.page import bend_lines, section_of, verdict_of
from bench.report import CONSOLE

SVG = "{http://www.w3.org/2000/svg}"
SIZES = (1_000, 10_000, 100_000)


def curve_of(
    values: Sequence[float], *, bound: float = LINEAR, unit: str = MILLISECONDS, remark: str = ""
) -> Curve:
    points = [CurvePoint(size, value) for size, value in zip(SIZES, values, strict=True)]
    return Curve(axis="entries", name="find", unit=unit, bound=bound, points=points, remark=remark)


@pytest.mark.parametrize(
    ("values", "exponents"),
    [((2, 2, 2), (0, 0)), ((1, 10, 100), (1, 1)), ((1, 10, 1_000), (1, 2))],
)
def test_the_exponent_is_the_slope_between_neighbours(
    values: Sequence[float], exponents: Sequence[float]
) -> None:
    assert curve_of(values).exponents == pytest.approx(exponents)


def test_the_last_decade_counts_however_many_points_lie_in_it() -> None:
    points = [CurvePoint(size, size**2 if size > 1_000 else 1_000.0**2) for size in (10, 1_000)]
    points += [CurvePoint(size, 1_000.0 * size) for size in (4_000, 16_000)]
    curve = Curve(axis="context", name="find", unit=MILLISECONDS, bound=LINEAR, points=points)
    assert curve.last_exponent == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "bound", "status"),
    [
        ((1, 10, 100), LINEAR, 0),
        ((1, 10, 150), LINEAR, 0),  # 1.18: noise
        ((1, 10, 1_000), LINEAR, 1),
        ((1, 100, 1_000), LINEAR, 0),  # only the last decade counts
        ((1, 10, 100), FLAT, 1),
        ((1, 1, 2), FLAT, 0),
    ],
)
def test_a_curve_above_its_bound_fails_the_command(
    values: Sequence[float], bound: float, status: int
) -> None:
    with CONSOLE.capture() as shown:
        assert exit_status([curve_of((1, 1, 1)), curve_of(values, bound=bound)], quick=False) == (
            status
        )
    assert ("worse: entries, find" in shown.get()) == bool(status)


def test_a_quick_run_judges_nothing() -> None:
    with CONSOLE.capture():
        assert exit_status([curve_of((1, 10, 1_000))], quick=True) == 0


def test_a_curve_within_a_wide_bound_is_still_not_called_linear() -> None:
    assert verdict_of(curve_of((1, 10, 1_000), bound=2.5)) == "not linear, at most 2.5"
    assert verdict_of(curve_of((1, 10, 1_000))) == f"worse than {LINEAR:g}"
    assert verdict_of(curve_of((1, 10, 100))).startswith("linear or better")


def test_a_bend_has_one_line_with_its_size_and_its_reason() -> None:
    [line] = bend_lines(curve_of((1, 1, 10), remark="a cache is full"))
    assert line == "find: the exponent goes from 0.00 to 1.00 at 10,000: a cache is full."
    assert not bend_lines(curve_of((1, 10, 110)))


def test_the_section_of_an_axis_shows_every_value() -> None:
    text = section_of("entries", "stored entries", [curve_of((1, 1, 10)), curve_of((3, 4, 5))])
    assert (
        "| find | 1 ms | 1 ms | 10 ms | 0.00, 1.00 | 1.00, linear or better, at most 1.2 |" in text
    )
    assert text.count("- find") == 1


def test_linear_growth_is_a_straight_line_in_the_picture() -> None:
    curves = [curve_of((1, 10, 100)), curve_of((5_000, 50_000, 500_000), unit=BYTES)]
    root = ElementTree.fromstring(svg_of("stored entries", curves, "a machine"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 6
    for first, middle, last in (dots[:3], dots[3:]):
        assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.1)
        assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.1)
        assert first[1] > last[1]  # larger values lie above
    assert all(0 <= x <= width and 0 <= y <= height for x, y in dots)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, MILLISECONDS, "250 us"),
        (2.5, MILLISECONDS, "2.5 ms"),
        (65_000, MILLISECONDS, "65 s"),
        (1_400, BYTES, "1.4 kB"),
        (2.5e9, BYTES, "2.5 GB"),
    ],
)
def test_values_have_the_unit_that_people_use(value: float, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


def test_a_quick_run_measures_every_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engine_run.RESULTS", tmp_path / "results")
    with CONSOLE.capture():
        assert main(["--quick", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "curves.csv").read_text().splitlines()[1:]
    assert {line.split(",")[0] for line in lines} == set(AXES)
    assert all(float(line.rpartition(",")[2]) > 0 for line in lines)
    page = (tmp_path / "curves.md").read_text()
    for name, axis in AXES.items():
        assert f"(curves-{name}.svg)" in page
        assert (tmp_path / f"curves-{name}.svg").exists()
        assert max(axis.QUICK_SIZES) < max(axis.SIZES)
