"""Several models in one server, through HTTP.

Each is loaded on use, and its stored rows are found again when it is loaded again.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.engine_processes import wait_for
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.workloads import Client, prose

ENGINE = ("--ctx-size", "2048", "--parallel", "2", "--threads", "1", "--no-cache-recompute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape: nothing but their weights tells them apart."""
    folder = tmp_path_factory.mktemp("several")
    write_tiny_model(folder / "alpha.gguf", TinyArchitecture.LLAMA, seed=1)
    write_tiny_model(folder / "beta.gguf", TinyArchitecture.LLAMA, seed=2)
    return folder


@contextmanager
def several(folder: Path, *more: str) -> Iterator[tuple[ServerProcess, Client]]:
    with (
        serve("--models-dir", str(folder), *ENGINE, *more) as server,
        closing(Client(server.url)) as client,
    ):
        yield server, client


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[tuple[ServerProcess, Client]]:
    with several(folder) as server_and_client:
        yield server_and_client


@pytest.fixture
def unloaded(running: tuple[ServerProcess, Client]) -> tuple[ServerProcess, Client]:
    """A server that has loaded nothing, or nothing any more."""
    _, client = running
    for name in states(client):
        client.post(f"/v1/models/{name}/unload", {})
    return running


def states(client: Client) -> dict[str, str]:
    return {model["id"]: model["status"] for model in client.get("/v1/models")["data"]}


def prompt_of(client: Client, seed: str, model: str) -> list[int]:
    body = {"content": prose(seed, 300), "model": model}
    tokens: list[int] = client.post("/tokenize", body)["tokens"]
    return tokens


@pytest.mark.parametrize(
    ("settings", "sources"), [((), {"disk"}), (("--no-cache-disk",), set())], ids=["disk", "memory"]
)
def test_stored_rows_are_found_when_the_model_is_loaded_again(
    folder: Path, settings: tuple[str, ...], sources: set[str]
) -> None:
    """The memory of a model goes with its process, and no other model finds any of its rows."""
    with several(folder, *settings) as (_, client):
        prompt = prompt_of(client, "a6", "alpha")
        first = client.complete(prompt, model="alpha", prompt_cache_key="one")
        assert first.n_cached == 0
        again = client.complete(prompt, model="alpha", prompt_cache_key="one")
        assert again.sources == {"live"}

        other = client.complete(prompt, model="beta", prompt_cache_key="one")
        assert (other.n_cached, other.text != first.text) == (0, True)

        client.post("/v1/models/alpha/unload", {})
        assert states(client) == {"alpha": "unloaded", "beta": "loaded"}
        returned = client.complete(prompt, model="alpha", prompt_cache_key="one")
        assert returned.sources == sources
        assert (returned.n_prefilled < len(prompt) // 2) == bool(sources)
        assert states(client) == {"alpha": "loaded", "beta": "loaded"}


def test_an_unknown_model_is_a_404_that_lists_the_known_ones(
    unloaded: tuple[ServerProcess, Client],
) -> None:
    server, client = unloaded
    assert states(client) == {"alpha": "unloaded", "beta": "unloaded"}
    chat = {"model": "gamma", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for route, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "gamma", "prompt": "hi"}),
        ("/v1/embeddings", {"model": "gamma", "input": "hi"}),
        ("/v1/responses", {"model": "gamma", "input": "hi"}),
        ("/tokenize", {"model": "gamma", "content": "hi"}),
        ("/v1/models/gamma/load", {}),
    ):
        reply = client.try_post(route, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (
            404,
            "model_not_found",
            "model",
        ), route
        assert "`alpha`, `beta`" in error["message"]
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = client.try_post(route, chat)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (404, "not_found_error")
        assert "`alpha`, `beta`" in error["message"]
    for path in ("/v1/models/gamma", "/props?model=gamma", "/slots?model=gamma"):
        assert httpx.get(server.url + path).status_code == 404
    assert states(client) == {"alpha": "unloaded", "beta": "unloaded"}, "something was loaded"


def test_models_are_loaded_and_unloaded_on_request_and_repeating_is_harmless(
    unloaded: tuple[ServerProcess, Client],
) -> None:
    _, client = unloaded
    for _ in range(2):
        loaded = client.post("/v1/models/beta/load", {})
        assert (loaded["status"], loaded["meta"]["n_ctx"]) == ("loaded", 2048)
        assert client.get("/v1/models/beta") == loaded
    assert client.get("/props")["model_alias"] == "beta", "the one that is loaded answers"
    assert client.get("/props?model=alpha")["model_alias"] == "alpha"
    for _ in range(2):
        told = client.post("/v1/models/beta/unload", {})
        assert told["status"] == "unloaded"
        assert "meta" not in told
    assert states(client) == {"alpha": "loaded", "beta": "unloaded"}


def test_a_busy_model_is_not_unloaded(unloaded: tuple[ServerProcess, Client]) -> None:
    server, client = unloaded
    body = {"model": "alpha", "prompt": "Once", "max_tokens": 1500, "stream": True}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = client.try_post("/v1/models/alpha/unload", {})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
        assert "data: [DONE]" in list(lines)
    assert client.post("/v1/models/alpha/unload", {})["status"] == "unloaded"


def test_the_memory_budget_keeps_one_model_and_counters_never_go_back(folder: Path) -> None:
    with several(folder, "--models-memory", "1MiB") as (server, client):
        seen = 0.0
        for turn, name in enumerate(("alpha", "beta", "alpha")):
            prompt = prompt_of(client, f"{name} {turn}", name)
            client.complete(prompt, model=name)
            assert states(client)[name] == "loaded"
            assert sorted(states(client).values()) == ["loaded", "unloaded"]
            computed = client.metric("rekindle_prompt_tokens_prefilled_total")
            assert computed > seen
            seen = computed
        assert client.metric("rekindle_slots") == 2
        assert server.stop() == 0


def test_an_idle_model_is_unloaded_after_keep_alive_and_loaded_again_on_demand(
    folder: Path,
) -> None:
    with several(folder, "--keep-alive", "0.3") as (server, client):
        prompt = prompt_of(client, "idle", "alpha")
        client.complete(prompt, model="alpha")
        # The log may have a line from before: for the pause behind `tokenize`.
        wait_for(lambda: states(client)["alpha"] == "unloaded", "alpha is unloaded")
        server.wait_for_log("model=alpha unloaded, idle for 0.3 s")
        assert client.complete(prompt, model="alpha").sources == {"disk"}


def test_with_several_models_the_one_given_by_model_is_the_default(folder: Path) -> None:
    first, other = str(folder / "beta.gguf"), str(folder / "alpha.gguf")
    with (
        serve(first, "--models", other, "--alias", "main", *ENGINE) as server,
        closing(Client(server.url)) as client,
    ):
        assert states(client) == {"main": "loaded", "alpha": "unloaded"}
        client.complete(prompt_of(client, "x", "alpha"), model="alpha")
        reply = client.post("/v1/completions", {"prompt": "Once", "max_tokens": 1})
        assert reply["model"] == "main"


def test_a_model_that_fails_to_load_is_an_error_in_both_wire_formats(
    folder: Path, tmp_path: Path
) -> None:
    whole = (folder / "alpha.gguf").read_bytes()
    (tmp_path / "good.gguf").write_bytes(whole)
    (tmp_path / "torn.gguf").write_bytes(whole[: len(whole) // 2])
    with several(tmp_path) as (_, client):
        chat = {"model": "torn", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        openai = client.try_post("/v1/chat/completions", chat)
        assert (openai.status_code, openai.json()["error"]["code"]) == (500, "model_load_failed")
        assert "is truncated" in openai.json()["error"]["message"]
        anthropic = client.try_post("/v1/messages", chat)
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (500, "api_error")
        (tmp_path / "torn.gguf").write_bytes(whole)
        assert client.try_post("/v1/chat/completions", chat).status_code == 200, "not tried again"
