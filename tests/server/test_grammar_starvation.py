"""Hostile schemas: they delay nobody else, and are refused with the name of their field."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve

N_CLIENTS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve() as server:
        yield server


def chat(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "response_format": wanted,
    }


def send_and_leave(server: ServerProcess, body: dict[str, Any]) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + data)
        time.sleep(0.2)  # until the server has read the body


def post(server: ServerProcess, body: dict[str, Any], path: str = "chat/completions") -> Any:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)


def test_clients_that_send_slow_schemas_and_leave_delay_nobody(server: ServerProcess) -> None:
    small = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert post(server, chat(small)).status_code == 200
    began = time.monotonic()
    assert post(server, chat(slow(0))).status_code == 200
    alone = time.monotonic() - began
    began = time.monotonic()
    for number in range(1, N_CLIENTS + 1):
        send_and_leave(server, chat(slow(number)))
    sent = time.monotonic()
    assert post(server, chat({**small, "required": ["a"]})).status_code == 200
    # The one under way is not cancelled. All of them would take N_CLIENTS * alone.
    limit = max(N_CLIENTS / 2 * alone, sent - began + 2 * alone)
    assert time.monotonic() - began < limit


def slow(number: int) -> dict[str, Any]:
    """Return a schema that takes over a second to compile; each number is another one."""
    return {"type": "integer", "multipleOf": 120_000 + number}


TOO_SLOW = {"type": "integer", "multipleOf": 99_999_989}  # minutes, and 2 GB
IN_EACH_DIALECT = {
    "chat/completions": (chat(TOO_SLOW), "response_format.json_schema"),
    "responses": (
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": TOO_SLOW}},
        },
        "text.format.schema",
    ),
    "messages": (
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "Hi"}],
            "output_config": {"format": {"type": "json_schema", "schema": TOO_SLOW}},
        },
        "output_config.format",
    ),
}


@pytest.mark.parametrize("path", IN_EACH_DIALECT)
def test_a_schema_that_would_take_too_long_is_a_400_that_names_the_field(
    path: str, server: ServerProcess
) -> None:
    body, field = IN_EACH_DIALECT[path]
    answer = post(server, body, path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in error["message"]
    assert "multipleOf" in error["message"]
    assert path == "messages" or error["param"] == field


def test_a_required_call_of_a_tool_that_would_take_too_long_is_sampled_as_any_object(
    server: ServerProcess,
) -> None:
    parameters = {"type": "object", "properties": {"n": TOO_SLOW}, "required": ["n"]}
    function = {"name": "f", "parameters": parameters}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 64,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    answer = post(server, body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
