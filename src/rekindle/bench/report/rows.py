"""What happened on a stage -> the rows of a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rekindle.bench.peers.processes import ProcessUsage
from rekindle.bench.report.results import RequestRow, WorkloadRow
from rekindle.bench.stage import StageTraffic
from rekindle.replay.client import Outcome
from rekindle.replay.numbers import percentile
from rekindle.replay.prompts import Counted


@dataclass(frozen=True, slots=True)
class Played:
    """Which workload on which server, in which round."""

    workload: str
    server: str
    round: int


def request_rows(
    played: Played, traffic: StageTraffic, counted: Mapping[int, Counted]
) -> list[RequestRow]:
    return [
        RequestRow(
            workload=played.workload,
            server=played.server,
            round=played.round,
            request=traffic.requests[outcome.index].name,
            start_seconds=outcome.start,
            seconds=outcome.seconds,
            first_token_seconds=outcome.first_token_seconds,
            prompt_tokens=outcome.counts.n_prompt,
            cached_tokens=outcome.counts.n_cached,
            prefilled_tokens=outcome.counts.n_prefilled,
            floor_tokens=counted[outcome.index].n_floor if outcome.index in counted else None,
            reply_tokens=outcome.counts.n_reply,
            error=outcome.error,
        )
        for outcome in sorted(traffic.outcomes, key=lambda each: each.start)
    ]


def workload_row(
    played: Played,
    traffic: StageTraffic,
    counted: Mapping[int, Counted],
    *,
    n_prefilled: int | None,
    usage: ProcessUsage,
    notes: Sequence[str],
) -> WorkloadRow:
    outcomes = traffic.outcomes
    answered = [each for each in outcomes if each.error is None]
    firsts = [t for each in answered if (t := each.first_token_seconds) is not None]
    n_prompt = _all(each.counts.n_prompt for each in answered)
    n_reply = _all(each.counts.n_reply for each in answered)
    n_floor = sum(each.n_floor for each in counted.values()) if counted else None
    seconds = busy_seconds(outcomes)
    n_tokens = None if n_prompt is None or n_reply is None else n_prompt + n_reply
    return WorkloadRow(
        workload=played.workload,
        server=played.server,
        round=played.round,
        requests=len(outcomes),
        errors=len(outcomes) - len(answered),
        prompt_tokens=n_prompt,
        prefilled_tokens=n_prefilled,
        floor_tokens=n_floor,
        amplification=n_prefilled / n_floor if n_prefilled is not None and n_floor else None,
        first_token_p50_seconds=percentile(firsts, 50),
        first_token_p95_seconds=percentile(firsts, 95),
        total_seconds=seconds if answered else None,
        tokens_per_second=n_tokens / seconds if n_tokens is not None and seconds else None,
        written_bytes=usage.written_bytes,
        peak_memory_bytes=usage.peak_memory_bytes,
        note="; ".join(dict.fromkeys(notes)) or None,
    )


def nothing_row(played: Played, reason: str) -> WorkloadRow:
    return workload_row(
        played, StageTraffic(), {}, n_prefilled=None, usage=ProcessUsage(), notes=[reason]
    )


def busy_seconds(outcomes: Sequence[Outcome]) -> float:
    """While any request ran: nobody's reading, and no start of a server, is in it."""
    total = end = 0.0
    for outcome in sorted(outcomes, key=lambda each: each.start):
        stop = outcome.start + outcome.seconds
        total += max(stop - max(outcome.start, end), 0.0)
        end = max(end, stop)
    return total


def _all(values: Iterable[int | None]) -> int | None:
    """None: of some it is not known."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if known and len(known) == len(listed) else None
