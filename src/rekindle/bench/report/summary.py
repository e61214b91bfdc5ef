"""A run in few numbers: medians over its rounds, failures, and notes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from textwrap import shorten

from rekindle.bench.report.results import Run, WorkloadRow
from rekindle.generation.drafts import DraftCount

LONGEST_ERROR = 160  # characters; picked: some servers reply with a traceback

Key = tuple[str, str]  # workload, server
Measure = Callable[[WorkloadRow], float | None]


def workloads_of(run: Run) -> list[str]:
    """Return the workloads that measure prefill. Those that measure decoding have a table."""
    decoding = decode_workloads_of(run)
    return [name for name in _all_workloads(run) if name not in decoding]


def decode_workloads_of(run: Run) -> list[str]:
    measured = {row.workload for row in run.workloads if row.decode_tokens_per_second is not None}
    return [name for name in _all_workloads(run) if name in measured]


def servers_of(run: Run) -> list[str]:
    """Return the servers without variants, which play few workloads."""
    return [each.name for each in run.contenders if not each.is_variant]


def decode_rates_of(run: Run, workload: str) -> dict[str, dict[int, float]]:
    """Return the tokens per second of a workload by server and round, in the servers' order."""
    found: dict[str, dict[int, float]] = {each.name: {} for each in run.contenders}
    for row in run.workloads:
        if row.workload == workload and (rate := row.decode_tokens_per_second) is not None:
            found.setdefault(row.server, {})[row.round] = rate
    return found


def acceptance_of(run: Run, workload: str, server: str) -> DraftCount:
    """Return the drafted and the accepted tokens of all rounds."""
    rows = [row for row in run.workloads if (row.workload, row.server) == (workload, server)]
    return DraftCount(
        sum(row.drafted_tokens for row in rows), sum(row.accepted_tokens for row in rows)
    )


def _all_workloads(run: Run) -> list[str]:
    return list(dict.fromkeys(row.workload for row in run.workloads))


def n_rounds_of(run: Run) -> int:
    return len({row.round for row in run.workloads} | {row.round for row in run.bursts})


def medians(run: Run, measure: Measure) -> dict[Key, float]:
    """Return the medians over the rounds that have a value. Unknown ones have no entry."""
    known: dict[Key, list[float]] = {}
    for row in run.workloads:
        if (value := measure(row)) is not None:
            known.setdefault((row.workload, row.server), []).append(value)
    return {key: median(values) for key, values in known.items()}


@dataclass(frozen=True, slots=True)
class Failures:
    """Requests of all rounds."""

    n_failed: int
    n_requests: int


def failures_of(run: Run) -> dict[Key, Failures]:
    found: dict[Key, Failures] = {}
    for row in run.workloads:
        before = found.get((row.workload, row.server), Failures(0, 0))
        found[row.workload, row.server] = Failures(
            before.n_failed + row.errors, before.n_requests + row.requests
        )
    return {key: each for key, each in found.items() if each.n_failed}


def bursts_of(run: Run) -> dict[tuple[str, int], dict[str, dict[int, float]]]:
    """Return values by measure and streams, then by server and round.

    Measures keep their order, streams grow.
    """
    measures = list(dict.fromkeys(row.measure for row in run.bursts))
    found: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for row in sorted(run.bursts, key=lambda row: (measures.index(row.measure), row.streams)):
        of_server = found.setdefault((row.measure, row.streams), {})
        of_server.setdefault(row.server, {})[row.round] = row.value
    return found


def ratio_of(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Return the median ratio. Rounds are compared one by one: both share slow moments."""
    ratios = [ours[n] / theirs[n] for n in sorted(ours.keys() & theirs.keys()) if theirs[n]]
    return median(ratios) if ratios else None


def notes_of(run: Run) -> list[str]:
    return [*_written_notes(run), *_failure_notes(run)]


def _written_notes(run: Run) -> Iterator[str]:
    """Yield each note once, with all its workloads."""
    workloads: dict[Key, list[str]] = {}
    for row in run.workloads:
        if row.note:
            workloads.setdefault((row.server, row.note), []).append(row.workload)
    for (server, note), names in workloads.items():
        unique = list(dict.fromkeys(names))
        where = "all workloads" if unique == _all_workloads(run) else ", ".join(unique)
        yield f"{server}, {where}: {note}"


def _failure_notes(run: Run) -> Iterator[str]:
    for (workload, server), each in failures_of(run).items():
        said = f"{server}, {workload}: {each.n_failed} of {each.n_requests} requests failed"
        here = [row for row in run.requests if (row.workload, row.server) == (workload, server)]
        error = next((row.error for row in here if row.error), "")
        first = shorten(error, LONGEST_ERROR, placeholder=" ...")
        yield f"{said}; the first: {first}" if first else f"{said}."
