"""A draining server finishes running requests, refuses new ones, and loses nothing."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture

PROMPT = [3 + index % 50 for index in range(600)]
N_TOKENS = 3000  # takes long enough for the requests beside it


def frames(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_drain_finishes_running_requests_refuses_new_ones_and_stores_their_rows(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    arguments = (model, "--ctx-size", "8192", "--cache-dir", str(tmp_path), "--no-cache-recompute")
    streamed = {
        "prompt": PROMPT,
        "max_tokens": N_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with (
        serve(*arguments, "--shutdown-grace", "300") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=streamed) as response,
    ):
        stream = frames(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        while "stopping" not in server.log:
            next(stream)
        assert_drains(server)
        *_, usage = stream
        assert usage["usage"]["completion_tokens"] == N_TOKENS  # type: ignore[index]
        assert server.process.wait(timeout=60) == 0
        assert "Traceback" not in server.log
    with serve(*arguments) as server:
        server.wait_for_log(" cache: ")  # what is on disk is known
        again = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=again, timeout=60).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)


def assert_drains(server: ServerProcess) -> None:
    """On new connections: the port is open."""
    message = {"role": "user", "content": "hi"}
    body = {"messages": [message], "max_tokens": 4}
    refusal = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert refusal.status_code == 503
    assert int(refusal.headers["retry-after"]) >= 1
    assert refusal.json()["error"]["code"] == "shutting_down"
    refusal = httpx.post(f"{server.url}/v1/messages", json=body)
    assert refusal.status_code == 503
    assert int(refusal.headers["retry-after"]) >= 1
    assert refusal.json()["error"]["type"] == "api_error"
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert health.json() == {"status": "draining"}
    assert httpx.get(f"{server.url}/health?live").status_code == 200
    assert "rekindle_slots_busy 1" in httpx.get(f"{server.url}/metrics").text
