"""Hostile requests and files: 5,000 cases here, a million with `make fuzz`."""

import json
import random
import sys
from pathlib import Path

import pytest

from tests.campaigns.fuzz.answers import problem_of
from tests.campaigns.fuzz.campaign import Campaign, campaign, plan
from tests.campaigns.fuzz.case import (
    SHARES,
    FileCase,
    Kind,
    Leave,
    WireCase,
    read_failure,
    write_failure,
)
from tests.campaigns.fuzz.client import Answer
from tests.campaigns.fuzz.file_checks import FileChecker
from tests.campaigns.fuzz.grow import hostile
from tests.campaigns.fuzz.minimise import minimised
from tests.campaigns.fuzz.report import Report
from tests.campaigns.fuzz.watch import MIB, Memory, log_problems

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

N_CASES, N_PARTS = 5_000, 20
SEED = 18
LONG_STALL_SECONDS = 10.0
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
OPENAI_ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
GOOGLE_ERROR = {"error": {"code": 400, "message": "", "status": "INVALID_ARGUMENT"}}
MESSAGES_ERROR = {"type": "error", "error": {"type": "t", "message": "m"}, "request_id": "r"}


@pytest.mark.timeout(1800)  # a machine under load; the campaign itself watches for hangs
def test_no_hostile_request_or_file_crashes_stalls_or_fills_the_server(tmp_path: Path) -> None:
    part = N_CASES // N_PARTS
    failures = tmp_path / "failures"
    # Shorter stalls are for a quieter machine: `make fuzz` fails on them.
    with campaign(
        tmp_path, failures, seed=SEED, fails_on_stalls=False, stall_seconds=LONG_STALL_SECONDS
    ) as running:
        for first in range(0, N_CASES, part):
            running.run(plan(first, part, list(Kind)))
            running.look()
    report = running.report
    assert report.failures == []
    assert report.n_cases == N_CASES
    assert report.sent.keys() == set(Kind)
    assert report.probed.n_probes > 0


@pytest.mark.parametrize("again", [0, 1, 3])
def test_a_stall_is_a_failure_if_it_comes_again_with_the_same_requests(
    monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    sent: list[object] = []

    async def send(_self: Campaign, cases: object, *, counts: bool) -> None:
        assert not counts
        sent.append(cases)

    def check(_self: Campaign) -> str | None:
        return "a stall" if again and len(sent) >= again else None

    monkeypatch.setattr(Campaign, "_send_all", send)
    monkeypatch.setattr(Campaign, "_check_server", check)
    running = object.__new__(Campaign)
    running.report = Report(seed=1)
    cases = [(Kind.RAW, 1)]
    running._send_again(cases, "stalls")
    assert sent == [cases] * (again or 3)
    assert bool(running.report.failures) == bool(again)
    assert bool(running.report.once) == (not again)


def test_a_plan_is_the_same_for_equal_numbers_and_has_every_kind() -> None:
    whole = plan(0, 3_000, list(Kind))
    assert plan(1_000, 500, list(Kind)) == whole[1_000:1_500]
    counted = {kind: sum(each[0] is kind for each in whole) for kind in Kind}
    assert counted == {kind: 3 * share for kind, share in SHARES.items()}


def test_equal_seeds_give_equal_bodies() -> None:
    def body(seed: int) -> bytes:
        noise = random.Random(seed)
        return hostile.encoded(hostile.mutated({"a": [1, {"b": "c"}]}, noise), noise)

    assert [body(seed) for seed in range(200)] == [body(seed) for seed in range(200)]
    assert len({body(seed) for seed in range(200)}) > 100


@pytest.mark.parametrize(
    "case",
    [
        WireCase(
            Kind.SCHEMA,
            7,
            method="POST",
            path="/v1/messages",
            headers=(("x-api-key", "\xe9"),),
            body=b'{"a": "\xff\x00"}',
            leave=Leave.IN_REPLY,
            leave_bytes=9,
        ),
        WireCase(Kind.RAW, 8, pieces=(b"GET /\xff\x00", b"\r\n\r\n")),
        FileCase(Kind.STATE, 9, b"\x00\xff", name="entries/00/x.kv", is_sealed=True),
    ],
)
def test_a_failing_case_is_read_from_its_file_as_it_was(
    tmp_path: Path, case: WireCase | FileCase
) -> None:
    assert read_failure(write_failure(tmp_path, case, 1, "a problem")) == case


@pytest.mark.parametrize(
    ("path", "status", "body", "is_fine"),
    [
        (CHAT, 400, OPENAI_ERROR, True),
        (CHAT, 400, MESSAGES_ERROR, False),
        (MESSAGES, 400, MESSAGES_ERROR, True),
        (MESSAGES, 400, OPENAI_ERROR, False),
        ("/v1beta/models/x", 404, GOOGLE_ERROR, True),
        ("/v1/models/x:countTokens", 400, GOOGLE_ERROR, True),
        ("/v1/models/x%3AcountTokens", 400, OPENAI_ERROR, False),
        ("/v1/models/x", 404, GOOGLE_ERROR, False),
        (OLLAMA, 404, {"error": "m"}, True),
        (OLLAMA, 400, OPENAI_ERROR, False),
        (OLLAMA, 500, {"error": "m"}, False),
        (OLLAMA, 503, {"error": "The model was unloaded."}, True),
        (CHAT, 400, {"error": "m"}, False),
        (CHAT, 500, OPENAI_ERROR, False),
        (CHAT, 400, "no JSON", False),
        ("/v1beta/models", 500, GOOGLE_ERROR, False),
        (
            MESSAGES,
            529,
            {**MESSAGES_ERROR, "error": {"type": "overloaded_error", "message": ""}},
            True,
        ),
    ],
)
def test_an_answer_of_the_wrong_kind_is_found(
    path: str,
    status: int,
    body: object,
    is_fine: bool,  # noqa: FBT001
) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    answer = Answer(status, {"content-type": "application/json"}, data)
    assert (problem_of(WireCase(Kind.SCHEMA, 0, path=path), answer) is None) == is_fine


def test_a_stream_that_ends_in_a_server_error_is_found() -> None:
    frames = b'data: {"choices": []}\n\ndata: {"error": {"type": "server_error"}}\n\n'
    answer = Answer(200, {"content-type": "text/event-stream; charset=utf-8"}, frames)
    assert problem_of(WireCase(Kind.SCHEMA, 0, path=CHAT), answer) is not None
    items = b'[{"candidates": []},{"error": {"code": 500, "status": "INTERNAL"}}]'
    array = Answer(200, {"content-type": "application/json"}, items)
    assert problem_of(WireCase(Kind.SCHEMA, 0, path="/v1beta/models/x:f"), array) is not None


@pytest.mark.parametrize(
    ("lines", "is_fine"),
    [
        (b'{"done": false}\n {"done": true}\n', True),
        (b'{"done": false}\n', False),
        (b'{"done": false}\n\n{"done": true}\n', False),
        (b'{"done": false}\n{"error": "m"}\n', False),
    ],
)
def test_a_stream_of_lines_that_breaks_clients_is_found(
    lines: bytes,
    is_fine: bool,  # noqa: FBT001
) -> None:
    answer = Answer(200, {"content-type": "application/x-ndjson"}, lines)
    assert (problem_of(WireCase(Kind.SCHEMA, 0, path=OLLAMA), answer) is None) == is_fine


def test_growing_memory_and_errors_in_the_log_are_found() -> None:
    grown = Memory(server=[n * MIB for n in range(0, 800, 10)], engines=[5 * MIB] * 80)
    assert grown.growth() == {"server": 400 * MIB, "engines": 0}
    lives = [n % 30 * MIB for n in range(80)]
    assert Memory(server=[5, 900, *[5] * 78], engines=lives).growth() == {"server": 0, "engines": 0}
    log = "12:00:00 INFO fine\n12:00:01 ERROR request=x: internal error\nTraceback (most recent"
    assert sum(log_problems(log).values()) == 2


def test_a_reader_that_raises_is_found_and_one_that_refuses_is_not() -> None:
    checker = FileChecker()
    try:
        assert checker.problem_of(FileCase(Kind.GGUF, 0, b"not a model")) is None
        assert checker.problem_of(FileCase(Kind.TEMPLATE, 0, b"\xff")) is not None  # UnicodeError
        assert checker.problem_of(FileCase(Kind.GGUF, 0, b"GGUF")) is None
    finally:
        checker.close()


def test_a_failing_request_is_made_smaller() -> None:
    body = {"messages": [1, 2, 3, {"bad": "xxxx", "good": 1}], "stream": True, "n": 2}
    headers = (("host", "x"), ("x-one", "1"))
    case = WireCase(Kind.SCHEMA, 0, headers=headers, body=json.dumps(body).encode())
    smaller = minimised(case, lambda each: isinstance(each, WireCase) and b'"bad"' in each.body)
    assert isinstance(smaller, WireCase)
    assert json.loads(smaller.body) == {"messages": [{"bad": "x"}]}
    assert smaller.headers == ()
