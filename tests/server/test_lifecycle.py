"""The process as a whole: how it starts, what a lost client leaves behind, how it ends."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, free_port, launch, serve
from tests.support.tiny_models import TinyArchitecture

ENDLESS = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100_000, "temperature": 0}


@pytest.fixture
def tiny(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serve(
        model, "--ctx-size", "32768", "--parallel", "2", "--shutdown-grace", "0.5"
    ) as server:
        yield server


def frames(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_disconnected_client_frees_its_slot(tiny: ServerProcess, *, is_streaming: bool) -> None:
    # The catalogue of stored prefixes is opened by the first that is written.
    first = {"prompt": [5] * 8_000, "max_tokens": 1}
    httpx.post(f"{tiny.url}/v1/completions", json=first, timeout=60).raise_for_status()
    tiny.wait_for_metric("rekindle_cache_writes_total")
    before = tiny.n_file_descriptors
    for _ in range(3):
        with httpx.Client(base_url=tiny.url, timeout=60) as client:
            body = {**ENDLESS, "stream": is_streaming}
            if is_streaming:
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(frames(response))
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=3)
        tiny.wait_until_idle()
    assert "finish=cancelled" in tiny.log
    tiny.wait_for_descriptors(before)


def test_a_client_that_disconnects_during_prefill_frees_its_slot(tiny: ServerProcess) -> None:
    # The reply is long: it may have begun when the server hears of the disconnect.
    body = {"prompt": [5] * 8_000, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    body |= {"return_progress": True}
    with (
        httpx.Client(base_url=tiny.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        progress = next(frame for frame in frames(response) if "prompt_progress" in frame)
        assert progress["prompt_progress"]
    tiny.wait_until_idle()
    assert "finish=cancelled" in tiny.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cuts_an_endless_stream_with_an_error_and_exit_code_0(
    tiny: ServerProcess, number: signal.Signals
) -> None:
    with (
        httpx.Client(base_url=tiny.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response,
    ):
        stream = frames(response)
        next(stream)
        tiny.process.send_signal(number)
        *_, last = stream
    assert "shutting down" in json.dumps(last["error"])
    assert tiny.process.wait(timeout=60) == 0
    assert "Traceback" not in tiny.log


def test_a_second_signal_cuts_at_once(tiny_models: TinyModels) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with (
        serve(model, "--ctx-size", "32768", "--shutdown-grace", "3600", start=launch) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response,
    ):
        stream = frames(response)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        while "stopping" not in server.log:
            next(stream)
        server.process.send_signal(signal.SIGINT)
        *_, last = stream
        assert "shutting down" in json.dumps(last["error"])
        assert server.process.wait(timeout=60) == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("delay_seconds", [0.3, 0.7, 1.0, 1.3])
def test_ctrl_c_while_starting_ends_the_process(embedded_model: Path, delay_seconds: float) -> None:
    command = [sys.executable, "-m", "rekindle", "serve", str(embedded_model)]
    process = subprocess.Popen(
        [*command, "--port", str(free_port())],
        stderr=subprocess.PIPE,
        # A test run in the background of a shell ignores SIGINT, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_seconds)
        process.send_signal(signal.SIGINT)
        # Wherever it was: importing, loading, or serving already.
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert b"ignored" not in log


def test_a_signal_lets_a_short_reply_finish(tiny_models: TinyModels) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    body = {**ENDLESS, "stream": True, "max_tokens": 400}
    with (
        serve(model, "--shutdown-grace", "60") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        stream = frames(response)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        reasons = [frame["choices"][0]["finish_reason"] for frame in stream if frame["choices"]]  # type: ignore[index]
        assert reasons[-1] == "length"
        assert server.process.wait(timeout=60) == 0


def test_a_second_request_is_refused_while_the_queue_is_full(tiny_models: TinyModels) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with (
        serve(model, "--parallel", "1", "--queue-size", "0") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response,
    ):
        stream = frames(response)  # closing it would close the connection
        next(stream)
        refusal = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert refusal.status_code == 429
        assert int(refusal.headers["retry-after"]) >= 1
        assert refusal.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("kind", ["missing", "truncated", "not gguf", "unsupported"])
def test_a_bad_model_file_gives_one_sentence_and_exit_code_2(
    tiny_models: TinyModels, tmp_path: Path, kind: str
) -> None:
    data = tiny_models(TinyArchitecture.LLAMA).read_bytes()
    path = tmp_path / "model.gguf"
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "not gguf":
        path.write_bytes(b"PK\x03\x04" + data)
    elif kind == "unsupported":
        at = data.index(b"llama", data.index(b"general.architecture"))
        path.write_bytes(data[:at] + b"lxxma" + data[at + 5 :])
    result = subprocess.run(
        [sys.executable, "-m", "rekindle", "serve", str(path), "--port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("rekindle: ")
    assert str(path) in line


def test_the_port_answers_while_a_long_prefill_runs(tiny: ServerProcess) -> None:
    body = {"prompt": [5] * 8_000, "max_tokens": 1}
    thread = threading.Thread(
        target=lambda: httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=900)
    )
    thread.start()
    answers = 0
    while thread.is_alive():
        assert httpx.get(f"{tiny.url}/health", timeout=30).status_code == 200
        answers += 1
    thread.join()
    assert answers >= 1
