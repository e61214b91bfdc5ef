"""The runs of one simulation, and the numbers that sum up each of them."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, nan
from multiprocessing import get_context

import numpy as np

from bench.fleet.model import Policy
from bench.fleet.run import AWAY_SECONDS, FleetOutcome, FleetSetup, Numbers, simulate
from bench.fleet.workload import HOUR_SECONDS, FleetTrace, FleetWorkload, draw

MOST_DISTURBED = 100  # replicas: enough requests in ten minutes to compare; picked
DISTURBED_POLICIES = (Policy.ROUND_ROBIN, Policy.SESSION_HASH)
PEAK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSummary:
    requests: int
    prompt_tokens: int
    live_share: float  # of the prompt tokens, like the next three
    disk_share: float
    shared_share: float
    recomputed_share: float
    amplification: float  # computed tokens / tokens that are new to the fleet
    first_token_p50_seconds: float
    first_token_p95_seconds: float
    imbalance: float  # the busiest replica / the mean; of the whole run, like the next three
    store_in_gb_per_hour: float  # while sessions arrive
    store_out_gb_per_hour: float
    store_peak_gbit_per_second: float  # both ways, in the busiest minute


@dataclass(frozen=True, slots=True)
class Job:
    workload: FleetWorkload
    seed: int
    setup: FleetSetup

    @property
    def disturbed_at(self) -> float:
        return self.workload.hours * HOUR_SECONDS / 2


@dataclass(frozen=True, slots=True)
class Result:
    setup: FleetSetup
    whole: FleetSummary
    ten_minutes: FleetSummary  # from the time of the disturbance, also in calm runs
    hour: FleetSummary  # after these ten minutes


def run_all(jobs: Sequence[Job]) -> list[Result]:
    """Run the jobs in parallel, the largest first. Return the results in the order of jobs."""
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
def _trace(workload: FleetWorkload, n_replicas: int, seed: int) -> FleetTrace:
    return draw(workload, n_replicas, seed)


def summary(outcome: FleetOutcome, begin: float = 0.0, end: float = inf) -> FleetSummary:
    """Sum up the requests that arrive between `begin` and `end`."""
    within = (outcome.at_seconds >= begin) & (outcome.at_seconds < end)
    n_prompt, n_new = outcome.prompt[within].sum(), outcome.new[within].sum()
    n_recomputed = outcome.recomputed[within].sum()
    seconds = outcome.first_token_seconds[within]
    in_the_day = outcome.at_seconds <= outcome.last_arrival_seconds
    gb_per_hour = outcome.setup.hardware.token_bytes / 1e9
    gb_per_hour /= outcome.last_arrival_seconds / HOUR_SECONDS
    return FleetSummary(
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


def _peak_gbit_per_second(outcome: FleetOutcome) -> float:
    minutes = (outcome.at_seconds // PEAK_SECONDS).astype(int)
    n_tokens = np.bincount(minutes, outcome.written + outcome.shared).max()
    return float(n_tokens * outcome.setup.hardware.token_bytes * 8 / 1e9 / PEAK_SECONDS)


def make_jobs(
    workload: FleetWorkload, seed: int, fleets: Sequence[int], policies: Sequence[Policy]
) -> list[Job]:
    jobs = [
        Job(workload, seed, FleetSetup(n_replicas=n, policy=policy, has_store=has_store))
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
