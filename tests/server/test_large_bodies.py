"""How long the event loop stands still while large bodies are read, through the real server."""

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture

# Seconds. Two cores may be shared by eight test processes; the freezes took 7 to 26 s.
STALL_LIMIT = 3.0
SHORT_STALL_LIMIT = 1.0  # parsing these texts took 1 to 7 s
N_TRIES = 3  # a machine that stood still looks like a freeze; only one by the body comes back
MIB = 2**20
USER = {"role": "user", "content": "hi"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model = tiny_models(TinyArchitecture.LLAMA)
    with serve(str(model), "--ctx-size", "2048", "--parallel", "1", "--no-cache-disk") as server:
        yield server


class Heartbeat:
    """Requests that need only the event loop, one after another."""

    def __init__(self, server: ServerProcess) -> None:
        self._address = server.url.removeprefix("http://")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        while not self._is_over.wait(0.005):
            began = time.monotonic()
            connection.request("GET", "/health?live")
            connection.getresponse().read()
            self.longest = max(self.longest, time.monotonic() - began)
        connection.close()


def post(
    server: ServerProcess, path: str, bodies: Iterable[object], *, limit: float
) -> httpx.Response:
    """Return the reply to the first body that did not freeze the event loop."""
    stalls = []
    for body in bodies:
        reply, stall = post_once(server, path, body)
        if stall < limit:
            return reply
        stalls.append(stall)
    raise AssertionError(f"the event loop stood still each time: {stalls}")


def post_once(server: ServerProcess, path: str, body: object) -> tuple[httpx.Response, float]:
    """Return the reply, and how long the event loop stood still."""
    content = json.dumps(body).encode()
    heartbeat = Heartbeat(server)
    with heartbeat.running():
        headers = {"content-type": "application/json"}
        reply = httpx.post(server.url + path, content=content, headers=headers, timeout=120)
    return reply, heartbeat.longest


ZEROS = [0] * 450_000
WRONG = ["x"] * 450_000
HOSTILE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "tools": (CHAT, {"messages": [USER], "tools": ZEROS}, "tools.0"),
    "calls": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": ZEROS}]},
        "messages.0.tool_calls.0",
    ),
    "documents": (CHAT, {"messages": [USER], "documents": ZEROS}, "documents.0"),
    "biases": (
        CHAT,
        {"messages": [USER], "logit_bias": {str(i): "x" for i in range(60_000)}},
        "logit_bias.0",
    ),
    "more biases": (
        CHAT,
        {"messages": [USER], "logit_bias": {str(i): 1 for i in range(300_000)}},
        None,
    ),
    "unknown fields": (CHAT, {"messages": [USER]} | {f"x{i}": 0 for i in range(300_000)}, None),
    "lists": (CHAT, {"messages": [USER], "x": [[] for _ in range(1_500_000)]}, None),
    "system": (MESSAGES, {"messages": [USER], "max_tokens": 1, "system": ZEROS}, "system.0"),
    "counted tools": (
        "/v1/messages/count_tokens",
        {"messages": [USER], "tools": ZEROS},
        "tools.0",
    ),
    "namespace": (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": ZEROS}]},
        "tools.0.tools.0",
    ),
    "include": (RESPONSES, {"input": "hi", "include": ZEROS}, "include.0"),
    "tokens": ("/detokenize", {"tokens": WRONG}, "tokens.0"),
    "inputs": ("/v1/embeddings", {"input": [None] * 450_000}, "input.0"),
    "lookup": ("/v1/cache/lookup", {"messages": [USER], "tools": ZEROS}, "tools.0"),
}


JSON_TEXT = "[" + "[]," * 4_000_000 + "[]]"
REASONING = base64.b64encode(f'{{"rekindle_reasoning": "", "a": {JSON_TEXT}}}'.encode()).decode()
ID = "x" * 8_000_000
TEXTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "arguments": (
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": JSON_TEXT}}],
                },
            ]
        },
        "messages.1.tool_calls.0.function.arguments",
    ),
    "unknown call": (
        RESPONSES,
        {"input": [{"type": "x_call", "call_id": "1", "arguments": JSON_TEXT}]},
        "input.0",
    ),
    "user id": (
        MESSAGES,
        {"messages": [USER], "max_tokens": 1, "metadata": {"user_id": JSON_TEXT}},
        "metadata.user_id",
    ),
    "user": (CHAT, {"messages": [USER], "user": ID}, "user"),
    "cache key": (CHAT, {"messages": [USER], "prompt_cache_key": ID}, "prompt_cache_key"),
    "call id": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": ID, "output": ""}]},
        "input.0.call_id",
    ),
    "reasoning": (
        RESPONSES,
        {
            "input": [{"type": "reasoning", "encrypted_content": REASONING}, USER],
            "max_output_tokens": 1,
        },
        None,
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_long_text_that_the_server_reads_or_cleans_lets_it_answer_others(
    case: str, server: ServerProcess
) -> None:
    path, body, param = TEXTS[case]
    reply = post(server, path, [body] * N_TRIES, limit=SHORT_STALL_LIMIT)
    assert reply.status_code == (400 if param else 200), reply.text[:1000]
    if param:
        assert reply.json()["error"]["message"].startswith(f"`{param}`: ")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_body_is_refused_while_the_server_answers_others(
    case: str, server: ServerProcess
) -> None:
    path, body, param = HOSTILE[case]
    reply = post(server, path, [body] * N_TRIES, limit=STALL_LIMIT)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert message.startswith(f"`{param}` should be " if param else "The body has more than ")


def honest(n_bytes: int, number: int = 0) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a large body for each endpoint: long conversations, files, texts and token ids.

    Another number gives other texts: the server remembers what it has tokenized.
    """
    text = (f'The "quick" brown fox {number}, {{a: [1, 2]}}.\n' * 30)[:1000]
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(n_bytes // 1100)]
    parts = [
        {"role": each["role"], "content": [{"type": "text", "text": each["content"]}]}
        for each in said
    ]
    file = base64.b64encode(text.encode() * (n_bytes * 3 // 4 // len(text))).decode()
    data = f"data:text/plain;base64,{file}"
    words = f"The quick brown fox {number} jumps. " * (n_bytes // 29)
    tokens = [(i + number) % 200 for i in range(n_bytes // 10)]
    attached = [{"type": "file", "file": {"filename": "a.txt", "file_data": data}}]
    input_file = [{"type": "input_file", "file_data": data}]
    source = {"type": "base64", "media_type": "text/plain", "data": file}
    return {
        "chat": (CHAT, {"messages": said, "max_tokens": 1}),
        "chat file": (CHAT, {"messages": [{"role": "user", "content": attached}]}),
        "completions": ("/v1/completions", {"prompt": words}),
        "completions tokens": ("/v1/completions", {"prompt": tokens}),
        "messages": (MESSAGES, {"messages": parts, "max_tokens": 1}),
        "messages file": (
            MESSAGES,
            {
                "messages": [{"role": "user", "content": [{"type": "document", "source": source}]}],
                "max_tokens": 1,
            },
        ),
        "count": ("/v1/messages/count_tokens", {"messages": parts}),
        "responses": (RESPONSES, {"input": said}),
        "responses file": (RESPONSES, {"input": [{"role": "user", "content": input_file}]}),
        "tokenize": ("/tokenize", {"content": words}),
        "detokenize": ("/detokenize", {"tokens": tokens}),
        "embeddings": ("/v1/embeddings", {"input": [words[:100_000]] * (n_bytes // 100_000)}),
        "template": ("/apply-template", {"messages": said}),
        "lookup": ("/v1/cache/lookup", {"messages": said}),
        "tools": (CHAT, {"messages": [USER], "tools": tools_of(n_bytes, number), "max_tokens": 1}),
    }


def tools_of(n_bytes: int, number: int) -> list[dict[str, Any]]:
    description = f"Reads thing {number} and says what it is. "
    properties = {f"p{i}": {"type": "string", "description": description} for i in range(20)}
    parameters = {"type": "object", "properties": properties}
    function = {"description": description * 10, "parameters": parameters}
    n_tools = n_bytes // len(json.dumps(function))
    return [
        {"type": "function", "function": {"name": f"t{i}", **function}}
        for i in range(min(n_tools, 300))
    ]


@pytest.mark.parametrize("case", honest(2000))
def test_an_honest_body_of_megabytes_lets_the_server_answer_others(
    case: str, server: ServerProcess
) -> None:
    path, _ = honest(2000)[case]
    bodies = (honest(2 * MIB, number)[case][1] for number in range(N_TRIES))
    reply = post(server, path, bodies, limit=STALL_LIMIT)
    assert reply.status_code in (200, 400), reply.text[:1000]
    if reply.status_code == 400:
        assert "tokens" in reply.json()["error"]["message"]  # too long for this context
