"""Recorded files of every kind, as the requests to send again."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import StartupError
from rekindle.replay.traffic import Skipped, read_traffic

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
MESSAGES = {"max_tokens": 9, "system": "Be brief.", **CHAT}
RESPONSES = {"input": "Hello"}
COMPLETION = {"prompt": "Once"}


def file_of(folder: Path, *records: object, name: str = "trace.jsonl") -> Path:
    file = folder / name
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    file.write_text("\n".join(lines))
    return file


def recorded(seq: int, **fields: Any) -> dict[str, Any]:
    """A line as clients were recorded."""
    line = {"client": "pi", "seq": seq, "t": seq, "t_end": seq + 0.5, "method": "POST"}
    line |= {"path": "/v1/chat/completions", "conv": 1, "headers": {}, "body": CHAT}
    return line | fields


def test_bare_requests_of_every_dialect_go_to_their_endpoint(tmp_path: Path) -> None:
    traffic = read_traffic([file_of(tmp_path, CHAT, MESSAGES, RESPONSES, COMPLETION)])
    assert [request.path for request in traffic.requests] == [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/completions",
    ]
    assert [request.body for request in traffic.requests] == [CHAT, MESSAGES, RESPONSES, COMPLETION]
    assert not traffic.has_times
    assert not traffic.skipped


@pytest.mark.parametrize("content", [json.dumps(CHAT, indent=2), json.dumps([CHAT, MESSAGES])])
def test_a_json_file_holds_one_request_or_a_list(tmp_path: Path, content: str) -> None:
    requests = read_traffic([file_of(tmp_path, content, name="body.json")]).requests
    assert requests[0].body == CHAT
    assert len(requests) == (2 if content.startswith("[") else 1)


def test_recorded_lines_in_any_order_keep_their_times_and_conversation(
    tmp_path: Path,
) -> None:
    traffic = read_traffic([file_of(tmp_path, recorded(2, conv=7), recorded(1, t_end=None))])
    first, second = traffic.requests
    assert (first.name, first.started, first.ended) == ("pi:1", 1.0, None)
    assert (second.name, second.started, second.ended) == ("pi:2", 2.0, 2.5)
    assert first.conversation != second.conversation
    assert traffic.has_times


def test_a_session_header_names_the_conversation(tmp_path: Path) -> None:
    lines = [
        recorded(seq, conv=None, headers=headers)
        for seq, headers in enumerate(
            [
                {"Session-Id": "s1", "Thread-Id": "s1"},
                {"session-id": "s1", "thread-id": "s1"},
                {"session-id": "s1", "thread-id": "sub-agent"},
                {"x-rekindle-class": "unknown"},
            ]
        )
    ]
    main, again, sub_agent, without = read_traffic([file_of(tmp_path, *lines)]).requests
    assert main.conversation == again.conversation
    assert len({main.conversation, sub_agent.conversation, without.conversation}) == 3
    assert [each.is_named for each in (main, sub_agent, without)] == [True, True, False]


def test_our_trace_has_its_session_and_its_dates(tmp_path: Path) -> None:
    line = {
        "path": "/v1/messages",
        "body": MESSAGES,
        "session": "planner",
        "started_at": "2026-01-01T00:00:10Z",
        "ended_at": 1767225612.5,
    }
    [request] = read_traffic([file_of(tmp_path, line)]).requests
    assert request.headers == (("x-rekindle-session", "planner"),)
    assert request.started is not None
    assert request.ended == request.started + 2.5


def test_gzip_is_read_under_any_file_name(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(gzip.compress(json.dumps(recorded(1)).encode()))
    assert len(read_traffic([file]).requests) == 1


def test_only_headers_that_name_a_session_are_sent_and_never_a_key(tmp_path: Path) -> None:
    headers = {
        "Authorization": "Bearer secret",
        "X-Api-Key": "secret",
        "Cookie": "secret",
        "X-Session-Id": "ses_1",
        "thread-id": "t1",
        "session-id": "two\nlines",
        "User-Agent": "pi",
    }
    [request] = read_traffic([file_of(tmp_path, recorded(1, headers=headers))]).requests
    assert dict(request.headers) == {"x-session-id": "ses_1", "thread-id": "t1"}


def test_lines_that_ask_for_no_reply_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = (
        recorded(1, method="GET", path="/v1/models", body=None),
        recorded(2, path="/v1/messages/count_tokens", body=MESSAGES),
        recorded(3, path="/v1/embeddings", body={"input": "a"}),
        {"path": "/v1/chat/completions", "session": "a"},  # its text was not recorded
        "{ cut off",
        recorded(4),
    )
    traffic = read_traffic([file_of(tmp_path, *lines)])
    assert [request.name for request in traffic.requests] == ["pi:4"]
    assert traffic.skipped == {
        Skipped.OTHER_CALL: 3,
        Skipped.NO_TEXT: 1,
        Skipped.UNREADABLE: 1,
    }


def test_turns_that_begin_with_the_same_question_are_one_conversation(tmp_path: Path) -> None:
    system, answer = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}
    one, other = ({"role": "user", "content": each} for each in ("One", "Other"))
    turns = ([system, one], [system, other], [system, one, answer, other])
    requests = read_traffic([file_of(tmp_path, *({"messages": each} for each in turns))]).requests
    names = [request.conversation for request in requests]
    assert names[0] == names[2] != names[1]


def test_the_limit_takes_the_first_over_all_files(tmp_path: Path) -> None:
    one = file_of(tmp_path, recorded(1), recorded(2), name="one.jsonl")
    two = file_of(tmp_path, recorded(1), recorded(2), name="two.jsonl")
    requests = read_traffic([one, two], limit=3).requests
    assert [(each.source, each.name) for each in requests] == [
        (0, "pi:1"),
        (0, "pi:2"),
        (1, "pi:1"),
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "no requests to replay"),
        ("nonsense\nmore", "no line can be replayed (2 x not readable)"),
        ('{"path": "/v1/responses"}', "recorded without its prompt"),
    ],
)
def test_a_file_without_any_request_is_an_error_that_says_why(
    tmp_path: Path, content: str, complaint: str
) -> None:
    with pytest.raises(StartupError) as caught:
        read_traffic([file_of(tmp_path, content)])
    assert complaint in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"gone\.jsonl cannot be read"):
        read_traffic([tmp_path / "gone.jsonl"])
