"""`rekindle serve --engine vllm` as a process."""

import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.fake_vllm import fake_vllm
from tests.support.server_process import free_port, serve


def test_the_command_serves_drains_and_exits_with_0(hf_folder: Path) -> None:
    with fake_vllm() as one, fake_vllm() as two:
        upstreams = ("--upstream", one.url, "--upstream", two.url)
        with serve(str(hf_folder), "--engine", "vllm", *upstreams) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
            replies = [
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
                for _ in range(2)
            ]
            texts = {reply["choices"][0]["message"]["content"] for reply in replies}
            assert len(texts) == 1
            assert httpx.get(f"{server.url}/props").json()["total_slots"] == 8
            assert server.stop() == 0
            assert "generates over /inference/v1/generate" in server.log


def test_a_failed_start_prints_one_sentence(hf_folder: Path) -> None:
    """Exit code 1 means that a retry may help: a supervisor restarts the server."""
    nobody = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "rekindle", "serve", "--port", str(free_port())]
    for code, more, words in (
        (1, [str(hf_folder), "--engine", "vllm", "--upstream", nobody], "No upstream can be used"),
        (2, ["--upstream", nobody], "--upstream requires --engine vllm"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert words in done.stderr
        assert "Traceback" not in done.stderr
