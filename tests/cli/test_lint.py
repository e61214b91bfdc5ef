"""`rekindle lint` and `rekindle record`: verdicts, files for CI, and recording a command."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from typer.testing import CliRunner, Result

from rekindle.cli import app
from rekindle.errors import StartupError
from tests.lint.conversations import Body, agent
from tests.record.upstream import Upstream, running

WAIT_SECONDS = 60


def lint(*arguments: object) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(
        app, ["lint", *map(str, arguments)], env={**cleared, "COLUMNS": "200"}
    )


def trace_of(folder: Path, name: str, *, with_clock: bool) -> Path:
    requests: list[Body] = agent(Random(4), 2).requests()
    for number, request in enumerate(requests if with_clock else ()):
        system = request["messages"][0]
        system["content"] = f"It is 10:2{number}. {system['content']}"
    path = folder / name
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return trace_of(tmp_path, "clean.jsonl", with_clock=False)


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    return trace_of(tmp_path, "faulty.jsonl", with_clock=True)


def test_a_fault_fails_with_its_place_cost_and_advice(clean: Path, faulty: Path) -> None:
    result = lint(clean, faulty, "--prefill-speed", 100)
    assert result.exit_code == 1
    assert "clock in system prompt: clock near 'It is' changed, 3 times" in result.output
    assert "Move it to the last message" in result.output
    rows = [line.split() for line in result.output.splitlines()[1:3]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("clean.jsonl", "passed"),
        ("faulty.jsonl", "FAILED"),
    ]
    assert lint(clean).exit_code == 0


def test_json_sarif_and_junit_name_the_same_fault(
    clean: Path, faulty: Path, tmp_path: Path
) -> None:
    sarif, junit = tmp_path / "lint.sarif", tmp_path / "lint.xml"
    result = lint(clean, faulty, "--json", "--sarif", sarif, "--junit", junit)
    good, bad = json.loads(result.stdout)["traces"]
    assert (good["amplification"], good["faults"]) == (1.0, [])
    [fault] = bad["faults"]
    assert (fault["kind"], fault["where"], fault["culprit"]) == ("clock", "system prompt", "client")
    assert bad["prefilled_tokens"] == bad["new_tokens"] + fault["lost_tokens"]
    [found] = json.loads(sarif.read_text())["runs"][0]["results"]
    places = [each["physicalLocation"] for each in found["locations"]]
    assert (found["ruleId"], found["level"]) == ("clock", "error")
    assert [place["region"]["startLine"] for place in places] == [2, 3, 4]
    assert places[0]["artifactLocation"]["uri"] == faulty.as_posix()
    suites = ElementTree.parse(junit).getroot()
    assert [(suite.get("name"), suite.get("failures")) for suite in suites] == [
        ("clean.jsonl", "0"),
        ("faulty.jsonl", "2"),
    ]
    assert "tokens prefilled again" in str(suites[1][1][0].get("message"))


def test_a_baseline_allows_what_it_has_and_no_more(faulty: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    assert lint(faulty, "--write-baseline", baseline).exit_code == 0
    result = lint(faulty, "--baseline", baseline)
    assert result.exit_code == 0
    assert "(in the baseline)" in result.output
    lower: dict[str, Any] = json.loads(baseline.read_text())
    lower["traces"]["faulty.jsonl"]["amplification"] -= 0.2
    baseline.write_text(json.dumps(lower))
    assert lint(faulty, "--baseline", baseline).exit_code == 1
    assert lint(faulty, "--max-amplification", 9).exit_code == 0
    assert lint(faulty, "--baseline", baseline, "--max-amplification", 9).exit_code == 1


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"version": 2, "traces": {}}'])
def test_a_file_that_is_no_baseline_is_refused(clean: Path, tmp_path: Path, content: str) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(content)
    error = lint(clean, "--baseline", baseline).exception
    assert isinstance(error, StartupError)
    assert str(baseline) in error.message


def test_lines_without_a_prompt_are_counted_and_many_are_an_error(
    clean: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.jsonl"
    unpacked: dict[str, Any] = {"path": "/v1/chat/completions", "method": "POST", "body": None}
    other_call = {**unpacked, "path": "/v1/models", "method": "GET"}
    lines = clean.read_text() * 5 + "{damaged\n" + json.dumps(unpacked) + "\n"
    path.write_text(lines + (json.dumps(other_call) + "\n") * 9)
    result = lint(path)
    assert result.exit_code == 0
    head, row = (line.split() for line in result.output.splitlines()[:2])
    assert dict(zip(head, row, strict=False))["skipped"] == "2"
    [trace] = json.loads(lint(path, "--json").stdout)["traces"]
    assert (trace["requests"], trace["lines_skipped"]) == (20, 2)
    path.write_text(lines + "{damaged\n")
    error = lint(path).exception
    assert isinstance(error, StartupError)
    assert "3 of 23" in error.message


def test_a_trace_or_a_command_is_needed(clean: Path) -> None:
    for arguments in ((), (clean, "--record", "true")):
        assert isinstance(lint(*arguments).exception, StartupError)


def agent_command(trace: Path, *, exit_code: int = 0) -> str:
    """An agent that sends the requests of a file to the server of its environment."""
    program = (
        "import os, sys, httpx\n"
        "headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        f"for line in open({str(trace)!r}):\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    httpx.post(url, content=line, headers=headers)\n"
        f"sys.exit({exit_code})\n"
    )
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}"


def test_a_command_is_recorded_and_linted(faulty: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    with running(Upstream(pieces=[b"{}"])) as url:
        command = agent_command(faulty)
        result = lint("--record", command, "--upstream", url, "--json", "-o", kept)
        failed = lint("--record", agent_command(faulty, exit_code=3), "--upstream", url)
    assert result.exit_code == 1, result.output
    [trace] = json.loads(result.stdout)["traces"]
    assert [fault["kind"] for fault in trace["faults"]] == ["clock"]
    assert trace["lost_seconds"] > 0  # by the times that were recorded
    assert len(kept.read_text().splitlines()) == 4
    assert lint(kept, "--max-amplification", 9).exit_code == 0
    assert "exit code 3" in failed.output


def test_a_recorded_file_is_written_anew(clean: Path, faulty: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes(faulty.read_bytes())
    with running(Upstream(pieces=[b"{}"])) as url:
        result = lint("--record", agent_command(clean), "--upstream", url, "-o", kept)
    assert result.exit_code == 0, result.output
    assert len(kept.read_text().splitlines()) == 4


def test_a_command_that_fails_writes_no_baseline(clean: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    with running(Upstream(pieces=[b"{}"])) as url:
        command = agent_command(clean, exit_code=3)
        result = lint("--record", command, "--upstream", url, "--write-baseline", baseline)
    assert result.exit_code == 1
    assert not baseline.exists()


def test_what_a_command_prints_does_not_mix_with_json(
    clean: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(Upstream(pieces=[b"{}"])) as url:
        arguments = ("--record", f"echo said; {agent_command(clean)}", "--upstream", url)
        assert lint(*arguments).exit_code == 0
        assert capfd.readouterr().out == "said\n"
        assert lint(*arguments, "--json").exit_code == 0
    assert capfd.readouterr() == ("", "said\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_recorded_command_and_leaves_no_prompts(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The signal reaches lint alone, and not the shell that it started or the shell's child."""
    started = tmp_path / "started"
    command = f"sh -c 'touch {started}; sleep 600'; true"
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "lint", "--record", command],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    _wait_for(started)
    process.send_signal(number)
    process.communicate(timeout=WAIT_SECONDS)  # every process that has its stderr must end
    assert process.returncode == 128 + number
    assert list(tmp_path.glob("rekindle-lint-*")) == []


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_command_that_sends_nothing_is_an_error() -> None:
    error = lint("--record", "true").exception
    assert isinstance(error, StartupError)
    assert "sent no request" in error.message


def test_record_writes_a_trace_until_it_is_interrupted(clean: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with running(Upstream(pieces=[b"{}"])) as url:
        arguments = ["record", "--upstream", url, "-o", str(trace), "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "rekindle", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        own = process.stdout.readline().split("Point the agent at ")[1].split(";")[0]
        for line in clean.read_text().splitlines():
            httpx.post(f"{own}/v1/chat/completions", content=line, timeout=WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while len(trace.read_text().splitlines()) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    assert f"4 requests written to {trace}" in said
    assert lint(trace).exit_code == 0
