"""Tables, JSON and the page: numbers add up, and recorded text is escaped."""

import json
import re
from xml.etree import ElementTree

import pytest

from rekindle.replay.charts import Point, lines
from rekindle.replay.client import Outcome
from rekindle.replay.numbers import percentile
from rekindle.replay.page import page_of
from rekindle.replay.prompts import Counted
from rekindle.replay.report import (
    ReplayRun,
    Report,
    columns_of,
    json_of,
    notes_of,
    rows_of,
    summary_of,
)
from rekindle.replay.stream import Counts
from rekindle.replay.traffic import ReplayRequest, Skipped

EVIL = '<script>alert("evil")</script>'


def outcome(index: int, counts: Counts, **fields: object) -> Outcome:
    return Outcome(index, float(index), 1.0, 0.25 * (index + 1), counts, **fields)  # type: ignore[arg-type]


def run_of(
    server: str, *outcomes: Outcome, floors: tuple[int, ...] = (), repeat: int = 1
) -> ReplayRun:
    counted = {i: Counted(i, n, is_exact=True, by_characters=False) for i, n in enumerate(floors)}
    return ReplayRun(server, repeat, list(outcomes), counted, seconds=2.0)


def report_of(*runs: ReplayRun, name: str = "pi:1") -> Report:
    request = ReplayRequest(name, "/v1/responses", {}, (), "0/1", 0)
    return Report([request] * 3, "recorded", {Skipped.OTHER_CALL: 2}, runs, was_interrupted=False)


TOLD = Counts(n_prompt=100, n_cached=60, n_prefilled=40, n_reply=5)
UNTOLD = Counts(n_prompt=100, n_reply=5)


def cells(report: Report) -> dict[str, list[str]]:
    return dict(rows_of(columns_of(report)))


def test_servers_are_side_by_side_and_unknown_values_are_a_dash() -> None:
    failed = Outcome(1, 1.0, 0.1, error="500")
    report = report_of(
        run_of("http://a", outcome(0, TOLD), failed, outcome(2, TOLD), floors=(32, 1, 32)),
        run_of("http://b", outcome(0, UNTOLD), floors=(32,)),
    )
    del report.runs[0].counted[1]
    rows = cells(report)
    assert [title for title, _ in columns_of(report)] == ["http://a", "http://b"]
    assert rows["requests"] == ["3", "1"]
    assert rows["errors"] == ["1", "0"]
    assert rows["prompt tokens"] == ["200", "100"]
    assert rows["cached"] == ["120", "-"]
    assert rows["prefilled"] == ["80", "-"]
    assert rows["floor"] == ["64", "32"]
    assert rows["amplification"] == ["1.250", "-"]
    assert rows["first token p50, s"] == ["0.250", "0.250"]
    assert rows["tokens/s"] == ["105", "52"]


def test_each_repeat_has_a_column_and_all_have_one_together() -> None:
    report = report_of(
        run_of("http://a", outcome(0, TOLD), floors=(40,)),
        run_of("http://a", outcome(0, TOLD), floors=(1,), repeat=2),
    )
    assert [title for title, _ in columns_of(report)] == [
        "http://a #1",
        "http://a #2",
        "http://a all",
    ]
    assert cells(report)["floor"] == ["40", "1", "41"]


def test_the_json_has_every_request_with_its_numbers() -> None:
    report = report_of(run_of("http://a", outcome(0, TOLD), floors=(32,)))
    [server] = json.loads(json.dumps(json_of(report)))["servers"]
    [run] = server["runs"]
    [request] = run["each"]
    assert (request["prefilled_tokens"], request["floor_tokens"]) == (40, 32)
    assert server["total"]["amplification"] == run["amplification"] == 1.25


def test_notes_say_what_was_skipped_and_what_is_not_exact() -> None:
    run = run_of("http://a", outcome(0, TOLD), outcome(1, UNTOLD), floors=(1, 1))
    run.counted[1] = Counted(1, 5, is_exact=False, by_characters=True)
    notes = " ".join(notes_of(report_of(run)))
    assert "2 skipped: no request for a reply." in notes
    assert "estimated from characters" in notes
    assert "reports no cached tokens for 1 of 2 requests" in notes


def test_recorded_and_sampled_text_never_becomes_markup() -> None:
    failed = Outcome(1, 1.0, 0.1, error=EVIL)
    runs = (run_of(f"http://a/{EVIL}", outcome(0, TOLD), failed, floors=(1,)),)
    page = page_of(report_of(*runs, name=f"{EVIL}:1"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert '"evil"' not in page


def test_the_page_needs_nothing_from_elsewhere_and_is_well_formed() -> None:
    page = page_of(
        report_of(run_of("http://a", outcome(0, TOLD), outcome(1, UNTOLD), floors=(1, 2)))
    )
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|(src|href)=", page)
    assert "prefers-color-scheme: dark" in page
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 3
    for svg in svgs:
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("runs", [(), (ReplayRun("http://a", 1),)])
def test_an_interruption_before_the_first_reply_still_has_a_report(
    runs: tuple[ReplayRun, ...],
) -> None:
    report = report_of(*runs)
    assert "</html>" in page_of(report)
    assert rows_of(columns_of(report))
    assert summary_of(runs).amplification is None


def test_a_line_has_a_gap_where_a_request_failed() -> None:
    points = [Point("a", 1.0), Point("b", None), Point("c", 2.0), Point("d", 3.0)]
    svg = lines([points], title="t")
    assert svg.count("<circle") == 3
    assert svg.count('<line class="s0"') == 1


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 21)]
    assert (percentile(values, 50), percentile(values, 95)) == (10.0, 19.0)
    assert (percentile([3.0], 95), percentile([], 50)) == (3.0, None)
