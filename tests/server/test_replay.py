"""`rekindle replay` with the embedded model: a small conversation in three dialects."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import assistant, prose, system, user

N_TURNS = 3
# At a turn's end the template writes what the prompt of the reply did not have.
SLACK_TOKENS = 4


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "2") as server:
        yield server


def turns(name: str) -> list[list[dict[str, Any]]]:
    """What is sent in each turn, without the system prompt."""
    said: list[dict[str, Any]] = []
    sent = []
    for number in range(N_TURNS):
        said = [*said, user(f"{name} {number}: {prose(f'{name}{number}', 30)}")]
        sent.append(said)
        said = [*said, assistant(f"Done with {number}.")]
    return sent


def recorded(folder: Path) -> Path:
    """Three conversations of their own, one in each dialect, side by side."""
    text: str = system("planner", 120)["content"]
    chat = [{"messages": [system("planner", 120), *each]} for each in turns("chat")]
    messages = [{"system": text, "messages": each, "max_tokens": 99} for each in turns("messages")]
    responses = [{"instructions": text, "input": each} for each in turns("responses")]
    kinds: list[tuple[str, list[dict[str, Any]]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/messages?beta=true", messages),
        ("/v1/responses", responses),
    ]
    lines = [
        {
            "client": "<script>",
            "seq": number * len(kinds) + kind,
            "t": number * 10.0 + kind,
            "t_end": number * 10.0 + 5,
            "method": "POST",
            "path": path,
            "conv": kind,
            "headers": {"X-Session-Id": f"session-{kind}", "Authorization": "Bearer secret"},
            "body": bodies[number],
        }
        for number in range(N_TURNS)
        for kind, (path, bodies) in enumerate(kinds)
    ]
    lines.append({"method": "GET", "path": "/v1/models", "body": None})
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def rekindle_replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "REKINDLE_" not in name}
    return subprocess.run(
        [sys.executable, "-m", "rekindle", "replay", *map(str, arguments)],
        env=clean,
        capture_output=True,
        text=True,
    )


def test_a_conversation_in_each_wire_format_costs_its_floor_and_almost_nothing_when_repeated(
    server: ServerProcess, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    done = rekindle_replay(
        *(recorded(tmp_path), "--url", server.url, "--url", f"{server.url}/v1"),
        *("--max-tokens", 4, "--json", "--html", page),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["shape"] == "recorded"
    skipped, below = report["notes"]  # none says that a floor is near, not exact
    assert skipped == "1 skipped: no request for a reply."
    assert below.startswith(f"{server.url}/v1 is below its floor")
    first, again = (each["runs"][0] for each in report["servers"])
    n_requests = 3 * N_TURNS
    assert (first["requests"], first["errors"]) == (n_requests, 0)
    assert first["cached_tokens"] + first["prefilled_tokens"] == first["prompt_tokens"]
    # The second run's replies are remembered, so a turn may stand there in other tokens.
    assert abs(first["floor_tokens"] - again["floor_tokens"]) <= SLACK_TOKENS * n_requests
    assert first["prefilled_tokens"] <= first["floor_tokens"] + SLACK_TOKENS * n_requests
    assert again["prefilled_tokens"] <= SLACK_TOKENS * n_requests
    assert {each["path"] for each in first["each"]} == {
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    }
    html = page.read_text("utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;:0" in html


def test_a_table_shows_both_servers(server: ServerProcess, tmp_path: Path) -> None:
    done = rekindle_replay(
        *(recorded(tmp_path), "--url", server.url, "--url", server.url, "--limit", 2),
        *("--shape", "concurrent:2", "--max-tokens", 1),
    )
    assert done.returncode == 0, done.stderr
    assert f"| {server.url} | {server.url} (2) |" in done.stdout
    for name in ("requests", "floor", "amplification", "first token p95, s", "tokens/s"):
        assert f"| {name} " in done.stdout
