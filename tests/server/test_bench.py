"""`rekindle bench` from end to end, with this server alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_quick_agent_loop_is_measured_and_reported(embedded_model: Path, tmp_path: Path) -> None:
    left_out = [f"--without={name}" for name in ("llama-server", "xllamacpp", "llama_cpp.server")]
    command = [sys.executable, "-m", "rekindle", "bench", "--quick", "--only", "agent-loop"]
    result = subprocess.run(
        [*command, *left_out, "--scale", "0.5", "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")},
    )
    assert result.returncode == 0, result.stderr
    run = json.loads(result.stdout)
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
