"""Make the rows of a report from the traffic of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rekindle.bench.peers.processes import ProcessUsage
from rekindle.bench.report.results import RequestRow, WorkloadRow
from rekindle.bench.stage import StageTraffic
from rekindle.replay.client import Outcome
from rekindle.replay.numbers import percentile, sum_if_all_known
from rekindle.replay.prompts import Counted
from rekindle.replay.report import numbers_of


@dataclass(frozen=True, slots=True)
class Played:
    """Identifies one workload on one server in one round."""

    workload: str
    server: str
    round: int


def request_rows(
    played: Played, traffic: StageTraffic, counted: Mapping[int, Counted]
) -> list[RequestRow]:
    return [
        RequestRow(
            **asdict(played),
            request=traffic.requests[outcome.index].name,
            **numbers_of(outcome, counted),
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
    decoded: Sequence[Outcome] = (),
) -> WorkloadRow:
    outcomes, answered = traffic.outcomes, traffic.answered
    firsts = [t for each in answered if (t := each.first_token_seconds) is not None]
    n_prompt = sum_if_all_known(each.counts.n_prompt for each in answered)
    n_reply = sum_if_all_known(each.counts.n_reply for each in answered)
    n_floor = sum(each.n_floor for each in counted.values()) if counted else None
    seconds = busy_seconds(outcomes)
    n_tokens = None if n_prompt is None or n_reply is None else n_prompt + n_reply
    return WorkloadRow(
        **asdict(played),
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
        decode_tokens_per_second=decode_rate(decoded),
        drafted_tokens=sum(each.drafted.n_tokens for each in decoded),
        accepted_tokens=sum(each.drafted.n_accepted for each in decoded),
    )


def nothing_row(played: Played, reason: str) -> WorkloadRow:
    """Return the row of a server that could not play the workload."""
    return workload_row(
        played, StageTraffic(), {}, n_prefilled=None, usage=ProcessUsage(), notes=[reason]
    )


def decode_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Return the tokens per second of replies, after the first token of each.

    The client's clock measures it, the same way for every server. None: nothing was measured.
    """
    n_tokens, seconds = 0, 0.0
    for outcome in outcomes:
        first, n_reply = outcome.first_token_seconds, outcome.counts.n_reply
        if first is not None and n_reply is not None:
            n_tokens += n_reply - 1
            seconds += outcome.seconds - first
    return n_tokens / seconds if seconds else None


def busy_seconds(outcomes: Sequence[Outcome]) -> float:
    """Return the time in which at least one request ran. Pauses and restarts do not count."""
    total = end = 0.0
    for outcome in sorted(outcomes, key=lambda each: each.start):
        stop = outcome.start + outcome.seconds
        total += max(stop - max(outcome.start, end), 0.0)
        end = max(end, stop)
    return total
