"""`python -m bench.simulate_fleet`: what 1 to 1,000 replicas compute again, by routing policy.

A simulation, not a measurement: requests, blocks and shelves are followed one by one, speeds are
numbers in `Hardware`. Writes fleet.md, fleet.csv and pictures. Equal seeds give equal files.
"""

import argparse
import csv
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import inf, nan
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.fleet_model import Policy
from bench.fleet_run import AWAY_SECONDS, Numbers, Outcome, Setup, simulate
from bench.fleet_workload import HOUR_SECONDS, Trace, Workload, draw
from bench.report import CONSOLE, RESULTS
from rekindle.bench.report.bars import Chart, LogScale, Panel, svg_of
from rekindle.bench.report.plots import amplification_text, time_text

FLEETS = (1, 10, 100, 1000)
QUICK_FLEETS = (1, 10)
QUICK_WORKLOAD = Workload(hours=2.0)
MOST_DISTURBED = 100  # replicas: enough requests in ten minutes to speak of; picked
DISTURBED_POLICIES = (Policy.ROUND_ROBIN, Policy.SESSION_HASH)
MOST_PANELS = 3
WITH, WITHOUT = "with a shared store", "without"
LOG_SCALE = "Log scale, shorter is better."
PEAK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    requests: int
    prompt_tokens: int
    live_share: float  # of the prompt tokens, like the next three
    disk_share: float
    shared_share: float
    recomputed_share: float
    amplification: float  # tokens computed for each one that is new to the fleet
    first_token_p50_seconds: float
    first_token_p95_seconds: float
    imbalance: float  # the busiest replica / the mean; of the whole run, like what follows
    store_in_gb_per_hour: float  # while sessions arrive
    store_out_gb_per_hour: float
    store_peak_gbit_per_second: float  # both ways, in the busiest minute


@dataclass(frozen=True, slots=True)
class Job:
    workload: Workload
    seed: int
    setup: Setup

    @property
    def disturbed_at(self) -> float:
        return self.workload.hours * HOUR_SECONDS / 2


@dataclass(frozen=True, slots=True)
class Result:
    setup: Setup
    whole: Summary
    ten_minutes: Summary  # from the moment at which a disturbance would come
    hour: Summary  # behind these


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    workload = QUICK_WORKLOAD if options.quick else Workload()
    fleets = options.replicas or (QUICK_FLEETS if options.quick else FLEETS)
    policies = list(Policy) if options.policy == "all" else [Policy(options.policy)]
    began = time.monotonic()
    jobs = _jobs(workload, options.seed, fleets, policies)
    results = [run(job) for job in jobs] if options.quick else _run_all(jobs)
    options.out.mkdir(parents=True, exist_ok=True)
    report = _report(results)
    (options.out / "fleet.md").write_text(report)
    _write_csv(options.out / "fleet.csv", results)
    for name, picture in _pictures(results, options.seed).items():
        (options.out / name).write_text(picture)
    CONSOLE.print(report, soft_wrap=True)
    CONSOLE.print(f"{len(jobs)} runs in {time.monotonic() - began:.0f} s: {options.out}")


def _run_all(jobs: Sequence[Job]) -> list[Result]:
    """The largest first, so that no process is left with one at the end."""
    order = sorted(range(len(jobs)), key=lambda n: -jobs[n].setup.n_replicas)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = list(pool.map(run, [jobs[n] for n in order]))
    by_number = dict(zip(order, found, strict=True))
    return [by_number[n] for n in range(len(jobs))]


def run(job: Job) -> Result:
    outcome = simulate(_trace(job.workload, job.setup.n_replicas, job.seed), job.setup)
    middle = job.disturbed_at
    calm_again = middle + AWAY_SECONDS
    return Result(
        job.setup,
        summary(outcome),
        summary(outcome, middle, calm_again),
        summary(outcome, calm_again, calm_again + HOUR_SECONDS),
    )


@lru_cache(maxsize=1)
def _trace(workload: Workload, n_replicas: int, seed: int) -> Trace:
    return draw(workload, n_replicas, seed)


def summary(outcome: Outcome, begin: float = 0.0, end: float = inf) -> Summary:
    """Of the requests that arrive in between."""
    within = (outcome.at_seconds >= begin) & (outcome.at_seconds < end)
    n_prompt, n_new = outcome.prompt[within].sum(), outcome.new[within].sum()
    n_recomputed = outcome.recomputed[within].sum()
    seconds = outcome.first_token_seconds[within]
    in_the_day = outcome.at_seconds <= outcome.last_arrival_seconds
    gb_per_hour = outcome.setup.hardware.token_bytes / 1e9
    gb_per_hour /= outcome.last_arrival_seconds / HOUR_SECONDS
    return Summary(
        requests=int(within.sum()),
        prompt_tokens=int(n_prompt),
        live_share=_ratio(outcome.live[within].sum(), n_prompt),
        disk_share=_ratio(outcome.disk[within].sum(), n_prompt),
        shared_share=_ratio(outcome.shared[within].sum(), n_prompt),
        recomputed_share=_ratio(n_recomputed, n_prompt),
        amplification=_ratio(n_recomputed, n_new),
        first_token_p50_seconds=_quantile(seconds, 0.5),
        first_token_p95_seconds=_quantile(seconds, 0.95),
        imbalance=float(outcome.busy_seconds.max() / outcome.busy_seconds.mean()),
        store_in_gb_per_hour=outcome.written[in_the_day].sum() * gb_per_hour,
        store_out_gb_per_hour=outcome.shared[in_the_day].sum() * gb_per_hour,
        store_peak_gbit_per_second=_peak_gbit_per_second(outcome),
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else nan


def _quantile(values: Numbers, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else nan


def _peak_gbit_per_second(outcome: Outcome) -> float:
    minutes = (outcome.at_seconds // PEAK_SECONDS).astype(int)
    n_tokens = np.bincount(minutes, outcome.written + outcome.shared).max()
    return float(n_tokens * outcome.setup.hardware.token_bytes * 8 / 1e9 / PEAK_SECONDS)


def _jobs(
    workload: Workload, seed: int, fleets: Sequence[int], policies: Sequence[Policy]
) -> list[Job]:
    jobs = [
        Job(workload, seed, Setup(n_replicas=n, policy=policy, has_store=has_store))
        for n in fleets
        for policy in policies
        for has_store in (True, False)
    ]
    n_disturbed = max((n for n in fleets if 1 < n <= MOST_DISTURBED), default=None)
    for job in jobs.copy():
        setup, at = job.setup, job.disturbed_at
        if setup.n_replicas != n_disturbed or setup.policy not in DISTURBED_POLICIES:
            continue
        jobs.append(replace(job, setup=replace(setup, replicas_die_at=at)))
        if setup.has_store:
            jobs.append(replace(job, setup=replace(setup, store_leaves_at=at)))
    return jobs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate_fleet", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", metavar="N", help="default: 1 to 1000")
    parser.add_argument("--policy", choices=["all", *map(str, Policy)], default="all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a smoke test, not a result")
    return parser


def _is_calm(setup: Setup) -> bool:
    return setup.replicas_die_at is None and setup.store_leaves_at is None


def _report(results: Sequence[Result]) -> str:
    calm = [result for result in results if _is_calm(result.setup)]
    parts = []
    for n_replicas in dict.fromkeys(result.setup.n_replicas for result in calm):
        chosen = [result for result in calm if result.setup.n_replicas == n_replicas]
        parts.append(f"## Replicas: {n_replicas:,}\n\n{_table(HEADINGS, map(_line, chosen))}")
    disturbed = [result for result in results if not _is_calm(result.setup)]
    if disturbed:
        lines = [_disturbed_line(result, results) for result in disturbed]
        n_replicas = disturbed[0].setup.n_replicas
        title = f"## Disturbed, of {n_replicas:,} replicas"
        parts.append(f"{title}\n\n{_table(DISTURBED_HEADINGS, lines)}")
    return "\n\n".join(parts) + "\n"


HEADINGS = (
    "routing",
    "store",
    "live, memory",
    "disk",
    "shared",
    "computed",
    "amplification",
    "first token p50",
    "p95",
    "busiest / mean",
    "store in GB/h",
    "out GB/h",
    "peak Gbit/s",
)
DISTURBED_HEADINGS = (
    "what happens",
    "routing",
    "store",
    "computed, 10 minutes",
    "undisturbed",
    "computed, the hour behind",
    "undisturbed",
    "first token p95, 10 minutes",
    "undisturbed",
)


def _line(result: Result) -> list[str]:
    found = result.whole
    return [
        str(result.setup.policy),
        "yes" if result.setup.has_store else "no",
        _percent(found.live_share),
        _percent(found.disk_share),
        _percent(found.shared_share),
        _percent(found.recomputed_share),
        f"{found.amplification:.2f}",
        time_text(found.first_token_p50_seconds),
        time_text(found.first_token_p95_seconds),
        f"{found.imbalance:.2f}",
        *(
            f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
            for value in (
                found.store_in_gb_per_hour,
                found.store_out_gb_per_hour,
                found.store_peak_gbit_per_second,
            )
        ),
    ]


def _disturbed_line(result: Result, results: Sequence[Result]) -> list[str]:
    setup = replace(result.setup, replicas_die_at=None, store_leaves_at=None)
    calm = next(each for each in results if each.setup == setup)
    dies = result.setup.replicas_die_at is not None
    return [
        "a tenth of the replicas die" if dies else "the store is away for 10 minutes",
        str(setup.policy),
        "yes" if setup.has_store else "no",
        _percent(result.ten_minutes.recomputed_share),
        _percent(calm.ten_minutes.recomputed_share),
        _percent(result.hour.recomputed_share),
        _percent(calm.hour.recomputed_share),
        time_text(result.ten_minutes.first_token_p95_seconds),
        time_text(calm.ten_minutes.first_token_p95_seconds),
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _table(headings: Sequence[str], lines: Iterable[list[str]]) -> str:
    rows = [list(headings), ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write_csv(path: Path, results: Sequence[Result]) -> None:
    names = [field.name for field in fields(Summary)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["replicas", "policy", "store", "disturbed_by", "window", *names])
        for result in results:
            setup = result.setup
            about = [setup.n_replicas, setup.policy, setup.has_store, _disturbed_by(setup)]
            for window in ("whole", "ten_minutes", "hour"):
                values = asdict(getattr(result, window)).values()
                writer.writerow([*about, window, *(f"{value:.6g}" for value in values)])


def _disturbed_by(setup: Setup) -> str:
    if setup.replicas_die_at is not None:
        return "replicas die"
    return "store leaves" if setup.store_leaves_at is not None else ""


def _pictures(results: Sequence[Result], seed: int) -> dict[str, str]:
    calm = [result for result in results if _is_calm(result.setup)]
    fleets = list(dict.fromkeys(result.setup.n_replicas for result in calm))
    footer = f"Simulated: python -m bench.simulate_fleet --seed {seed}"
    largest = [result for result in calm if result.setup.n_replicas == fleets[-1]]
    with_store = [result for result in calm if result.setup.has_store]
    return {
        "fleet-computed.svg": _picture(
            "Tokens computed for each new token",
            f"By routing policy and number of replicas. {LOG_SCALE}",
            footer,
            _panels(
                {
                    f"{n:,} replicas": [each for each in calm if each.setup.n_replicas == n]
                    for n in fleets[-MOST_PANELS:]
                },
                lambda each: each.whole.amplification,
                _by_store,
                amplification_text,
                lowest=1.0,
            ),
        ),
        "fleet-first-token.svg": _picture(
            f"Time to the first token, {fleets[-1]:,} replicas",
            LOG_SCALE,
            footer,
            [
                *_panels({"p50": largest}, _p50, _by_store, time_text),
                *_panels({"p95": largest}, _p95, _by_store, time_text),
            ],
        ),
        "fleet-store.svg": _picture(
            "What the shared store must carry",
            f"In and out together. {LOG_SCALE}",
            footer,
            [
                *_panels({"GB/hour per replica": with_store}, _traffic, _by_size, _plain),
                *_panels({"Gbit/s, busiest minute": with_store}, _peak, _by_size, _plain),
            ],
        ),
    }


def _picture(title: str, explanation: str, footer: str, panels: Sequence[Panel]) -> str:
    keys = [key for panel in panels for key in panel.values]
    chart = Chart(
        title=title,
        explanation=explanation,
        footer=footer,
        groups=list(dict.fromkeys(group for group, _ in keys)),
        series=list(dict.fromkeys(series for _, series in keys)),
        panels=panels,
        remarks={},
    )
    return svg_of(chart)


def _panels(
    chosen: dict[str, list[Result]],
    measure: Callable[[Result], float],
    series: Callable[[Result], str],
    text: Callable[[float], str],
    *,
    lowest: float | None = None,
) -> list[Panel]:
    """One scale for all of them."""
    by_title = {
        title: {(str(each.setup.policy), series(each)): measure(each) for each in results}
        for title, results in chosen.items()
    }
    values = [value for panel in by_title.values() for value in panel.values() if value > 0]
    scale = LogScale(lowest or min(values, default=1.0) / 2, max(values, default=1.0))
    return [Panel(title, panel, scale, text) for title, panel in by_title.items()]


def _by_store(result: Result) -> str:
    return WITH if result.setup.has_store else WITHOUT


def _by_size(result: Result) -> str:
    return f"{result.setup.n_replicas:,} replicas"


def _p50(result: Result) -> float:
    return result.whole.first_token_p50_seconds


def _p95(result: Result) -> float:
    return result.whole.first_token_p95_seconds


def _traffic(result: Result) -> float:
    found = result.whole
    gb_per_hour = found.store_in_gb_per_hour + found.store_out_gb_per_hour
    return gb_per_hour / result.setup.n_replicas


def _peak(result: Result) -> float:
    return result.whole.store_peak_gbit_per_second


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


if __name__ == "__main__":
    main()
