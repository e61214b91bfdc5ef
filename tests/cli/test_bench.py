"""`rekindle bench` as far as no server is needed."""

import os
from pathlib import Path

from typer.testing import CliRunner, Result

from rekindle.bench.workloads.drafts import DRAFT_WORKLOADS
from rekindle.bench.workloads.workloads import WORKLOADS
from rekindle.cli import app
from rekindle.errors import StartupError


def bench(*arguments: object) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={**cleared})


def test_the_list_names_every_workload_with_a_line() -> None:
    result = bench("--list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    names = [line.split()[0] for line in lines]
    known, drafts = ([each.name for each in group] for group in (WORKLOADS, DRAFT_WORKLOADS))
    assert names == [*known, "recorded", *drafts, "throughput"]
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_workload_is_refused_before_anything_starts(tmp_path: Path) -> None:
    error = bench("--only", "agent-lop", "--out", tmp_path / "out").exception
    assert isinstance(error, StartupError)
    assert "agent-lop" in error.message
    assert not (tmp_path / "out").exists()


def test_vllm_needs_a_python_and_weights(tmp_path: Path) -> None:
    error = bench("--vllm-model", tmp_path, "--out", tmp_path / "out").exception
    assert isinstance(error, StartupError)
    assert "--vllm and --vllm-model belong together" in error.message
