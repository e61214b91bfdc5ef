"""Measure how time and memory grow with entries, conversations, slots, context and tools.

    python -m bench.curves [--quick] [--only AXIS]... [--out FOLDER]

Each curve has a bound for its exponent over the last decade. The command exits with 1 if a curve
is worse. `--quick` is a smoke test: its sizes are too small to judge.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from bench.curves import context, conversations, entries, slots, tools
from bench.curves.curve import Axis, Curve
from bench.curves.drawing import value_text
from bench.curves.page import bend_lines, verdict_of, write_files
from bench.report import CONSOLE, RESULTS
from rekindle.bench.machine import load_warning

AXES: dict[str, Axis] = {
    module.NAME: cast(Axis, module) for module in (entries, conversations, slots, context, tools)
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    parser.add_argument("--only", action="append", choices=AXES, help="may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS / "curves", help="folder of the page")
    options = parser.parse_args(arguments)
    if warning := load_warning():
        CONSOLE.print(warning)
    chosen = {name: axis for name, axis in AXES.items() if name in (options.only or AXES)}
    curves: list[Curve] = []
    for name, axis in chosen.items():
        began = time.monotonic()
        found = axis.measure(axis.QUICK_SIZES if options.quick else axis.SIZES)
        _show(found)
        CONSOLE.print(f"{name} took {time.monotonic() - began:.0f} s\n")
        curves += found
    about = {name: axis.ABOUT for name, axis in chosen.items()}
    for path in write_files(options.out, about, curves):
        CONSOLE.print(str(path), soft_wrap=True)
    return exit_status(curves, quick=options.quick)


def exit_status(curves: Sequence[Curve], *, quick: bool) -> int:
    """Name the curves that are worse than their bounds, and return 1 if there are some."""
    if quick:
        CONSOLE.print("A quick run judges no curve: its sizes are too small.")
        return 0
    worse = [curve for curve in curves if not curve.is_within_bound]
    for curve in worse:
        CONSOLE.print(
            f"worse: {curve.axis}, {curve.name}: exponent {curve.last_exponent:.2f},"
            f" at most {curve.bound:g}",
            soft_wrap=True,
        )
    return 1 if worse else 0


def _show(curves: Sequence[Curve]) -> None:
    for curve in curves:
        first, last = curve.points[0], curve.points[-1]
        values = " to ".join(
            f"{value_text(point.value, curve.unit)} at {point.size:,}" for point in (first, last)
        )
        line = f"{curve.axis}, {curve.name}: {values}, exponent {curve.last_exponent:.2f}"
        CONSOLE.print(f"{line}, {verdict_of(curve)}", soft_wrap=True)
        for bend in bend_lines(curve):
            CONSOLE.print(f"  {bend}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
