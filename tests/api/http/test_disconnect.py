"""A client that leaves takes its replies with it. Over real sockets."""

import socket
import time

import httpx
import pytest

from rekindle.chat.reply.events import ReplyText
from tests.api.client import USER, serving
from tests.api.fakes import FakeResponder, Wait, done

PATIENCE_SECONDS = 60  # a bound for a broken server, not an expectation


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_closes_its_replies(n: int) -> None:
    responder = FakeResponder((ReplyText("a"), Wait(), done()))
    body = {"messages": [USER], "stream": True, "n": n}
    with serving(responder) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert next(reply.iter_bytes()).startswith(b"data: ")
        assert len(responder.started) == n
        for started in responder.started:
            assert started.stream.closed.wait(PATIENCE_SECONDS)
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_leaving_while_the_prompt_is_evaluated_closes_the_stream() -> None:
    responder = FakeResponder((Wait(), done()))
    with serving(responder) as url:
        leave_after_asking(url, responder, b'{"prompt":"a","stream":true}')
        assert responder.started[0].stream.closed.wait(PATIENCE_SECONDS)


def test_leaving_before_a_whole_reply_closes_it() -> None:
    responder = FakeResponder((ReplyText("a"), Wait(), done()))
    with serving(responder) as url:
        leave_after_asking(url, responder, b'{"prompt":"a"}')
        assert responder.started[0].stream.closed.wait(PATIENCE_SECONDS)
        counted = 'rekindle_http_requests_total{route="/v1/completions",status="499"} 1.0'
        deadline = time.monotonic() + PATIENCE_SECONDS
        while counted not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline


def leave_after_asking(url: str, responder: FakeResponder, body: bytes) -> None:
    address = httpx.URL(url)
    assert address.port is not None
    with socket.create_connection((address.host, address.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        assert responder.asked.wait(PATIENCE_SECONDS)
