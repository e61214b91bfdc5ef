"""The gate names the stage that moved, lets noise pass, and fails on another token count."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gate.__main__ import COMMITTED, report_of
from bench.gate.compare import (
    LEAST_RATIO,
    STAGES,
    TOTAL,
    GateRecord,
    GateRound,
    RoundsDiffer,
    Verdict,
    bounds_of,
    differences,
    read_record,
    with_rounds,
    write_record,
)
from bench.gate.measure import NAMES, SAMPLES, LlamaPace, PlayedTokens, stage_seconds
from bench.report import CONSOLE
from rekindle.observe.telemetry import Telemetry
from tests.support.records import a_record

LOOP = "agent-loop"
USUAL = {"queue": 0.001, "render": 0.03, "prefill": 0.6, "decode": 0.5, TOTAL: 1.2}


def a_round(n_tokens: int = 1_000, /, **moved: float) -> GateRound:
    return GateRound({LOOP: n_tokens}, {LOOP: {**USUAL, **moved}})


def recorded(*rounds: GateRound, reference: str = "llama.cpp") -> GateRecord:
    return with_rounds(None, rounds, reference=reference, commit="c")


def found(record: GateRecord, *rounds: GateRound) -> list[tuple[Verdict, str]]:
    return [
        (each.verdict, str(each)) for each in differences(record, rounds, reference="llama.cpp")
    ]


def test_equal_tokens_and_noisy_ratios_pass() -> None:
    record = recorded(a_round(), a_round(prefill=0.66, total=1.3))
    assert not found(record, a_round(prefill=0.7, decode=0.55, total=1.35))


def test_one_token_more_fails() -> None:
    [(verdict, text)] = found(recorded(a_round()), a_round(1_001))
    assert verdict is Verdict.FAILED
    assert text == "agent-loop: 1,001 tokens prefilled, 1,000 are committed"


def test_one_token_fewer_fails_too() -> None:
    assert found(recorded(a_round()), a_round(999))[0][0] is Verdict.FAILED


def test_the_stage_that_moved_is_named_and_blamed_for_the_total() -> None:
    lines = found(recorded(a_round(), a_round()), a_round(decode=0.9, total=1.6))
    assert [verdict for verdict, _ in lines] == [Verdict.FAILED, Verdict.FAILED]
    assert "decode moved: 0.900 of the reference, at most 0.625" in lines[0][1]
    assert lines[1][1].endswith("stages that moved: decode")


def test_a_total_that_moved_alone_says_that_no_stage_did() -> None:
    [(_, text)] = found(recorded(a_round()), a_round(total=1.6))
    assert "no stage moved" in text


def test_the_median_round_counts_so_one_slow_round_passes() -> None:
    record = recorded(a_round())
    assert not found(record, a_round(), a_round(decode=5.0, total=6.0), a_round())


def test_a_stage_that_hardly_takes_time_may_grow_within_that() -> None:
    record = recorded(a_round())
    assert not found(record, a_round(queue=LEAST_RATIO))
    assert found(record, a_round(queue=LEAST_RATIO * 1.1))


def test_a_much_faster_run_asks_for_new_numbers_but_does_not_fail() -> None:
    lines = found(recorded(a_round()), a_round(decode=0.1, total=0.7))
    assert [verdict for verdict, _ in lines] == [Verdict.FASTER]


def test_a_stage_that_is_no_longer_reported_fails() -> None:
    without = GateRound({LOOP: 1_000}, {LOOP: {TOTAL: 1.2}})
    texts = [text for verdict, text in found(recorded(a_round()), without)]
    assert "agent-loop: decode is committed, but this run does not report it" in texts


def test_ratios_to_another_reference_are_not_compared() -> None:
    record = recorded(a_round(), reference="llama.cpp on another machine")
    [(verdict, text)] = found(record, a_round(decode=9.0))
    assert verdict is Verdict.UNKNOWN
    assert text == "times: not compared: no ratios to llama.cpp are committed; --write adds them"
    with CONSOLE.capture() as said:
        assert report_of(differences(record, [a_round(decode=9.0)], reference="llama.cpp")) == 0
    assert "slower" not in said.get()
    assert "are the committed ones" in said.get()
    unknown = GateRound({"new": 1}, {"new": {TOTAL: 1.0}})
    with CONSOLE.capture() as said:
        assert report_of(differences(record, [unknown], reference="llama.cpp")) == 0
    assert "are the committed ones" not in said.get()
    assert found(record, a_round(1_001))[-1][0] is Verdict.FAILED


def test_writing_one_reference_keeps_the_ratios_to_the_other() -> None:
    record = recorded(a_round(), reference="llama-server")
    both = with_rounds(record, [a_round()], reference="llama.cpp", commit="d")
    assert set(both.ratios) == {"llama-server", "llama.cpp"}
    assert both.commits == {"llama-server": "c", "llama.cpp": "d"}


def test_rounds_that_prefill_different_tokens_are_refused() -> None:
    with pytest.raises(RoundsDiffer, match="one round prefilled 1,000 tokens, another 1,002"):
        recorded(a_round(), a_round(1_002))


@pytest.mark.parametrize(
    ("values", "bounds"),
    [((1.0,), (0.8, 1.25)), ((1.0, 2.0), (0.5, 4.0)), ((0.0, 0.001), (0.0, LEAST_RATIO))],
)
def test_bounds_are_as_wide_as_the_committed_rounds_differ(
    values: Sequence[float], bounds: tuple[float, float]
) -> None:
    assert bounds_of(values) == pytest.approx(bounds)


@pytest.mark.parametrize(("moved", "status"), [({}, 0), ({"decode": 3.0}, 1)])
def test_only_a_failure_gives_the_exit_status_1(moved: dict[str, float], status: int) -> None:
    with CONSOLE.capture():
        lines = differences(recorded(a_round()), [a_round(**moved)], reference="llama.cpp")
        assert report_of(lines) == status


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", recorded(a_round(), a_round()))
    again = read_record(tmp_path / "record.json")
    assert not found(again, a_round())


def test_the_committed_numbers_are_those_of_the_gates_workloads() -> None:
    record = read_record(COMMITTED)
    assert set(record.tokens) == set(NAMES)
    for ratios in record.ratios.values():
        assert set(ratios) == set(NAMES)
        assert all(set(stages) == {*SAMPLES, TOTAL} for stages in ratios.values())


def test_stages_are_read_from_the_metrics_that_the_server_writes() -> None:
    telemetry = Telemetry()
    telemetry.observe(
        a_record(
            is_evaluated=True,
            build_seconds=0.5,
            queue_seconds=0.25,
            restore_seconds=0.125,
            prefill_seconds=2.0,
            decode_seconds=4.0,
        )
    )
    seconds = stage_seconds(telemetry.render().decode())
    assert set(seconds) <= set(STAGES)
    assert seconds["render"] == 0.5
    assert seconds["queue"] == 0.25
    assert seconds["restore"] == 0.125
    assert seconds["prefill"] == 2.0
    assert seconds["decode"] == 4.0


def test_a_server_without_our_metrics_has_no_stages() -> None:
    assert stage_seconds("llamacpp:prompt_tokens_total 5\n") == {}


def test_the_reference_counts_the_tokens_that_were_computed() -> None:
    played = PlayedTokens(n_prefilled=100, n_generated=10, busy_seconds=9.0, stage_seconds={})
    assert LlamaPace(prefill=0.01, decode=0.1).seconds_for(played) == pytest.approx(2.0)
