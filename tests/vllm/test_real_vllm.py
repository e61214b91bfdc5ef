"""The engine against a real vLLM on the CPU: `make test-vllm` installs it and runs this."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.bench.peers.contenders import PEERS, Vllm, find_contenders
from rekindle.bench.play import Conditions, Play
from rekindle.bench.report.results import Progress
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import WORKLOADS
from tests.support.server_process import free_port, serve
from tests.vllm.convert import read_metadata, write_tokenizer, write_weights

PYTHON = os.environ.get("REKINDLE_VLLM_PYTHON")
START_SECONDS = 600

pytestmark = pytest.mark.timeout(900)

if PYTHON is None:
    pytest.skip(
        "vLLM is not installed: `make test-vllm` installs it and runs these",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "SmolLM2"
    write_tokenizer(read_metadata(embedded_model), folder)
    write_weights(embedded_model, folder)
    return folder


@pytest.fixture(scope="module", params=["--enable-scale-out", ""], ids=["generate", "completions"])
def upstream(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    assert PYTHON is not None
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(model_folder), "--served-model-name", "SmolLM2"]
    command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "4096"]
    command += ["--enable-prompt-tokens-details", "--enforce-eager", "--max-num-seqs", "4"]
    command += [request.param] if request.param else []
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as output:
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text("utf-8", "replace")[-4000:]
            assert time.monotonic() < deadline, log.read_text("utf-8", "replace")[-4000:]
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def url(upstream: str, model_folder: Path) -> Iterator[str]:
    with serve(str(model_folder), "--engine", "vllm", "--upstream", upstream) as server:
        yield server.url


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json=body, timeout=300)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_every_turn_finds_the_last_one_in_vllms_own_cache(url: str) -> None:
    messages = [{"role": "system", "content": "You are terse and polite. " * 12}]
    n_before = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Tell me fact number {turn} about tea."})
        body = {"messages": messages, "temperature": 0, "max_tokens": 40}
        answer = ask(url, "/v1/chat/completions", body)
        usage = answer["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"turn {turn}: {usage['prompt_tokens']} tokens, {n_cached} cached")  # noqa: T201
        if turn:
            assert answer["rekindle"]["remembered_turns"] == turn
            assert n_cached >= n_before - 32  # but for the block that is not full
            assert answer["rekindle"]["cached"] == [{"tier": "upstream", "tokens": n_cached}]
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        n_before = usage["prompt_tokens"] + usage["completion_tokens"]


def test_greedy_ids_are_those_of_vllm_itself(url: str, upstream: str) -> None:
    tokens = ask(url, "/tokenize", {"content": "The capital of France is"})["tokens"]
    body = {"prompt": tokens, "max_tokens": 12, "temperature": 0}
    ours = ask(url, "/v1/completions", body)["choices"][0]["text"]
    theirs = ask(upstream, "/v1/completions", {"model": "SmolLM2", **body})["choices"][0]["text"]
    assert ours == theirs


def test_other_dialects_streams_and_log_probabilities(url: str) -> None:
    messages = [{"role": "user", "content": "Name three colours. " * 10}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    ask(url, "/v1/chat/completions", body)
    message = ask(url, "/v1/messages", body)
    assert message["usage"]["cache_read_input_tokens"] > 0
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=300
    ) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    scored = ask(url, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 3})
    content = scored["choices"][0]["logprobs"]["content"]
    assert len(content) == scored["usage"]["completion_tokens"]
    for each in content:
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]  # greedy
        assert len(each["top_logprobs"]) == 3


def test_formats_and_required_calls_hold(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Pick a colour."}],
        "max_tokens": 60,
        "temperature": 0,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pick", "schema": schema}}
    answer = ask(url, "/v1/chat/completions", {**body, "response_format": form})
    assert json.loads(answer["choices"][0]["message"]["content"])["colour"] in ("red", "green")
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    answer = ask(url, "/v1/chat/completions", {**body, "tools": [tool], "tool_choice": "required"})
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "green")


def test_penalties_bias_seed_and_endless_replies_are_taken(url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 7,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": {"30": -100},
        "ignore_eos": True,
    }
    answers = [ask(url, "/v1/chat/completions", body) for _ in range(2)]
    assert [each["usage"]["completion_tokens"] for each in answers] == [12, 12]
    texts = {each["choices"][0]["message"]["content"] for each in answers}
    assert len(texts) == 1


def test_the_bench_measures_what_vllm_prefills(
    model_folder: Path, embedded_model: Path, tmp_path: Path
) -> None:
    assert PYTHON is not None
    vllm = Vllm(Path(PYTHON), model_folder)
    found = find_contenders(llama_server=None, remotes=[], without=PEERS, vllm=vllm)
    conditions = Conditions(
        model=embedded_model,
        shows_tools=False,
        threads=2,
        texts=Texts("5eed", 0.1),
        is_quick=True,
        scratch=tmp_path,
    )
    progress = Progress(on_step=lambda _: None, on_done=lambda: None, on_trouble=lambda _: None)
    asyncio.run(Play(found[-1], WORKLOADS[0], 1, conditions, progress).run())
    [row] = progress.workloads
    assert row.errors == 0
    assert row.requests > 0
    assert row.prefilled_tokens is not None
    assert row.prompt_tokens is not None
    assert row.prefilled_tokens < row.prompt_tokens
