"""Send hostile requests to a server and read hostile files, until all are done.

    python -m tests.campaigns.fuzz --cases 1000000 --seed 1
    python -m tests.campaigns.fuzz --resume FOLDER
    python -m tests.campaigns.fuzz --replay FILE

A campaign is cut into parts. FOLDER keeps how far it got and one file for each failure. Exits
with 1 when something was found.
"""
# ruff: noqa: T201

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.fuzz.campaign import campaign, plan
from tests.campaigns.fuzz.case import Kind, read_failure
from tests.campaigns.fuzz.minimise import minimised
from tests.campaigns.fuzz.report import tell

PART = 5_000  # cases between two looks at memory
STATE = "progress.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kinds", nargs="+", type=Kind, choices=list(Kind), default=list(Kind))
    parser.add_argument("--folder", type=Path, default=None, help="for progress and failures")
    parser.add_argument("--resume", type=Path, metavar="FOLDER")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    folder = options.resume or options.folder or Path(tempfile.mkdtemp(prefix="rekindle-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    first, seed = options.first, options.seed
    if options.resume:
        progress = json.loads((folder / STATE).read_text("utf-8"))
        first, seed = progress["next"], progress["seed"]
    tell(f"failures and progress: {folder}")
    return run(folder, first, options.cases, options.kinds, seed)


def run(folder: Path, first: int, last: int, kinds: list[Kind], seed: int) -> int:
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        campaign(Path(scratch), folder, seed=seed) as running,
    ):
        for start in range(first, last, PART):
            running.run(plan(start, min(PART, last - start), kinds))
            running.look()
            done = min(start + PART, last)
            progress = {"seed": seed, "next": done}
            (folder / STATE).write_text(json.dumps(progress), "utf-8")
            report = running.report
            rate = report.n_cases / (time.monotonic() - began)
            tell(
                f"{done} of {last}, {rate:.0f} per second,"
                f" {sum(report.sorts.values())} failures, {report.memory.line()}"
            )
            if running.is_over:
                break
    for line in running.report.lines():
        print(line)
    return 1 if running.report.failures else 0


def replay(path: Path) -> int:
    """Run a failing case again, and make it smaller while it still fails."""
    case = read_failure(path)
    with (
        tempfile.TemporaryDirectory() as scratch,
        campaign(Path(scratch), Path(scratch), seed=0) as running,
    ):
        problem = running.replay(case)
        if problem is None:
            print("no problem: this case passes now")
            return 0
        print(problem)
        smaller = minimised(case, lambda each: running.replay(each) is not None)
        print(smaller)
    return 1


if __name__ == "__main__":
    sys.exit(main())
