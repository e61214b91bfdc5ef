"""What Ollama's clients ask about models, and how long these stay loaded."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rekindle import __version__
from rekindle.api.http.context import ApiSettings
from rekindle.api.models import Models
from rekindle.errors import ModelInUse
from rekindle.models.card import FileCard, ListedModel, ModelState
from tests.api.client import USER, app_on
from tests.api.fakes import CARD, FakeResponder, FixedModels, api_settings

DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "135.00M",
    "quantization_level": "Q8_0",
}


def ask(
    path: str,
    body: dict[str, Any] | None = None,
    *,
    models: Models | None = None,
    settings: ApiSettings | None = None,
    method: str | None = None,
    **headers: str,
) -> httpx.Response:
    async def run() -> httpx.Response:
        app = app_on(models or FixedModels(FakeResponder(), CARD), settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            way = method or ("GET" if body is None else "POST")
            return await client.request(way, path, json=body, headers=headers)

    return asyncio.run(run())


OF_FILE = FileCard(
    architecture="qwen3",
    chat_template="{{ messages }}",
    n_ctx_train=4096,
    n_params=8_190_735_360,
    size_bytes=5_000_000,
    quantization="Q4_K - Medium",
)


class SeveralModels(FixedModels):
    """Two models, of which the second is not loaded."""

    def listed(self) -> list[ListedModel]:
        return [self.find("tiny"), self.find("other")]

    def find(self, name: str) -> ListedModel:
        if name == "other":
            return ListedModel("other", 1700000000, ModelState.UNLOADED, None)
        return replace(super().find(name), seconds_left=60)

    async def file_card(self, name: str) -> FileCard | None:
        return OF_FILE if name == "other" else await super().file_card(name)


def several() -> SeveralModels:
    return SeveralModels(FakeResponder(), CARD)


def test_tags_list_every_model_with_a_tag_and_a_digest_of_its_own() -> None:
    tiny, other = ask("/api/tags", models=several()).json()["models"]
    assert (tiny["name"], tiny["model"]) == ("tiny:latest", "tiny:latest")
    assert tiny["details"] == DETAILS
    assert tiny["modified_at"] == "2023-11-14T22:13:20Z"
    assert (other["model"], other["size"]) == ("other:latest", 5_000_000)
    assert (other["details"]["format"], other["details"]["family"]) == ("gguf", "qwen3")
    assert other["details"]["parameter_size"] == "8.2B"
    assert other["details"]["quantization_level"] == "Q4_K - Medium"
    assert len({tiny["digest"], other["digest"]}) == 2
    assert {len(tiny["digest"]), len(other["digest"])} == {64}


def test_ps_lists_loaded_models_and_until_when() -> None:
    [tiny] = ask("/api/ps", models=several()).json()["models"]
    assert (tiny["model"], tiny["context_length"], tiny["size"]) == ("tiny:latest", 512, 1_000_000)
    [forever] = ask("/api/ps").json()["models"]
    assert forever["expires_at"] > tiny["expires_at"] > "2026"


def test_show_tells_agents_the_real_context_and_what_the_model_can_do() -> None:
    shown = ask("/api/show", {"model": "tiny:latest"}).json()
    assert shown["details"] == DETAILS
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["parameters"].split() == ["num_ctx", "512"]
    assert shown["template"] == CARD.chat_template
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert ask("/api/show", {"name": "any"}).json() == shown, "a single model has every name"


def test_show_loads_no_model() -> None:
    models = several()
    shown = ask("/api/show", {"model": "other"}, models=models).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 8_190_735_360,
        "qwen3.context_length": 4096,
    }
    assert (shown["template"], shown["parameters"]) == ("{{ messages }}", "")
    assert models.n_leases == 0
    refused = ask("/api/show", {"model": "missing"}, models=models)
    assert (refused.status_code, refused.json().keys()) == (404, {"error"})
    assert ask("/api/show", {}, models=models).json() == {"error": "`model` is required."}


def test_the_version_is_one_that_clients_accept() -> None:
    assert ask("/api/version").json() == {"version": "0.13.0", "rekindle": __version__}


def test_the_root_answers_the_clients_that_only_look_for_a_server() -> None:
    assert ask("/", method="HEAD").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/pull", "`rekindle serve hf:owner/repo/file.gguf`"),
        ("POST", "/api/push", "not published"),
        ("POST", "/api/create", "`rekindle serve FILE`"),
        ("POST", "/api/copy", "the name of its file"),
        ("DELETE", "/api/delete", "Delete the file"),
        ("POST", "/api/blobs/sha256:00", "`rekindle serve FILE`"),
    ],
)
def test_models_are_not_managed_over_http(method: str, path: str, words: str) -> None:
    reply = ask(path, {"model": "missing"}, method=method)
    assert reply.status_code == 400
    assert words in reply.json()["error"]


def test_a_model_that_is_here_needs_no_pull() -> None:
    assert ask("/api/pull", {"model": "tiny"}).json() == {"status": "success"}
    assert ask("/api/pull", {"name": "tiny:latest"}).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("100ms", 0.1),
        ("90", 90),
        (90, 90),
        (0.5, 0.5),
        ("0", 0),
        (0, 0),
        (-1, math.inf),
        ("-1m", math.inf),
    ],
)
def test_a_request_says_how_long_its_model_is_kept(keep_alive: object, seconds: float) -> None:
    models = FixedModels(FakeResponder(), CARD)
    ask("/api/chat", {"model": "m", "messages": [USER], "keep_alive": keep_alive}, models=models)
    [(name, kept)] = models.kept_alive
    assert name == "m"
    assert kept == pytest.approx(seconds)
    assert models.unloads == []


def test_embeddings_keep_their_model_too() -> None:
    models = FixedModels(FakeResponder(), CARD)
    ask("/api/embed", {"input": "a", "keep_alive": "5m"}, models=models)
    ask("/api/embeddings", {"prompt": "a", "keep_alive": 7}, models=models)
    ask("/api/embed", {"input": "a"}, models=models)
    assert models.kept_alive == [(None, 300), (None, 7)]


@pytest.mark.parametrize(
    ("path", "empty", "own"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "raw": True}, {"response": ""}),
    ],
)
def test_a_request_without_a_prompt_loads_or_unloads(
    path: str, empty: dict[str, Any], own: dict[str, Any]
) -> None:
    models = FixedModels(FakeResponder(), CARD)
    reply = ask(path, empty, models=models).json()
    del reply["created_at"]
    assert reply == {"model": "tiny", "done": True, "done_reason": "load", **own}
    assert (models.n_leases, models.unloads) == (1, [])
    reply = ask(path, {**empty, "keep_alive": "0s"}, models=models).json()
    assert (reply["done_reason"], models.unloads) == ("unload", ["tiny"])
    assert models.n_leases == 1, "nothing is loaded to be unloaded"


def test_a_model_in_use_is_unloaded_after_its_last_reply() -> None:
    class BusyModels(FixedModels):
        async def unload(self, name: str) -> None:
            raise ModelInUse("It is in use.")

    models = BusyModels(FakeResponder(), CARD)
    reply = ask("/api/chat", {"keep_alive": 0}, models=models)
    assert reply.json()["done_reason"] == "unload"
    assert models.kept_alive == [("tiny", 0)]


def test_only_the_administrator_unloads() -> None:
    settings = api_settings(api_keys=("sk-1",), admin_key="sk-admin")
    models = FixedModels(FakeResponder(), CARD)

    def chat(key: str, **body: Any) -> httpx.Response:
        return ask(
            "/api/chat", body, models=models, settings=settings, authorization=f"Bearer {key}"
        )

    assert chat("sk-1", messages=[USER], keep_alive=0).status_code == 200
    assert chat("sk-1", keep_alive="5m").json()["done_reason"] == "load"
    refused = chat("sk-1", keep_alive=0)
    assert (refused.status_code, refused.json().keys()) == (403, {"error"})
    assert (models.kept_alive, models.unloads) == ([], [])
    assert chat("sk-admin", keep_alive=0).status_code == 200
    assert models.unloads == ["tiny"]


def test_vectors_in_both_shapes() -> None:
    responder = FakeResponder()
    models = FixedModels(responder, CARD)
    reply = ask("/api/embed", {"input": ["a", "bc"], "dimensions": 2}, models=models).json()
    assert [len(vector) for vector in reply["embeddings"]] == [2, 2]
    assert reply["embeddings"][0] == pytest.approx([0.6, 0.8])
    assert reply["prompt_eval_count"] == 3
    assert responder.truncates
    ask("/api/embed", {"input": "a", "truncate": False}, models=models)
    assert not responder.truncates
    one = ask("/api/embeddings", {"prompt": "a"}, models=models).json()
    assert one == {"embedding": pytest.approx([0.6, 0.8, 0])}
    assert ask("/api/embed", {"input": []}).json()["embeddings"] == []
    assert ask("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}
    refused = ask("/api/embed", {"input": "a", "dimensions": 4})
    assert (refused.status_code, refused.json().keys()) == (400, {"error"})
