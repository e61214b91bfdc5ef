"""Command lines of llama-server and settings of one model, through a real server."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.workloads import Client

SAID = {"messages": [{"role": "user", "content": "Say something."}], "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "alpha.gguf", TinyArchitecture.LLAMA, seed=1)
    write_tiny_model(folder / "beta.gguf", TinyArchitecture.LLAMA, seed=2)
    return folder


def chat(server: ServerProcess, **fields: object) -> dict[str, Any]:
    url, body = f"{server.url}/v1/chat/completions", {**SAID, **fields}
    reply: dict[str, Any] = httpx.post(url, json=body, timeout=60).json()
    return reply


def text_of(reply: dict[str, Any]) -> object:
    return reply["choices"][0]["message"]["content"]


def params_of(props: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = props["default_generation_settings"]["params"]
    return params


def test_a_command_line_of_llama_server_is_served_with_its_values(folder: Path) -> None:
    line = (
        f"-m {folder / 'alpha.gguf'} -c 2048 -np 2 -ngl 99 -fa on -ctk q8_0 -ctv q8_0 --jinja"
        " -a name --host 127.0.0.1 -n 64 --cache-ram 512 --temp 0.2 -tb 1 -b 512 -ub 256 -cb"
        " --no-webui --metrics"
    )
    with (
        serve(*line.split(), environment={"LLAMA_ARG_TOP_K": "7"}) as server,
        closing(Client(server.url)) as client,
    ):
        props = client.get("/props")
        assert props["model_alias"] == "name"
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 2048
        params = params_of(props)
        assert (params["temperature"], params["top_k"]) == (0.2, 7)
        assert (params["n_predict"], params["max_tokens"]) == (64, 64)
        budget = 'rekindle_cache_budget_bytes{tier="memory"} 5.36870912e+08'
        assert budget in httpx.get(f"{server.url}/metrics").text

        reply = chat(server)
        assert reply["usage"]["completion_tokens"] == 64
        assert reply["choices"][0]["finish_reason"] == "length"
        assert chat(server, max_tokens=3)["usage"]["completion_tokens"] == 3

        told = "rekindle: no effect here: --jinja (templates are always Jinja), -cb ("
        assert told in server.log


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("config") / "rekindle.toml"
    file.write_text(
        f"""
        [model]
        models_dir = "{folder}"
        [sampling]
        n_predict = 20
        top_k = 11
        [models."alpha"]
        ctx_size = 1024
        parallel = 1
        temperature = 0.0
        n_predict = 8
        [models."beta"]
        ctx_size = 512
        temperature = 1.5
        chat_template = "{{{{ greeting }}}} {{{{ messages[0].content }}}}"
        chat_template_kwargs = '{{"greeting": "Hail!"}}'
        [models."gamma"]
        pin = true
        """
    )
    flags = ("--config", str(file), "-c", "2048", "-np", "2", "-t", "1")
    with serve(*flags) as server:
        yield server


def test_each_model_has_the_context_and_the_sampling_of_its_section(two: ServerProcess) -> None:
    with closing(Client(two.url)) as client:
        alpha, beta = (client.get(f"/props?model={name}") for name in ("alpha", "beta"))
    settings = [each["default_generation_settings"] for each in (alpha, beta)]
    assert [each["n_ctx"] for each in settings] == [1024, 512]
    assert [each["total_slots"] for each in (alpha, beta)] == [1, 2]
    params = [params_of(each) for each in (alpha, beta)]
    assert [each["temperature"] for each in params] == [0.0, 1.5]
    assert [each["n_predict"] for each in params] == [8, 20]
    assert [each["top_k"] for each in params] == [11, 11]


def test_replies_follow_the_section_of_their_model_and_requests_override_it(
    two: ServerProcess,
) -> None:
    greedy = [chat(two, model="alpha") for _ in range(2)]
    assert {text_of(each) for each in greedy} == {text_of(chat(two, model="alpha"))}
    assert {each["usage"]["completion_tokens"] for each in greedy} == {8}
    sampled = [chat(two, model="beta") for _ in range(3)]
    assert {each["usage"]["completion_tokens"] for each in sampled} == {20}
    assert len({text_of(each) for each in sampled}) > 1
    settled = [chat(two, model="beta", temperature=0, max_tokens=4) for _ in range(3)]
    assert len({text_of(each) for each in settled}) == 1
    assert {each["usage"]["completion_tokens"] for each in settled} == {4}


def test_the_template_and_its_arguments_belong_to_the_model(two: ServerProcess) -> None:
    with closing(Client(two.url)) as client:
        body = {"messages": SAID["messages"], "model": "beta"}
        prompt = client.post("/apply-template", body)["prompt"]
        assert prompt == "Hail! Say something."
        own = {"chat_template_kwargs": {"greeting": "Hi,"}}
        assert client.post("/apply-template", body | own)["prompt"] == "Hi, Say something."
        other = client.post("/apply-template", body | {"model": "alpha"})["prompt"]
        assert "Hail!" not in other


def test_a_section_for_a_model_that_is_not_in_the_folder_is_a_warning(two: ServerProcess) -> None:
    assert 'has [models."gamma"], but no model has this name; there are alpha, beta.' in two.log
