"""The microbenchmarks run and report their measures. The speeds do not matter here."""

from pathlib import Path

import pytest

from bench import longest_step, lookup, tiers
from bench.report import CONSOLE, BenchRow, Target, at_least, at_most, missed, show, write_rows
from bench.simulated_store import CHAIN_BLOCKS, HEAD_BLOCKS, N_HEADS, headers
from rekindle.cache.index import PrefixIndex, Where
from rekindle.models.source import ModelFile
from tests.support.index_check import check_index
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

ROOT = b"r" * 16


def test_lookups_are_measured_for_every_length_of_prompt() -> None:
    rows = lookup.main(quick=True)
    for n_tokens in lookup.PROMPTS:
        cases = {row.measure for row in rows if row.case.endswith(f"entries, {n_tokens:,} tokens")}
        assert {"match_p50_ms", "match_p99_ms", "find_p50_ms", "note_use_p50_ms"} <= cases
    # The growth of the process is 0 if it had spare memory.
    assert all(row.value > 0 for row in rows if row.measure != "bytes_per_entry")


def test_the_longest_step_is_measured_for_every_case() -> None:
    rows = longest_step.main(quick=True)
    cases = {row.case for row in rows}
    assert {"1,000 entries deleted", "10 new tools", "4,000 tokens: the turn ends"} <= cases
    assert all(row.value > 0 for row in rows)


def test_rows_are_unchanged_after_both_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.engine_run.RESULTS", tmp_path / "results")
    path = write_tiny_model(tmp_path / "tiny.gguf", TinyArchitecture.LLAMA)
    rows = tiers.measure(ModelFile(path, "tiny"), n_tokens=512, n_rounds=1)
    cases = {row.case for row in rows}
    assert {"put into a slot", "transfers: read, warm", "engine: restore from disk, cold"} <= cases
    shares = {row.case for row in rows if row.target == tiers.OF_MEMCPY}
    assert shares == {"put into a slot", "engine: restore from memory"}


def test_a_simulated_store_is_one_tree_in_which_conversations_share_their_heads() -> None:
    index = PrefixIndex(has_rows=True, has_checkpoints=False)
    n_entries = N_HEADS * CHAIN_BLOCKS
    for header in headers(n_entries, root=ROOT, payload_bytes=1):
        index.add(header, Where.DISK)
    check_index(index)
    assert len(index) == n_entries
    assert len(index.below(ROOT)) == n_entries
    deepest = max(node.stop for node in index.nodes())
    assert deepest == CHAIN_BLOCKS * 256
    assert sum(node.start == 0 for node in index.nodes()) == N_HEADS
    assert sum(node.start < HEAD_BLOCKS * 256 for node in index.nodes()) == N_HEADS * HEAD_BLOCKS


@pytest.mark.parametrize(
    ("target", "value", "is_met"),
    [(at_most(2), 2, True), (at_most(2), 2.1, False), (at_least(50), 49, False)],
)
def test_a_target_is_missed_on_its_wrong_side_only(
    target: Target, value: float, *, is_met: bool
) -> None:
    rows = [BenchRow("b", "c", "m", value, target), BenchRow("b", "c", "without", value)]
    assert missed(rows) == ([] if is_met else rows[:1])


def test_a_value_with_a_target_is_shown_with_whether_it_is_met() -> None:
    rows = [
        BenchRow("b", "first", "p50_ms", 1.5, at_most(2)),
        BenchRow("b", "second", "p50_ms", 2.5, at_most(2)),
        BenchRow("b", "third", "p50_ms", 3.5),
    ]
    with CONSOLE.capture() as shown:
        show(rows)
    text = shown.get()
    assert "<= 2" in text
    assert "1.5 ok" in text
    assert "2.5 missed" in text
    assert "3.5 " in text
    assert text.count("ok") == text.count("missed") == 1


def test_the_csv_has_a_line_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    rows = [
        BenchRow("b", "a case, with a comma", "p50_ms", 1.5, at_most(2)),
        BenchRow("b", "c", "m", 3.0),
    ]
    lines = write_rows(rows, "name", quick=True).read_text("utf-8").splitlines()
    assert lines[0] == "benchmark,case,measure,value,target"
    assert lines[1] == 'b,"a case, with a comma",p50_ms,1.5,<= 2'
    assert lines[2] == "b,c,m,3.0,"
