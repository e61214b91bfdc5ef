"""`rekindle explain` on a trace, and on requests looked up at a server."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rekindle.chat.prompt.prompt import Prompt
from rekindle.cli import app
from rekindle.generation.events import NO_SPANS
from rekindle.generation.status import Forecast
from rekindle.observe.request_record import Miss, MissReason
from rekindle.observe.trace import encode
from tests.api.client import serving
from tests.api.fakes import FakeResponder
from tests.support.records import CLOCK, a_record

EVICTED = Miss(reason=MissReason.EVICTED, tokens_lost=5000)
EDITED = Miss(
    reason=MissReason.TEXT_CHANGED,
    message=4,
    part="tool_result",
    before="result: ",
    expected="\x1b[31mall is well",
    got="nothing is well",
    tokens_lost=90,
)


def run(*arguments: str) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(app, ["explain", *arguments], env=cleared)


def write_trace(path: Path, *records: dict[str, Any]) -> Path:
    lines = [
        encode(a_record(**fields), "/v1/messages", b"", has_prompt=False) for fields in records
    ]
    path.write_bytes(b"".join(lines))
    return path


def told(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A clock at four times within two hours, in two sessions; and two other misses."""
    clocks = [
        {
            "session": "ann" if number < 3 else "bob",
            "started_at": 1000.0 + 2400.0 * number,
            "miss": replace(CLOCK, got=f"{20 + number}:44. Be kind."),
        }
        for number in range(4)
    ]
    others = [{"started_at": 5000.0, "miss": miss} for miss in (EVICTED, EDITED, None)]
    return write_trace(tmp_path / "trace", *clocks, *others)


def test_a_clock_is_named_with_its_place_and_what_it_cost_in_all_sessions(trace: Path) -> None:
    [clock] = told(str(trace))["volatile"]
    assert clock["kind"] == "clock"
    assert clock["near"] == "The time is"
    assert clock["where"] == "system prompt"
    assert (clock["times"], clock["sessions"], clock["tokens"]) == (4, 2, 4 * 640)
    assert clock["tokens_in_last_hour"] == 2 * 640
    assert clock["tokens_per_hour"] == 4 * 640 / 2
    assert clock["values"][0] == "10:23:44"
    assert clock["advice"] == (
        "The system prompt holds a clock near 'The time is': it cost 1,280 tokens in the last"
        " hour; move it to the last message."
    )


def test_misses_are_grouped_by_session_reason_and_place_most_expensive_first(trace: Path) -> None:
    report = told(str(trace))
    keys = ("session", "reason", "message", "part", "times", "tokens")
    assert [tuple(group[key] for key in keys) for group in report["groups"]] == [
        ("ann", "evicted", None, None, 1, 5000),
        ("ann", "system_changed", 0, "text", 3, 3 * 640),
        ("bob", "system_changed", 0, "text", 1, 640),
        ("ann", "text_changed", 4, "tool_result", 1, 90),
    ]
    assert report["replies"] == 7
    assert report["lost_tokens"] == 4 * 640 + 5000 + 90
    assert report["reasons"] == {"system_changed": 4, "evicted": 1, "text_changed": 1}


def test_a_single_change_is_not_volatile(tmp_path: Path) -> None:
    once = write_trace(tmp_path / "trace", {"miss": CLOCK}, {})
    report = told(str(once))
    assert report["volatile"] == []
    assert "keep it constant" in report["groups"][0]["advice"]


def test_a_pipe_gets_plain_text_with_both_sides_of_the_difference(trace: Path) -> None:
    output = run(str(trace)).stdout
    assert "The system prompt holds a clock near 'The time is'" in output
    assert "  - The time is 10:17:01. Be kind." in output
    assert "  + The time is 10:23:44. Be kind." in output
    assert "message 4, tool result" in output
    assert "result: \\x1b[31mall is well" in output
    assert "\x1b" not in output


def test_top_shows_those_that_cost_most_and_says_how_many_there_are(trace: Path) -> None:
    output = run(str(trace), "--top", "1").stdout
    assert "evicted" in output
    assert "#1 " in output
    assert "#2 " not in output
    assert "3 more with lower cost" in output


def test_plain_and_gzipped_files_are_read_together_and_torn_lines_are_skipped(
    trace: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "old.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    with trace.open("ab") as file:
        file.write(b'{"t": 1, "ses')
    report = told(str(trace), str(packed))
    assert report["replies"] == 14
    assert report["lines_skipped"] == 1


def test_a_trace_without_misses_says_so(tmp_path: Path) -> None:
    output = run(str(write_trace(tmp_path / "trace", {}))).stdout
    assert "No misses." in output


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"messages": []}', "is not a trace. To look up a request, name a server with --url."),
        (b"", "is not a trace"),
        (b"\x1f\x8bbroken", "is not a complete gzip file"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    error = run(str(path)).exception
    assert complaint in str(error)


class Forecaster(FakeResponder):
    async def look_up(self, prompt: Prompt, *, session: str) -> tuple[Forecast, Miss | None]:
        self.looked_up_for.append(session)
        return Forecast(1000, NO_SPANS, None, None), CLOCK


def test_requests_of_any_api_are_looked_up_at_a_server(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {
            "path": "/v1/messages",
            "headers": {"x-session-id": "ann"},
            "body": {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
        },
        {"prompt": "Once"},
        {"input": "hi"},
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    responder = Forecaster()
    with serving(responder) as url:
        report = told(str(path), "--url", url)
        output = run(str(path), "--url", f"{url}/v1").stdout
    assert [each["name"] for each in report["requests"]] == [
        f"requests.jsonl:{number}" for number in range(1, 5)
    ]
    assert report["requests"][0]["miss"]["got"] == "18:44. Be kind."
    assert responder.looked_up_for[1] == "ann"
    assert not responder.started
    assert "requests.jsonl:1: 0 of 1,000 prompt tokens would be found." in output
    assert "system_changed in system prompt, 640 tokens lost." in output


def test_a_request_that_the_server_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"messages": [{"role": "nobody", "content": "hi"}]}')
    with serving(Forecaster()) as url:
        error = run(str(path), "--url", url).exception
    assert "requests.jsonl:1" in str(error)
    assert "refused" in str(error)
