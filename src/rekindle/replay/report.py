"""The results of a replay, summed up: a table for people and JSON for programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import ASCII
from rich.markup import escape
from rich.table import Table

from rekindle.replay.client import Outcome
from rekindle.replay.numbers import count_text, decimal_text, percentile, sum_known
from rekindle.replay.prompts import Counted
from rekindle.replay.traffic import ReplayRequest, Skipped

BELOW_FLOOR = 0.995  # picked: the floor misses a few tokens of replies


@dataclass(slots=True)
class ReplayRun:
    """One pass over the traffic on one server, filled while the pass runs."""

    server: str  # its URL; a repeated URL ends with a number
    repeat: int
    outcomes: list[Outcome] = field(default_factory=list)
    counted: dict[int, Counted] = field(default_factory=dict)  # by request
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    requests: Sequence[ReplayRequest]
    shape: str
    skipped: Mapping[Skipped, int]
    runs: Sequence[ReplayRun]
    was_interrupted: bool

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(run.server for run in self.runs))

    @property
    def n_failed(self) -> int:
        return sum(outcome.error is not None for run in self.runs for outcome in run.outcomes)

    def runs_of(self, server: str) -> list[ReplayRun]:
        """Return the runs on this server. The first is the cold one."""
        return [run for run in self.runs if run.server == server]


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of one or several runs. None: no reply reports it."""

    requests: int
    errors: int
    prompt_tokens: int | None
    cached_tokens: int | None
    prefilled_tokens: int | None
    floor_tokens: int | None
    amplification: float | None
    first_token_p50_seconds: float | None
    first_token_p95_seconds: float | None
    tokens_per_second: float | None  # of prompts and replies
    total_seconds: float


def summary_of(runs: Sequence[ReplayRun]) -> Summary:
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    answered = [outcome.counts for outcome in outcomes if outcome.error is None]
    firsts = [t for each in outcomes if (t := each.first_token_seconds) is not None]
    seconds = sum(run.seconds for run in runs)
    n_prompt = sum_known(counts.n_prompt for counts in answered)
    n_reply = sum_known(counts.n_reply for counts in answered)
    n_tokens = sum_known([n_prompt, n_reply])
    return Summary(
        requests=len(outcomes),
        errors=len(outcomes) - len(answered),
        prompt_tokens=n_prompt,
        cached_tokens=sum_known(counts.n_cached for counts in answered),
        prefilled_tokens=sum_known(counts.n_prefilled for counts in answered),
        floor_tokens=sum_known(each.n_floor for run in runs for each in run.counted.values()),
        amplification=next(iter([*amplifications(runs)][-1:]), None),
        first_token_p50_seconds=percentile(firsts, 50),
        first_token_p95_seconds=percentile(firsts, 95),
        tokens_per_second=n_tokens / seconds if n_tokens is not None and seconds else None,
        total_seconds=seconds,
    )


def amplifications(runs: Sequence[ReplayRun]) -> Iterator[float]:
    """Yield prefilled / floor tokens, from the first request up to each one that has both."""
    n_prefilled = n_floor = 0
    for run in runs:
        for outcome in in_order(run):
            counted, prefilled = run.counted.get(outcome.index), outcome.counts.n_prefilled
            if counted is not None and prefilled is not None:
                n_prefilled += prefilled
                n_floor += counted.n_floor
                if n_floor:
                    yield n_prefilled / n_floor


def in_order(run: ReplayRun) -> list[Outcome]:
    return sorted(run.outcomes, key=lambda outcome: outcome.start)


Column = tuple[str, Summary]  # with its title


def columns_of(report: Report) -> list[Column]:
    """Return a column for each server, and with repeats one for each run before it."""
    columns = []
    for server in report.servers:
        runs = report.runs_of(server)
        if len(runs) > 1:
            columns += [(f"{server} #{run.repeat}", summary_of([run])) for run in runs]
        columns.append((server if len(runs) == 1 else f"{server} all", summary_of(runs)))
    return columns


def rows_of(columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    def row(name: str, shown: Callable[[Summary], str]) -> tuple[str, list[str]]:
        return name, [shown(summary) for _, summary in columns]

    return [
        row("requests", lambda each: count_text(each.requests)),
        row("errors", lambda each: count_text(each.errors)),
        row("prompt tokens", lambda each: count_text(each.prompt_tokens)),
        row("cached", lambda each: count_text(each.cached_tokens)),
        row("prefilled", lambda each: count_text(each.prefilled_tokens)),
        row("floor", lambda each: count_text(each.floor_tokens)),
        row("amplification", lambda each: decimal_text(each.amplification, 3)),
        row("first token p50, s", lambda each: decimal_text(each.first_token_p50_seconds, 3)),
        row("first token p95, s", lambda each: decimal_text(each.first_token_p95_seconds, 3)),
        row("tokens/s", lambda each: decimal_text(each.tokens_per_second, 0)),
        row("total seconds", lambda each: decimal_text(each.total_seconds, 2)),
    ]


def table_of(report: Report) -> Table:
    columns = columns_of(report)
    table = Table("", box=ASCII)
    for title, _ in columns:
        table.add_column(escape(title), justify="right", overflow="fold")
    for name, cells in rows_of(columns):
        table.add_row(name, *cells)
    return table


def notes_of(report: Report) -> list[str]:
    notes = [f"{n} skipped: {reason}." for reason, n in report.skipped.items()]
    for server in report.servers:
        runs = report.runs_of(server)
        counted = [each for run in runs for each in run.counted.values()]
        answered = [each.counts for run in runs for each in run.outcomes if each.error is None]
        if n := sum(each.by_characters for each in counted):
            notes.append(
                f"{server} does not report the tokens of {n} of {len(counted)} prompts:"
                " their floor is estimated from characters."
            )
        if n := sum(not each.is_exact and not each.by_characters for each in counted):
            notes.append(
                f"{server} renders {n} of {len(counted)} prompts differently from its own template"
                " endpoint: their floor is an estimate."
            )
        amplification = summary_of(runs).amplification
        if amplification is not None and amplification < BELOW_FLOOR:
            notes.append(
                f"{server} is below its floor: it had cached prompts before this replay, or"
                " prefilled them while it was idle."
            )
        n = sum(counts.n_cached is None for counts in answered)
        if 0 < n < len(answered):
            notes.append(f"{server} reports no cached tokens for {n} of {len(answered)} requests.")
    if report.was_interrupted:
        notes.append("Interrupted: these are the results up to that point.")
    return notes


def json_of(report: Report) -> dict[str, Any]:
    return {
        "shape": report.shape,
        "interrupted": report.was_interrupted,
        "skipped": {str(reason): n for reason, n in report.skipped.items()},
        "notes": notes_of(report),
        "servers": [
            {
                "server": server,
                "total": asdict(summary_of(report.runs_of(server))),
                "runs": [_run(report, run) for run in report.runs_of(server)],
            }
            for server in report.servers
        ],
    }


def _run(report: Report, run: ReplayRun) -> dict[str, Any]:
    return {
        "repeat": run.repeat,
        **asdict(summary_of([run])),
        "each": [_request(report, run, outcome) for outcome in in_order(run)],
    }


def _request(report: Report, run: ReplayRun, outcome: Outcome) -> dict[str, Any]:
    request = report.requests[outcome.index]
    return {
        "name": request.name,
        "path": request.path,
        "conversation": request.conversation,
        **numbers_of(outcome, run.counted),
    }


def numbers_of(outcome: Outcome, counted: Mapping[int, Counted]) -> dict[str, Any]:
    """Return the measurements of one request by name. None: the server does not report it."""
    return {
        "start_seconds": outcome.start,
        "seconds": outcome.seconds,
        "first_token_seconds": outcome.first_token_seconds,
        "prompt_tokens": outcome.counts.n_prompt,
        "cached_tokens": outcome.counts.n_cached,
        "prefilled_tokens": outcome.counts.n_prefilled,
        "floor_tokens": counted[outcome.index].n_floor if outcome.index in counted else None,
        "reply_tokens": outcome.counts.n_reply,
        "error": outcome.error,
    }
