"""`python -m bench.fleet`: what 1 to 1,000 replicas compute again, by routing policy.

A simulation, not a measurement: requests and blocks are followed one by one, and speeds are the
numbers in `Hardware`. Writes fleet.md, fleet.csv and pictures. Equal seeds give equal files.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from bench.fleet.jobs import make_jobs, run, run_all
from bench.fleet.model import Policy
from bench.fleet.report import write_report
from bench.fleet.workload import FleetWorkload
from bench.report import CONSOLE, RESULTS

FLEETS = (1, 10, 100, 1000)
QUICK_FLEETS = (1, 10)
QUICK_WORKLOAD = FleetWorkload(hours=2.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    workload = QUICK_WORKLOAD if options.quick else FleetWorkload()
    fleets = options.replicas or (QUICK_FLEETS if options.quick else FLEETS)
    policies = list(Policy) if options.policy == "all" else [Policy(options.policy)]
    began = time.monotonic()
    jobs = make_jobs(workload, options.seed, fleets, policies)
    results = [run(job) for job in jobs] if options.quick else run_all(jobs)
    CONSOLE.print(write_report(results, options.out, options.seed), soft_wrap=True)
    CONSOLE.print(f"{len(jobs)} runs in {time.monotonic() - began:.0f} s: {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", metavar="N", help="default: 1 to 1000")
    parser.add_argument("--policy", choices=["all", *map(str, Policy)], default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    return parser


if __name__ == "__main__":
    main()
