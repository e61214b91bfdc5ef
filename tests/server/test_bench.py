"""`rekindle bench` from end to end, with this server alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rekindle.bench.timeline.stages import BETWEEN, ELSEWHERE


def quick_loop(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rekindle", "bench", "--quick", "--only", "agent-loop"]
    result = subprocess.run(
        [*command, *arguments, "--scale", "0.5", "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")},
    )
    assert result.returncode == 0, result.stderr
    assert "1/1  agent-loop  rekindle  starting" in result.stderr.splitlines()
    run: dict[str, Any] = json.loads(result.stdout)
    return run


@pytest.mark.long
def test_a_timeline_has_the_stages_of_server_engine_and_stores(
    embedded_model: Path, tmp_path: Path
) -> None:
    run = quick_loop(tmp_path, "--timeline")
    assert [row["server"] for row in run["workloads"]] == ["rekindle"]
    table = (tmp_path / "timeline-agent-loop.md").read_text("utf-8")
    stages = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:]}
    assert {"read body", "render", "tokenise", "look up", "plan", "batch", "sample"} <= stages
    assert {"deliver", "export", BETWEEN, ELSEWHERE} <= stages
    svg = ElementTree.fromstring((tmp_path / "timeline-agent-loop.svg").read_text("utf-8"))
    bars = [text.split(" ")[0] for text in svg.itertext()]
    assert {"batch", "write"} <= set(bars)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.long
def test_a_quick_agent_loop_is_measured_and_reported(embedded_model: Path, tmp_path: Path) -> None:
    left_out = [f"--without={name}" for name in ("llama-server", "xllamacpp", "llama_cpp.server")]
    run = quick_loop(tmp_path, *left_out)
    [row] = run["workloads"]
    assert (row["server"], row["errors"], row["requests"]) == ("rekindle", 0, 4)
    assert row["amplification"] == row["prefilled_tokens"] / row["floor_tokens"]
    assert row["amplification"] <= 1.02
    assert row["prompt_tokens"] > 2 * row["floor_tokens"]
    assert [each["request"] for each in run["requests"]] == [
        f"agent, turn {n}" for n in range(1, 5)
    ]
    assert {"requests.csv", "workloads.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
