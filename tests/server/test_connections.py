"""Bounds that hold before a key is checked: heads, bodies and connections, over real sockets."""

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.needs import program
from tests.support.raw_http import (
    connected,
    drip,
    exchange,
    has_reply,
    is_closed,
    read_reply,
    read_until,
    request_of,
)
from tests.support.server_process import ServerProcess, launch, serve
from tests.support.tiny_models import TinyArchitecture

KEY = "authorization: Bearer k"
HEALTH = request_of("GET", "/health")
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
TOKENIZE = json.dumps({"content": "hello"}).encode()
MIB = 2**20


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serve(model, "--api-key", "k", "--receive-timeout", "4") as server:
        yield server


@pytest.fixture(scope="module")
def small(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serve(
        model, "--max-connections", "1", "--receive-timeout", "60", "--ctx-size", "32768"
    ) as server:
        yield server


def is_healthy(server: ServerProcess) -> bool:
    return httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "start",
    [
        b"GET /v1/models HTTP/1.1\r\nx-large: ",
        b"GET /v1/models?x=",
        b"GET /v1/models HTTP/1.1\r\nx-",
        b"GET /v1/models HTTP/1.1\r\nx-folded: a\r\n ",
    ],
    ids=["value", "url", "name", "folded"],
)
def test_a_head_of_150_mib_is_refused_after_64_kib(server: ServerProcess, start: bytes) -> None:
    with connected(server.url) as raw:
        raw.sendall(start)
        n_sent = 0
        while n_sent < 150 and not has_reply(raw):
            raw.sendall(b"a" * MIB)
            n_sent += 1
        assert n_sent < 150
        reply = read_reply(raw)
    # Folded lines are an error of their own.
    assert (reply.status, reply.error["code"]) in [
        (431, "headers_too_large"),
        (400, "invalid_http"),
    ]
    assert reply.headers["connection"] == "close"
    assert is_healthy(server)


def test_a_head_with_more_than_100_headers_is_refused(server: ServerProcess) -> None:
    headers = [f"x-{n}: 1" for n in range(100)]
    assert exchange(server.url, request_of("GET", "/health", *headers)).status == 200
    reply = exchange(server.url, request_of("GET", "/health", "x: 1", *headers))
    assert (reply.status, reply.error["code"]) == (431, "headers_too_large")


def test_a_refusal_before_the_route_has_the_shape_of_its_api(server: ServerProcess) -> None:
    headers = [f"x-{n}: 1" for n in range(101)]
    reply = exchange(server.url, request_of("POST", "/v1/messages?beta=true", *headers))
    body = json.loads(reply.body)
    assert reply.status == 431
    assert body["type"] == "error"
    assert body["request_id"] == reply.headers["x-request-id"]


def test_requests_that_never_end_their_head_are_gone_after_the_deadline(
    server: ServerProcess,
) -> None:
    assert is_healthy(server)
    before, n_before = server.n_file_descriptors, n_timed_out(server)
    with contextlib.ExitStack() as stack:
        raws = []
        for _ in range(300):
            raws.append(stack.enter_context(connected(server.url)))
            raws[-1].sendall(HALF_A_HEAD)
        for raw in raws:
            reply = read_reply(raw)
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            assert is_closed(raw)
        server.wait_for_descriptors(before + 5)
    assert n_timed_out(server) - n_before == 300


def n_timed_out(server: ServerProcess) -> int:
    metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "k"}).text
    name = 'rekindle_http_requests_total{route="unmatched",status="408"} '
    return sum(int(float(line[len(name) :])) for line in metrics.splitlines() if name in line)


@pytest.mark.parametrize("sent", [HALF_A_HEAD + b"x: ", b"", b"\r\n"])
def test_a_head_in_drops_is_refused(server: ServerProcess, sent: bytes) -> None:
    """One byte at a time does not extend the deadline; nor do empty lines before a request."""
    with connected(server.url) as raw:
        raw.sendall(sent)
        drip(raw, b"\n" if not sent.strip() else b"a")
        assert read_reply(raw).status == 408


def test_a_connection_that_sends_nothing_is_closed_without_a_word(server: ServerProcess) -> None:
    with connected(server.url) as raw:
        assert is_closed(raw)


def test_the_second_request_of_a_connection_has_a_deadline_too(server: ServerProcess) -> None:
    with connected(server.url) as raw:
        raw.sendall(HEALTH)
        assert read_reply(raw).status == 200
        raw.sendall(HALF_A_HEAD)
        assert read_reply(raw).status == 408


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages"])
@pytest.mark.parametrize("is_dripping", [True, False])
def test_a_body_that_does_not_arrive_is_refused(
    server: ServerProcess, path: str, *, is_dripping: bool
) -> None:
    head = request_of("POST", path, KEY, "content-type: application/json", "content-length: 99999")
    with connected(server.url) as raw:
        raw.sendall(head + b"{")
        if is_dripping:
            drip(raw)
        reply = read_reply(raw)
        assert reply.status == 408
        assert "did not arrive in time" in reply.error["message"]
        assert is_closed(raw)


def test_a_body_that_arrives_slowly_but_steadily_is_read(server: ServerProcess) -> None:
    """It takes longer than the deadline for a pause."""
    body = TOKENIZE + b" " * 40_000
    with connected(server.url) as raw:
        raw.sendall(request_of("POST", "/tokenize", KEY, f"content-length: {len(body)}"))
        for start in range(0, len(body), 1000):
            raw.sendall(body[start : start + 1000])
            time.sleep(0.12)
        assert read_reply(raw).status == 200


def test_a_body_is_not_wanted_before_the_key_is_checked(server: ServerProcess) -> None:
    headers = ("expect: 100-continue", "content-type: application/json", "content-length: 1000000")
    with connected(server.url) as raw:
        raw.sendall(request_of("POST", "/tokenize", *headers))
        assert read_reply(raw).status == 401  # and no 100 before it
        # What is sent after it all the same is dropped, for a while.
        drip(raw)
        assert is_closed(raw)


def test_a_connection_serves_on_after_a_body_that_nobody_wanted(server: ServerProcess) -> None:
    body = b" " * 300_000
    with connected(server.url) as raw:
        raw.sendall(request_of("POST", "/tokenize", "content-type: application/json", body=body))
        assert read_reply(raw).status == 401
        raw.sendall(HEALTH)
        assert read_reply(raw).status == 200


@pytest.mark.parametrize(
    "rest",
    [
        b"5;" + b"a" * 200_000,
        b"5\r\n     \r\n0\r\nx-trailer: " + b"a" * 200_000,
        b"fffffffffffffffffffffff\r\n",
        b"not a number\r\n",
    ],
    ids=["extension", "trailer", "size", "garbage"],
)
def test_a_malformed_body_is_refused(server: ServerProcess, rest: bytes) -> None:
    head = request_of("POST", "/tokenize", KEY, "transfer-encoding: chunked")
    with connected(server.url) as raw:
        raw.sendall(head)
        raw.sendall(rest)
        reply = read_reply(raw)
    assert reply.status in (400, 431)
    assert reply.error["code"] in ("invalid_http", "headers_too_large")


def test_trailers_are_not_headers(server: ServerProcess) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
    chunked = b"%x\r\n%s\r\n0\r\nx-rekindle-session: from-a-trailer\r\n\r\n" % (len(chat), chat)
    head = request_of("POST", "/v1/chat/completions", KEY, "transfer-encoding: chunked")
    reply = exchange(server.url, head + chunked)
    assert reply.status == 200
    assert json.loads(reply.body)["rekindle"]["session"] == "default"


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    tokenize = request_of("POST", "/tokenize", KEY, body=TOKENIZE)
    with connected(server.url) as raw:
        raw.sendall(tokenize + HEALTH)
        data = read_until(raw, b'"status"')
    assert b'"tokens"' in data


def test_a_flood_of_pipelined_requests_ends_its_connection(server: ServerProcess) -> None:
    with connected(server.url) as raw:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(HEALTH * 5000)
        n_bytes = 0
        with contextlib.suppress(ConnectionResetError):
            while more := raw.recv(65536):
                n_bytes += len(more)
    assert n_bytes < 5000 * 100
    assert is_healthy(server)


def test_a_malformed_request_does_not_end_those_before_it(server: ServerProcess) -> None:
    tokenize = request_of("POST", "/tokenize", KEY, body=TOKENIZE)
    with connected(server.url) as raw:
        raw.sendall(tokenize + HEALTH + b"GET http://[ HTTP/1.1\r\n\r\n")
        data = read_until(raw, b'"status"')
        assert b'"tokens"' in data
        assert b"connection: close" in data
        while raw.recv(65536):
            pass


def test_a_malformed_body_that_waits_for_a_word_is_no_error(server: ServerProcess) -> None:
    headers = (KEY, "expect: 100-continue", "transfer-encoding: chunked")
    with connected(server.url) as raw:
        raw.sendall(request_of("POST", "/tokenize", *headers) + b"not a number\r\n")
        assert read_reply(raw).status == 400
    assert is_healthy(server)
    assert "Traceback" not in server.log


def test_a_connection_lost_with_requests_in_line_is_no_error(server: ServerProcess) -> None:
    """The first of them runs; its reply has nowhere to go."""
    text = request_of(
        "POST", "/tokenize", KEY, body=json.dumps({"content": "a b " * 5000}).encode()
    )
    for last in (HEALTH, b"not HTTP\r\n\r\n"):
        for _ in range(5):
            with connected(server.url) as raw:
                raw.sendall(text + HEALTH + last)
    assert is_healthy(server)
    assert "Traceback" not in server.log


def test_an_upgrade_is_answered_as_a_plain_request(server: ServerProcess) -> None:
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
    with connected(server.url) as raw:
        raw.sendall(request_of("GET", "/health", *upgrade) + request_of("GET", "/nothing", KEY))
        data = read_until(raw, b"HTTP/1.1 404")
    assert data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_split", [True, False])
def test_the_body_beside_an_upgrade_is_a_body(server: ServerProcess, *, is_split: bool) -> None:
    """Java's client offers h2c with its first request. The body must not be a second request."""
    h2c = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    body = TOKENIZE + b"\n" * 20_000
    sent = request_of("POST", "/tokenize", KEY, *h2c, body=body)
    with connected(server.url) as raw:
        for piece in (sent[:-19_990], sent[-19_990:]) if is_split else (sent,):
            raw.sendall(piece)
            time.sleep(0.1)  # else both pieces may arrive as one
        assert "tokens" in json.loads(read_reply(raw).body)
        raw.sendall(HEALTH)
        assert read_reply(raw).status == 200
    chunked = request_of("POST", "/tokenize", KEY, *h2c, "transfer-encoding: chunked")
    assert exchange(server.url, chunked).status == 400


def test_beyond_the_bound_only_health_is_answered(small: ServerProcess) -> None:
    endless = {"prompt": "hello", "ignore_eos": True, "max_tokens": 30_000, "stream": True}
    with (
        httpx.Client(base_url=small.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=endless) as running,
    ):
        frames = running.iter_lines()
        next(frames)
        refused = exchange(small.url, request_of())
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
        assert exchange(small.url, HEALTH).status == 200
        assert exchange(small.url, request_of("GET", f"{small.url}/health")).status == 200
        next(frames)
    small.wait_until_idle()


def test_a_request_behind_a_health_check_counts(small: ServerProcess) -> None:
    endless = {"prompt": "hello", "ignore_eos": True, "max_tokens": 30_000, "stream": True}
    tokenize = request_of("POST", "/tokenize", body=TOKENIZE)
    with (
        httpx.Client(base_url=small.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=endless) as running,
    ):
        frames = running.iter_lines()
        next(frames)
        with connected(small.url) as raw:
            raw.sendall(HEALTH + tokenize)
            assert read_reply(raw).status == 200
            assert is_closed(raw)
        next(frames)
    small.wait_until_idle()
    with connected(small.url) as raw:
        raw.sendall(HEALTH + tokenize)
        read_until(raw, b'"tokens"')


@pytest.mark.parametrize("target", ["http://localhost", "http://localhost?a=1"])
def test_an_absolute_target_without_a_path_means_the_root(
    server: ServerProcess, target: str
) -> None:
    reply = exchange(server.url, request_of("GET", target, "host: evil.example"))
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_half_sent_requests_make_room_for_new_ones(small: ServerProcess) -> None:
    """With a bound of 1 there are 64 places for connections without a request."""
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connected(small.url)) for _ in range(200)]
        for raw in raws:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.sendall(HALF_A_HEAD)
        # The first was closed for the 66th: silently, if the half had not been read yet.
        with contextlib.suppress(ConnectionResetError):
            assert raws[0].recv(65536)[:12] in (b"", b"HTTP/1.1 503")
        assert exchange(small.url, HEALTH).status == 200
        assert exchange(small.url, request_of()).status == 200
        raws[-1].sendall(b"\r\n")
        assert read_reply(raws[-1]).status == 400  # the newest is still served: an empty body


def test_the_bound_fits_the_files_that_a_process_may_open(tiny_models: TinyModels) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    limited = partial(launch, prefix=[program("prlimit"), "--nofile=400:512"])
    with serve(model, "--log-level", "warning", start=limited) as server:
        assert "max_connections=1024 lowered to 192" in server.log
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert "Max open files            512" in limits


def test_half_of_the_next_head_does_not_end_a_running_reply(server: ServerProcess) -> None:
    body = {"prompt": "hello", "ignore_eos": True, "max_tokens": 2000, "stream": True}
    sent = request_of("POST", "/v1/completions", KEY, body=json.dumps(body).encode())
    with connected(server.url) as raw:
        raw.sendall(sent + HALF_A_HEAD)
        read_until(raw, b"data: [DONE]")
