"""The trace of a real server: its lines, its readers, and its errors."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.explain.findings import findings_of
from rekindle.explain.trace_file import read_trace
from rekindle.replay.traffic import read_traffic
from tests.support.server_process import serve
from tests.support.workloads import REQUEST_SECONDS, assistant, prose, user

RULES = prose("the rules", 30)


@dataclass(frozen=True, slots=True)
class Traced:
    path: Path
    sent: list[dict[str, Any]]
    metrics: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def traced(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Three turns behind a clock that ticks, the second streamed; then two replies to one."""
    path = tmp_path_factory.mktemp("traced") / "trace.jsonl"
    sent: list[dict[str, Any]] = []
    with serve("--parallel", "2", "--trace", str(path), "--trace-prompts") as server:

        def post(route: str, body: dict[str, Any]) -> None:
            sent.append(body)
            response = httpx.post(f"{server.url}{route}", json=body, timeout=REQUEST_SECONDS)
            assert response.status_code == 200, response.text

        messages = [user("Begin.")]
        for number in range(3):
            clock = {"role": "system", "content": f"It is 10:1{7 + number}:0{number}. {RULES}"}
            body = {"messages": [clock, *messages], "max_tokens": 4, "stream": number == 1}
            post("/v1/chat/completions", body)
            messages += [assistant("Yes."), user("Go on.")]
        post("/v1/completions", {"prompt": "Once upon a time", "n": 2, "max_tokens": 2})
        metrics = httpx.get(f"{server.url}/metrics").text
        server.stop()
    return Traced(path, sent, metrics)


def test_every_reply_is_a_trace_line_with_cached_tokens_and_its_divergence(traced: Traced) -> None:
    first, second, third, *others = traced.lines
    assert len(others) == 2
    assert first["miss"]["reason"] == "first_request"
    for line, (expected, got) in ((second, ("7:00", "8:01")), (third, ("8:01", "9:02"))):
        assert line["miss"]["reason"] == "system_changed"
        assert line["miss"]["message"] == 0
        assert line["miss"]["before"] == "It is 10:1"
        assert line["miss"]["expected"].startswith(expected)
        assert line["miss"]["got"].startswith(got)
        n_cached = sum(span["stop"] - span["start"] for span in line["sources"])
        assert line["cached_tokens"] == n_cached
        assert line["prompt_tokens"] == n_cached + line["prefilled_tokens"]
        assert line["path"] == "/v1/chat/completions"
        assert "Go on." in line["prompt"]
    assert traced.path.stat().st_mode & 0o777 == 0o600


def test_a_trace_with_prompts_can_be_replayed(traced: Traced) -> None:
    traffic = read_traffic([traced.path])
    assert [request.body for request in traffic.requests] == traced.sent
    assert traffic.has_times


def test_a_clock_in_a_real_trace_is_named_with_its_cost(traced: Traced) -> None:
    findings = findings_of(read_trace([traced.path]).replies)
    [clock] = findings.volatile
    assert clock.volatile.kind == "clock"
    assert clock.volatile.near == "It is"
    lost = [line["miss"]["tokens_lost"] for line in traced.lines[1:3]]
    assert clock.cost.tokens == sum(lost) > 0


def test_the_metrics_agree_with_the_trace(traced: Traced) -> None:

    def value(name: str) -> float:
        [found] = re.findall(rf"^{re.escape(name)} (\S+)$", traced.metrics, re.MULTILINE)
        return float(found)

    lines = traced.lines
    assert value('rekindle_misses_total{reason="system_changed"}') == 2
    lost = sum(line["miss"]["tokens_lost"] for line in lines[1:3])
    assert value('rekindle_miss_tokens_total{reason="system_changed"}') == lost
    assert value("rekindle_first_token_seconds_count") == len(lines)
    for finish, n_replies in Counter(line["finish"] for line in lines).items():
        assert value(f'rekindle_replies_total{{finish="{finish}"}}') == n_replies
    prefilled = sum(line["prefilled_tokens"] for line in lines)
    assert value("rekindle_prompt_tokens_prefilled_total") >= prefilled
    assert value("rekindle_step_tokens_total") >= prefilled
    twice = sum(line["prefilled_twice_tokens"] for line in lines)
    assert value("rekindle_prompt_tokens_prefilled_twice_total") == twice
    assert value("rekindle_trace_dropped_total") == 0


def test_an_unwritable_trace_file_stops_the_start_before_the_model_loads(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "rekindle", "serve", "--port", "1024"]
    result = subprocess.run(
        [*command, "--trace", str(tmp_path / "no" / "trace")], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "rekindle: The trace" in result.stderr
    assert "cannot be written: No such file or directory." in result.stderr
