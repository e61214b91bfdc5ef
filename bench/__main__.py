"""`python -m bench`: every microbenchmark, about 10 minutes on two idle cores."""

import argparse
import time

from bench import lookup, prompt_building, saving_cost, startup, step_cost, tiers
from bench.report import CONSOLE, Benchmark, BenchRow, missed, show, write_rows
from rekindle.bench.machine import load_warning

BENCHMARKS: dict[str, Benchmark] = {
    module.NAME: module.main
    for module in (step_cost, lookup, tiers, saving_cost, startup, prompt_building)
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    quick = parser.parse_args().quick
    if warning := load_warning():
        CONSOLE.print(warning)
    rows: list[BenchRow] = []
    for name, measure in BENCHMARKS.items():
        began = time.monotonic()
        found = measure(quick=quick)
        show(found)
        CONSOLE.print(f"{name} took {time.monotonic() - began:.0f} s\n")
        rows += found
    for row in missed(rows) if not quick else []:
        where = f"{row.benchmark}, {row.case}, {row.measure}"
        CONSOLE.print(f"missed: {where}: {row.value:.3g}, {row.target}", soft_wrap=True)
    CONSOLE.print(write_rows(rows, "micro", quick=quick), soft_wrap=True)


if __name__ == "__main__":
    main()
