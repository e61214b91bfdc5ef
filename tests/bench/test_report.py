"""Tables and files of a benchmark: medians over rounds, missing values, and reloading."""

import csv
from dataclasses import astuple, fields, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.bench.report.report import (
    COST,
    FIRST_TOKEN,
    SPEED,
    Cell,
    Grid,
    amplification_grid,
    decode_grid,
    grids_of,
    load_run,
    main,
    markdown_of,
    pair_grid,
    print_report,
    throughput_grid,
    write_report,
)
from rekindle.bench.report.results import BurstRow, MeasuredServer, RequestRow, Run, WorkloadRow
from rekindle.bench.report.summary import notes_of
from tests.support.bench_runs import burst_row, request_row, run_of, silent_row, workload_row

FILES = [
    "requests.csv",
    "workloads.csv",
    "throughput.csv",
    "report.md",
    "report.json",
    "amplification.svg",
    "first-token.svg",
    "total-time.svg",
    "story.svg",
]


def texts(grid: Grid) -> list[list[str]]:
    return [[cell.text for cell in row] for row in grid.rows]


def printed(run: Run, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    print_report(run, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def small_run() -> Run:
    return run_of(
        workload_row("agent-loop", "rekindle"),
        workload_row("agent-loop", "peer", amplification=6.5),
        silent_row("agent-loop", "silent", note="It does not count."),
        servers=("rekindle", "peer", "silent"),
        requests=(
            request_row("agent-loop", "rekindle"),
            request_row("agent-loop", "silent", cached_tokens=None, error='500, "no"\nluck'),
        ),
        bursts=(burst_row("rekindle", 130.5), burst_row("peer", 131.25)),
    )


def test_a_number_is_the_median_of_the_rounds_in_which_it_is_known() -> None:
    rounds = (1.0, 9.0, 1.5, None)
    run = run_of(
        *(
            workload_row("loop", "rekindle", round=number, amplification=value)
            for number, value in enumerate(rounds)
        )
    )
    assert texts(amplification_grid(run)) == [["loop", "40,000", "5,000", "1.500", "-"]]


def drafts_run() -> Run:
    rates = {"rekindle": (300.0, 220.0, 330.0), "rekindle-no-drafts": (100.0, 110.0, 110.0)}
    run = run_of(
        *(
            workload_row(
                "rewrite",
                server,
                round=number,
                decode_tokens_per_second=rate,
                drafted_tokens=100 * (server == "rekindle"),
                accepted_tokens=90 * (server == "rekindle"),
            )
            for server, by_round in rates.items()
            for number, rate in enumerate(by_round)
        ),
        workload_row("agent-loop", "rekindle"),
        servers=(),
    )
    servers = (
        MeasuredServer("rekindle", "1.0"),
        MeasuredServer("rekindle-no-drafts", "1.0", is_variant=True),
    )
    return replace(run, contenders=servers)


def test_decode_rates_stand_beside_their_ratio_to_this_server_without_drafts() -> None:
    assert texts(decode_grid(drafts_run())) == [
        ["rewrite", "rekindle", "300.0", "3.00", "300", "90%"],
        ["rewrite", "rekindle-no-drafts", "110.0", "1.00", "0", "-"],
    ]


def test_tables_of_prefill_have_no_variants_and_no_workloads_that_measure_decoding() -> None:
    grid = amplification_grid(drafts_run())
    assert grid.headings == ["workload", "prompt", "floor", "rekindle"]
    assert [row[0].text for row in grid.rows] == ["agent-loop"]


def test_a_run_that_measures_only_decoding_has_one_table_and_no_pictures(tmp_path: Path) -> None:
    run = drafts_run()
    run = replace(run, workloads=tuple(row for row in run.workloads if row.workload == "rewrite"))
    assert [grid.title for grid in grids_of(run)] == ["Decoding, tokens per second"]
    assert not [path for path in write_report(run, tmp_path) if path.suffix == ".svg"]
    assert load_run(tmp_path) == run


def test_workloads_and_servers_keep_their_order() -> None:
    run = run_of(
        workload_row("z", "peer"),
        workload_row("a", "rekindle"),
        workload_row("z", "rekindle", round=2),
    )
    grid = pair_grid(run, FIRST_TOKEN)
    assert grid.headings == ["workload", "rekindle", "peer"]
    assert [row[0] for row in texts(grid)] == ["z", "a"]


def test_pairs_have_units_for_people_and_a_dash_for_each_missing_half() -> None:
    run = run_of(
        workload_row("loop", "rekindle"),
        workload_row("loop", "peer", first_token_p95_seconds=None, written_bytes=None),
        silent_row("loop", "silent"),
        servers=("rekindle", "peer", "silent", "absent"),
    )
    assert texts(pair_grid(run, FIRST_TOKEN)) == [["loop", "50 / 400", "50 / -", "-", "-"]]
    assert texts(pair_grid(run, SPEED)) == [["loop", "8.25 / 4,900", "8.25 / 4,900", "-", "-"]]
    assert texts(pair_grid(run, COST)) == [["loop", "3.0 / 400", "- / 400", "-", "-"]]


def test_the_best_values_are_marked_after_rounding() -> None:
    run = run_of(
        workload_row("tie", "rekindle", amplification=1.0001),
        workload_row("tie", "peer", amplification=1.0004),
        workload_row("lost", "rekindle", amplification=2.0),
        workload_row("lost", "peer", amplification=1.5),
        workload_row("alone", "rekindle"),
    )
    marks = [[cell.is_best for cell in row[3:]] for row in amplification_grid(run).rows]
    assert marks == [[True, True], [False, True], [False, False]]


def test_a_server_that_failed_requests_is_never_the_best() -> None:
    run = run_of(
        workload_row("loop", "rekindle", amplification=1.2),
        workload_row("loop", "peer", amplification=0.4, errors=3),
        workload_row("loop", "other", amplification=1.3),
        servers=("rekindle", "peer", "other"),
    )
    row = amplification_grid(run).rows[0]
    assert row[3:] == [Cell("1.200", is_best=True), Cell("0.400"), Cell("1.300")]


def test_prompt_and_floor_come_from_the_first_server_that_reports_them() -> None:
    run = run_of(
        silent_row("loop", "rekindle"),
        workload_row("loop", "peer", prompt_tokens=1_234, floor_tokens=567),
    )
    assert texts(amplification_grid(run))[0][1:3] == ["1,234", "567"]


def test_the_ratio_of_a_burst_is_the_median_of_each_rounds_ratio() -> None:
    ours, theirs = (100.0, 50.0, 90.0), (100.0, 25.0, 60.0)
    run = run_of(
        servers=("rekindle", "peer", "silent"),
        bursts=(
            *(burst_row("rekindle", value, round=n) for n, value in enumerate(ours)),
            *(burst_row("peer", value, round=n) for n, value in enumerate(theirs)),
            burst_row("peer", 1.0, round=9),  # ours was interrupted
        ),
    )
    assert texts(throughput_grid(run)) == [["decode, tokens/s", "1", "90.0", "42.5 (1.500)", "-"]]


def test_bursts_are_ordered_by_measure_and_then_by_streams() -> None:
    run = run_of(
        bursts=(
            burst_row("rekindle", 1.0, measure="first_token_ms", streams=8),
            burst_row("rekindle", 1.0, streams=8),
            burst_row("rekindle", 1.0, measure="first_token_ms", streams=4),
            burst_row("rekindle", 1.0, measure="decode_tokens_per_second_by_server"),
            burst_row("rekindle", 1.0, measure="a_new_one"),
        )
    )
    assert [row[:2] for row in texts(throughput_grid(run))] == [
        ["first token, ms", "4"],
        ["first token, ms", "8"],
        ["decode, tokens/s", "8"],
        ["a new one", "1"],
    ]


def test_a_note_on_several_workloads_appears_once() -> None:
    run = run_of(
        workload_row("a", "peer", note="No counts."),
        workload_row("b", "peer", note="No counts."),
        workload_row("b", "peer", note="No counts.", round=2),
        workload_row("b", "rekindle", note="Back after 1 s."),
    )
    assert notes_of(run) == ["peer, all workloads: No counts.", "rekindle, b: Back after 1 s."]


def test_failures_are_notes_with_their_first_error() -> None:
    run = run_of(
        workload_row("a", "peer", errors=2),
        workload_row("a", "peer", errors=1, round=2),
        workload_row("b", "peer", errors=1),
        requests=(
            request_row("a", "rekindle", error="not this"),
            request_row("a", "peer"),
            request_row("a", "peer", error="500:\n" + "long " * 100),
            request_row("a", "peer", error="later"),
        ),
    )
    first, second = notes_of(run)
    assert first.startswith("peer, a: 3 of 24 requests failed; the first: 500: long long")
    assert len(first) < 250
    assert second == "peer, b: 1 of 12 requests failed."


def test_each_row_of_a_csv_is_a_row_of_the_run(tmp_path: Path) -> None:
    run = small_run()
    write_report(run, tmp_path)
    for name, kind, rows in (
        ("requests.csv", RequestRow, run.requests),
        ("workloads.csv", WorkloadRow, run.workloads),
        ("throughput.csv", BurstRow, run.bursts),
    ):
        with (tmp_path / name).open(newline="") as file:
            header, *lines = csv.reader(file)
        assert header == [field.name for field in fields(kind)]
        values = [astuple(row) for row in rows]
        assert lines == [["" if each is None else str(each) for each in row] for row in values]


def test_a_run_loaded_from_its_folder_writes_the_same_files(tmp_path: Path) -> None:
    run = small_run()
    paths = write_report(run, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == FILES
    before = {path: path.read_bytes() for path in paths}
    assert load_run(tmp_path / "new" / "folder") == run

    (tmp_path / "new" / "folder" / "story.svg").unlink()
    assert main([str(tmp_path / "new" / "folder")]) == 0
    assert {path: path.read_bytes() for path in paths} == before


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_folder_without_a_report_is_an_error(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert main([str(tmp_path)]) == 1
    assert "holds no report" in " ".join(capsys.readouterr().err.split())


def test_bursts_alone_are_reported_without_pictures(tmp_path: Path) -> None:
    run = run_of(bursts=(burst_row("rekindle", 130.5),))
    assert not [path for path in write_report(run, tmp_path) if path.suffix == ".svg"]
    assert [grid.title for grid in grids_of(run)] == ["Throughput of bursts that share nothing"]
    assert "130.5" in printed(run)


def test_every_line_of_a_markdown_table_has_as_many_columns() -> None:
    lines = markdown_of(small_run()).splitlines()
    tables: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("|"):
            tables[-1].append(line)
        elif tables[-1]:
            tables.append([])
    found = [table for table in tables if table]
    assert len(found) == 5
    for table in found:
        assert len({line.count(" | ") for line in table}) == 1
        assert set(table[1]) <= set("| -:")
    assert "| agent-loop | 40,000 | 5,000 | **1.020** | 6.500 | - |" in lines


def test_markdown_names_the_machine_the_model_and_the_command() -> None:
    text = markdown_of(small_run())
    for fact in ("Some processor, 2 cores", "tiny.gguf", "rekindle 1.0, peer 1.0", "abc1234"):
        assert fact in text
    assert "```sh\nrekindle bench --rounds 3\n```" in text
    assert "- silent, all workloads: It does not count." in text


def test_names_are_escaped_in_markdown() -> None:
    name = "a|b [red]c[/red]\n<i>*d*"
    run = run_of(workload_row(name, "rekindle", note="[bold]n[/bold]"))
    assert "| a\\|b \\[red\\]c\\[/red\\] \\<i\\>\\*d\\* |" in markdown_of(run)
    assert "[red]c[/red]" in printed(run)
    assert "[bold]n[/bold]" in printed(run)


def test_four_servers_and_the_longest_names_fit_into_100_columns() -> None:
    servers = ("rekindle", "llama-server", "xllamacpp", "llama_cpp.server")
    workload = "reasoning-template-drops-thinking"
    run = run_of(
        *(
            workload_row(
                workload,
                server,
                amplification=12.345,
                first_token_p50_seconds=12.345,
                first_token_p95_seconds=23.456,
            )
            for server in servers
        ),
        servers=servers,
        bursts=tuple(
            burst_row(server, 1234.5, measure="prefill_tokens_per_second") for server in servers
        ),
    )
    text = printed(run)
    headings = [line for line in text.splitlines() if line.startswith(("workload", "burst"))]
    assert len(headings) == 5
    for line in headings:
        assert all(server in line for server in servers)
    assert "12,345 / 23,456" in text
    assert "1,234.5 (1.000)" in text
    assert text.isascii()
