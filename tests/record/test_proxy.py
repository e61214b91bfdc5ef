"""The proxy: what passes, what is recorded, and what never is."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.errors import StartupError
from rekindle.record.command import environment_for
from rekindle.record.proxy import Proxy
from rekindle.record.redaction import REDACTED
from rekindle.record.trace_writer import TraceWriter
from rekindle.replay.as_chat import conversation_in
from rekindle.replay.traffic import read_traffic
from tests.record.upstream import Upstream, running

WAIT_SECONDS = 30
USER = {"role": "user", "content": "Hello"}
CHAT = {"model": "m", "messages": [USER]}
KEY = "sk-test-0123456789abcdefghij"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "Hello"},
    "/v1/responses": {"model": "m", "input": "Hello"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1beta/models/m:streamGenerateContent": {"contents": [{"parts": [{"text": "Hello"}]}]},
    "/api/chat": CHAT,
    "/api/generate": {"model": "m", "prompt": "Hello"},
}


@contextmanager
def recording(upstream: Upstream, trace: Path, suffix: str = "") -> Iterator[httpx.Client]:
    """Yield a client of a proxy in front of the upstream. The trace is written at the end."""
    writer = TraceWriter(trace)
    with running(upstream) as url:
        proxy = Proxy(url + suffix, writer)
        with running(proxy) as own, httpx.Client(base_url=own, timeout=WAIT_SECONDS) as client:
            yield client
    writer.close()


def lines(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text("utf-8").splitlines()]


def test_a_packed_reply_passes_byte_for_byte_and_is_recorded_unpacked(tmp_path: Path) -> None:
    packed = gzip.compress(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
    upstream = Upstream(headers=[*headers, (b"x-own", b"1")], pieces=[packed[:9], packed[9:]])
    trace = tmp_path / "trace.jsonl"
    with (
        recording(upstream, trace) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        assert b"".join(response.iter_raw()) == packed
        assert response.headers["x-own"] == "1"
        assert "date" not in response.headers
        assert "server" not in response.headers
    [line] = lines(trace)
    assert line["reply"]["text"] == 'data: {"choices": []}\n\ndata: [DONE]\n\n'
    assert line["t"] <= line["t_first"] <= line["t_end"]


def test_each_piece_of_a_stream_arrives_before_the_next_is_sent(tmp_path: Path) -> None:
    upstream = Upstream(pieces=[b"data: 1\n\n", b"data: 2\n\n"], waits=True)
    with (
        recording(upstream, tmp_path / "trace.jsonl") as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        upstream.go_on.set()
        assert next(pieces) == b"data: 2\n\n"


def test_a_client_that_leaves_ends_its_request_at_the_upstream(tmp_path: Path) -> None:
    upstream = Upstream(pieces=[b"data: 1\n\n", b"data: 2\n\n"], waits=True)
    trace = tmp_path / "trace.jsonl"
    with recording(upstream, trace) as client:
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            next(response.iter_raw())
        assert upstream.left.wait(WAIT_SECONDS)
    [line] = lines(trace)
    assert line["t_end"] is None
    assert line["reply"]["text"] == "data: 1\n\n"


def test_a_stream_that_the_upstream_cuts_is_cut_for_the_client(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with (
        recording(Upstream(pieces=[b"data: 1\n\n"], breaks=True), trace) as client,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.post("/v1/chat/completions", json=CHAT)
    [line] = lines(trace)
    assert (line["t_end"], line["reply"]["text"]) == (None, "data: 1\n\n")


def test_the_upstream_sees_the_request_of_the_client_alone(tmp_path: Path) -> None:
    upstream = Upstream(pieces=[b"{}"])
    body = gzip.compress(json.dumps(CHAT).encode())
    headers = {"content-encoding": "gzip", "authorization": f"Bearer {KEY}", "user-agent": "a/1"}
    trace = tmp_path / "trace.jsonl"
    with recording(upstream, trace, suffix="/v1") as client:
        client.post("/v1/a%2Fb?key=1&alt=sse", content=body, headers=headers)
    [(line, seen, sent)] = upstream.requests
    assert line == "POST /v1/a%2Fb?key=1&alt=sse"
    assert sent == body
    assert seen["authorization"] == f"Bearer {KEY}"
    assert seen["user-agent"] == "a/1"
    assert lines(trace)[0]["body"] == CHAT
    assert lines(trace)[0]["client"] == "a"


def test_an_error_of_the_upstream_passes(tmp_path: Path) -> None:
    upstream = Upstream(status=429, headers=[(b"retry-after", b"7")], pieces=[b'{"error": 1}'])
    trace = tmp_path / "trace.jsonl"
    with recording(upstream, trace) as client:
        response = client.post("/v1/messages", json=CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.content == b'{"error": 1}'
    assert lines(trace)[0]["reply"]["status"] == 429


def test_an_upstream_that_is_down_answers_502_with_its_address(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with running(Proxy("http://127.0.0.1:9", writer)) as own:
        response = httpx.post(f"{own}/v1/chat/completions", json=CHAT)
    writer.close()
    assert response.status_code == 502
    assert "http://127.0.0.1:9 cannot be reached" in response.json()["error"]["message"]
    assert lines(tmp_path / "trace.jsonl")[0]["reply"]["status"] is None


def test_the_trace_of_every_wire_format_can_be_linted_and_that_of_four_replayed(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    with recording(Upstream(pieces=[b"{}"]), trace) as client:
        client.get("/v1/models")
        for path, body in BODIES.items():
            client.post(path, json=body)
    read = read_traffic([trace], every_format=True)
    assert [request.path for request in read.requests] == list(BODIES)
    texts = [
        conversation.messages[-1].text
        for request in read.requests
        if (conversation := conversation_in(request)) is not None
    ]
    assert texts == ["Hello"] * 6  # all but the raw completion
    assert [request.path for request in read_traffic([trace]).requests] == list(BODIES)[:4]


def test_keys_are_nowhere_in_the_trace(tmp_path: Path) -> None:
    secrets = {
        "authorization": "Bearer my-private-token-1",
        "x-api-key": KEY,
        "x-goog-api-key": "goog-private-token-2",
        "cookie": "session=cookie-private-3",
        "x-corporate": "corporate-private-4",
    }
    tool = {
        "type": "mcp",
        "headers": {"Authorization": "Bearer tool-private-5"},
        "authorization": "tool-private-6",
    }
    said = f"env says {KEY} and my-private-token-1 and ghp_{'a1' * 18}"
    body = {**CHAT, "tools": [tool], "messages": [{"role": "user", "content": said}]}
    trace = tmp_path / "trace.jsonl"
    with recording(Upstream(pieces=[f'{{"said": "{KEY}"}}'.encode()]), trace) as client:
        client.post("/v1/responses?key=query-private-7&alt=sse", json=body, headers=secrets)
        client.post("/v1/responses", json=body)
    text = trace.read_text("utf-8")
    assert "private" not in text
    assert KEY not in text
    assert "a1a1" not in text
    first, second = lines(trace)
    assert first["path"] == f"/v1/responses?key={REDACTED}&alt=sse"
    assert first["body"]["messages"] == second["body"]["messages"]
    assert first["headers"]["x-corporate"] == REDACTED
    assert trace.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_of_the_environment_does_not_stand_before_a_local_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with running(Upstream(pieces=[b"{}"])) as url, running(Proxy(url, writer)) as own:
        response = httpx.post(f"{own}/v1/chat/completions", json=CHAT, trust_env=False)
    writer.close()
    assert response.status_code == 200


def test_a_recorded_command_reaches_the_proxy_without_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.delenv("no_proxy", raising=False)
    found = environment_for("http://127.0.0.1:4")
    assert found["NO_PROXY"] == "intern.example,127.0.0.1,localhost,::1"
    assert found["no_proxy"] == "127.0.0.1,localhost,::1"


def test_a_local_proxy_refuses_the_host_of_a_web_page(tmp_path: Path) -> None:
    upstream = Upstream(pieces=[b"{}"])
    trace = tmp_path / "trace.jsonl"
    found = {}
    with recording(upstream, trace) as client:
        for host in (
            "evil.example",
            "evil.example:80",
            "a b",
            "localhost:1",
            "[::1]:1",
            "10.0.0.1",
        ):
            response = client.post("/v1/chat/completions", json=CHAT, headers={"host": host})
            found[host] = response.status_code
    assert list(found.values()) == [403, 403, 403, 200, 200, 200]
    assert len(upstream.requests) == len(lines(trace)) == 3


def test_a_proxy_for_other_machines_takes_every_host(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with (
        running(Upstream(pieces=[b"{}"])) as url,
        running(Proxy(url, writer, is_local=False)) as own,
    ):
        response = httpx.post(f"{own}/v1/messages", json=CHAT, headers={"host": "build.example"})
    writer.close()
    assert response.status_code == 200


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x", "http://"])
def test_an_upstream_that_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    with pytest.raises(StartupError, match="is not"):
        Proxy(url, writer)
    writer.close()


def test_requests_at_the_same_time_are_all_recorded(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with recording(Upstream(pieces=[b"{}"]), trace) as client:
        threads = [
            threading.Thread(target=client.post, args=("/v1/messages",), kwargs={"json": CHAT})
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line["seq"] for line in lines(trace)) == list(range(1, 9))
