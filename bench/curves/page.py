"""The files of a run: a page in Markdown, a picture for each axis, and one CSV file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.curves.curve import LINEAR, Curve
from bench.curves.drawing import svg_of, value_text
from rekindle.bench.machine import commit_label, machine_label
from rekindle.bench.report.tables import markdown_table, write_csv

COLUMNS = ("axis", "curve", "unit", "size", "value")
INTRODUCTION = f"""\
# Cost curves

How time and memory grow. `python -m bench.curves --out docs/results` wrote this page.

- The exponent between two points is the slope on logarithmic axes: 0 is flat, 1 is linear, 2 is
  quadratic.
- The last column compares the exponent of the last decade with the bound of the curve. Up to
  {LINEAR} counts as linear.
- Times are CPU time, the least of several calls. All values are in [curves.csv](curves.csv)."""


def write_files(folder: Path, axes: Mapping[str, str], curves: Sequence[Curve]) -> list[Path]:
    """Write all files and return their paths. `axes` maps each name to what its sizes count."""
    folder.mkdir(parents=True, exist_ok=True)
    table, page = folder / "curves.csv", folder / "curves.md"
    footer = f"{machine_label()}; commit {commit_label() or 'unknown'}"
    lines = [
        (curve.axis, curve.name, curve.unit, point.size, f"{point.value:.6g}")
        for curve in curves
        for point in curve.points
    ]
    write_csv(table, COLUMNS, lines)
    paths, parts = [page, table], [INTRODUCTION, f"Measured on {footer}."]
    for axis, about in axes.items():
        own = [curve for curve in curves if curve.axis == axis]
        picture = folder / f"curves-{axis}.svg"
        picture.write_text(svg_of(about, own, footer), "utf-8")
        paths.append(picture)
        parts.append(section_of(axis, about, own))
    page.write_text("\n\n".join(parts) + "\n", "utf-8")
    return paths


def section_of(axis: str, about: str, curves: Sequence[Curve]) -> str:
    sizes = [point.size for point in curves[0].points]
    lines = [["", *(f"{size:,}" for size in sizes), "exponents", "last decade"]]
    lines += [
        [
            curve.name,
            *(value_text(point.value, curve.unit) for point in curve.points),
            ", ".join(f"{each:.2f}" for each in curve.exponents),
            f"{curve.last_exponent:.2f}, {verdict_of(curve)}",
        ]
        for curve in curves
    ]
    parts = [
        f"## By {about}",
        f"![Cost by the number of {about}](curves-{axis}.svg)",
        markdown_table(lines),
    ]
    if bends := [f"- {line}" for curve in curves for line in bend_lines(curve)]:
        parts.append("\n".join(bends))
    return "\n\n".join(parts)


def verdict_of(curve: Curve) -> str:
    if not curve.is_within_bound:
        return f"worse than {curve.bound:g}"
    return f"{'linear or better' if curve.is_linear else 'not linear'}, at most {curve.bound:g}"


def bend_lines(curve: Curve) -> list[str]:
    """Return a line for each bend, with the reason if it is known."""
    why = f": {curve.remark}" if curve.remark else ""
    return [
        f"{curve.name}: the exponent goes from {bend.before:.2f} to {bend.after:.2f}"
        f" at {bend.size:,}{why}."
        for bend in curve.bends
    ]
