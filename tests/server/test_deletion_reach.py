"""A deletion through HTTP reaches models that are not loaded or whose engine has failed."""

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine_processes import FAILED, engine_health, engines_of, wait_for
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.workloads import Client, prose

ENGINE = ("--ctx-size", "2048", "--parallel", "2", "--threads", "1", "--no-cache-recompute")


def delete(url: str, **query: str) -> dict[str, Any]:
    reply = httpx.delete(f"{url}/v1/cache", params=query, timeout=60)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def prompt_of(client: Client, seed: str, model: str) -> list[int]:
    tokens: list[int] = client.post("/tokenize", {"content": prose(seed, 300), "model": model})[
        "tokens"
    ]
    return tokens


def test_entries_of_a_model_that_is_not_loaded_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, seed in (("alpha", 1), ("beta", 2)):
        write_tiny_model(folder / f"{name}.gguf", TinyArchitecture.LLAMA, seed=seed)
    directory = tmp_path / "cache"
    with (
        serve("--models-dir", str(folder), "--cache-dir", str(directory), *ENGINE) as server,
        closing(Client(server.url)) as client,
    ):
        prompts = {name: prompt_of(client, name, "beta") for name in ("ann", "bob")}
        for session, prompt in prompts.items():
            client.complete(prompt, model="beta", prompt_cache_key=session)
        client.post("/v1/models/beta/unload", {})
        client.complete(prompts["ann"], model="alpha", prompt_cache_key="bob")
        before = set(directory.rglob("*.kv"))

        body = delete(server.url, session="ann")

        assert body["unreached"] == []
        assert body["places"]["disk"] > 0
        # Alpha's may still be on their way.
        assert before - set(directory.rglob("*.kv"))
        states = {model["id"]: model["status"] for model in client.get("/v1/models")["data"]}
        assert states == {"alpha": "loaded", "beta": "unloaded"}
        for session, is_kept in (("ann", False), ("bob", True)):
            again = client.complete(prompts[session], model="beta", prompt_cache_key="new")
            assert (again.n_cached > 0) == is_kept
        assert client.complete(prompts["ann"], model="alpha").n_cached > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_engine_that_has_failed_is_in_the_reply_and_everything_else_is_deleted(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model.gguf", TinyArchitecture.LLAMA)
    other = write_tiny_model(tmp_path / "other.gguf", TinyArchitecture.LLAMA, seed=2)
    directory = tmp_path / "cache"
    with (
        serve(str(model), "--cache-dir", str(directory), *ENGINE) as server,
        closing(Client(server.url)) as client,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        asked = {"input": prose("secret", 300), "max_output_tokens": 4}
        response = http.post("/v1/responses", json=asked)
        assert response.status_code == 200, response.text
        wait_for(lambda: bool(list(directory.rglob("*.kv"))), "the prompt is stored")
        other.replace(model)  # the engine refuses to start with another file
        os.kill(engines_of(server.process.pid)[0], signal.SIGKILL)
        wait_for(lambda: engine_health(server.url)["state"] == FAILED, "the engine has failed")

        body = delete(server.url)

        [line] = body["unreached"]
        assert line.startswith("The engine of `")
        assert "does not answer" in line
        assert set(body["places"]) >= {"disk", "turns", "responses", "prompts"}
        assert list(directory.rglob("*.kv")) == []
        assert http.get(f"/v1/responses/{response.json()['id']}").status_code == 404
        assert client.get("/v1/sessions")["data"] == []


def test_a_session_is_deleted_with_its_sub_agents(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model.gguf", TinyArchitecture.LLAMA)
    with (
        serve(str(model), "--cache-dir", str(tmp_path / "cache"), *ENGINE) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        ids = {}
        for session in ("c1a0", "c1a0/a7", "c1a01"):
            parent, _, agent = session.partition("/")
            headers = {"x-claude-code-session-id": parent, "x-claude-code-agent-id": agent}
            asked = {"input": prose(session, 100), "max_output_tokens": 4}
            reply = http.post("/v1/responses", json=asked, headers=headers)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-rekindle-session"] == session
            ids[session] = reply.json()["id"]

        body = delete(server.url, session="c1a0")

        assert body["unreached"] == []
        assert body["places"]["responses"] == 2
        found = {
            session for session, id in ids.items() if http.get(f"/v1/responses/{id}").is_success
        }
        sessions = {each["session"] for each in http.get("/v1/sessions").json()["data"]}
        assert found == sessions == {"c1a01"}
