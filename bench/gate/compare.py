"""The comparison of a run with the committed numbers. It measures nothing.

Tokens must be equal. A ratio is the time of a stage over the time of the reference for the same
tokens in the same run, so a busy machine moves both. CPUs differ in what they do well, so ratios
are compared with those of the same kind of machine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from statistics import median

STAGES = ("queue", "render", "tokenise", "lookup", "restore", "prefill", "decode", "export")
TOTAL = "total"
TIMES = "times"  # of all workloads
LEAST_MARGIN = 1.25  # factor beyond the committed ratios, if these hardly differ; picked
LEAST_RATIO = 0.02  # of the reference's time: a stage that takes less is noise; picked

Ratios = Mapping[str, Mapping[str, float]]  # by workload, then by stage


@dataclass(frozen=True, slots=True)
class GateRound:
    """One round: every workload once."""

    tokens: Mapping[str, int]  # prefilled, by workload
    ratios: Ratios


@dataclass(frozen=True, slots=True)
class GateRecord:
    """The committed numbers. Ratios are those of every round, by reference, workload and stage.

    A reference is a program on a kind of machine.
    """

    commits: Mapping[str, str]  # that the ratios were measured at, by reference
    tokens: Mapping[str, int]
    ratios: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


class Verdict(Enum):
    FAILED = auto()
    FASTER = auto()
    UNKNOWN = auto()  # there is no committed number


@dataclass(frozen=True, slots=True)
class Difference:
    verdict: Verdict
    workload: str
    text: str

    def __str__(self) -> str:
        return f"{self.workload}: {self.text}"


class RoundsDiffer(Exception):
    """Rounds of one run prefilled different numbers of tokens."""


def read_record(path: Path) -> GateRecord:
    return GateRecord(**json.loads(path.read_text("utf-8")))


def write_record(path: Path, record: GateRecord) -> None:
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", "utf-8")


def with_rounds(
    record: GateRecord | None,
    rounds: Sequence[GateRound],
    *,
    reference: str,
    commit: str,
) -> GateRecord:
    """Return the record with these rounds. Ratios to other references stay."""
    commits, ratios = (record.commits, record.ratios) if record else ({}, {})
    return GateRecord(
        {**commits, reference: commit},
        tokens_of(rounds),
        {**ratios, reference: _by_stage(rounds)},
    )


def tokens_of(rounds: Sequence[GateRound]) -> Mapping[str, int]:
    """Return the tokens by workload. Raises RoundsDiffer unless all rounds agree."""
    first, *others = rounds
    for other in others:
        for workload, n_tokens in first.tokens.items():
            if other.tokens[workload] != n_tokens:
                raise RoundsDiffer(
                    f"{workload}: one round prefilled {n_tokens:,} tokens,"
                    f" another {other.tokens[workload]:,}"
                )
    return first.tokens


def differences(
    record: GateRecord, rounds: Sequence[GateRound], *, reference: str
) -> list[Difference]:
    """Compare the rounds with the record: their tokens, and the medians of their ratios."""
    known = record.ratios.get(reference)
    found: list[Difference] = []
    if known is None:
        text = f"not compared: no ratios to {reference} are committed; --write adds them"
        found.append(Difference(Verdict.UNKNOWN, TIMES, text))
    for workload, n_tokens in tokens_of(rounds).items():
        found += _token_differences(workload, n_tokens, record.tokens.get(workload))
        if known is None:
            continue
        measured = {stage: median(values) for stage, values in _by_stage(rounds)[workload].items()}
        found += _ratio_differences(workload, measured, known.get(workload, {}))
    return found


def bounds_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest ratio that noise explains.

    The more the committed rounds differ, the wider the bounds are.
    """
    lowest, highest = min(values), max(values)
    margin = max(LEAST_MARGIN, highest / lowest) if lowest > 0 else LEAST_MARGIN
    return lowest / margin, max(highest * margin, LEAST_RATIO)


def _token_differences(workload: str, now: int, before: int | None) -> Iterator[Difference]:
    if before is None:
        yield Difference(Verdict.UNKNOWN, workload, f"{now:,} tokens prefilled, none are committed")
    elif now != before:
        text = f"{now:,} tokens prefilled, {before:,} are committed"
        yield Difference(Verdict.FAILED, workload, text)


def _ratio_differences(
    workload: str, now: Mapping[str, float], before: Mapping[str, Sequence[float]]
) -> Iterator[Difference]:
    moved: list[str] = []
    for stage in (*STAGES, TOTAL):
        if stage not in now:
            if stage in before:
                text = f"{stage} is committed, but this run does not report it"
                yield Difference(Verdict.FAILED, workload, text)
            continue
        if stage not in before:
            text = f"{stage} {now[stage]:.3f} of the reference, no ratio is committed"
            yield Difference(Verdict.UNKNOWN, workload, text)
            continue
        low, high = bounds_of(before[stage])
        is_total = stage == TOTAL
        if now[stage] > high:
            blamed = f"; {_blame(moved)}" if is_total else ""
            text = f"{stage} moved: {_numbers(now[stage], high, before[stage])}{blamed}"
            yield Difference(Verdict.FAILED, workload, text)
            moved.append(stage)
        elif is_total and now[stage] < low:
            text = f"{stage} {now[stage]:.3f} of the reference, {_committed(before[stage])}"
            yield Difference(Verdict.FASTER, workload, text)


def _blame(moved: Sequence[str]) -> str:
    if moved:
        return f"stages that moved: {', '.join(moved)}"
    return "no stage moved, so the time is spent between them"


def _numbers(now: float, high: float, before: Sequence[float]) -> str:
    return f"{now:.3f} of the reference, at most {high:.3f} ({_committed(before)})"


def _committed(before: Sequence[float]) -> str:
    return f"committed: {min(before):.3f} to {max(before):.3f}"


def _by_stage(rounds: Sequence[GateRound]) -> dict[str, dict[str, list[float]]]:
    """Return the ratios of all rounds, by workload and stage."""
    return {
        workload: {
            stage: [round(each.ratios[workload][stage], 4) for each in rounds] for stage in stages
        }
        for workload, stages in rounds[0].ratios.items()
    }
