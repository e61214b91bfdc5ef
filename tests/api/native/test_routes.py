"""The endpoints that are llama-server's."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from rekindle import __version__
from rekindle.generation.events import CacheSource
from rekindle.generation.status import CacheCounters, CacheStatus, TierStatus
from rekindle.models.card import LoraCard
from tests.api import client
from tests.api.client import client_of, post
from tests.api.fakes import CARD, FakeResponder, api_settings


def get(path: str, method: str = "GET", responder: FakeResponder | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(responder or FakeResponder()) as client:
            return await client.request(method, path)

    return asyncio.run(run())


def test_health_answers_get_and_head() -> None:
    assert get("/health").json() == {"status": "ok"}
    assert get("/health", "HEAD").status_code == 200
    assert get("/health", "HEAD").content == b""


def shared_store(trouble: str | None) -> FakeResponder:
    responder = FakeResponder()
    tier = TierStatus(
        name=CacheSource.SHARED,
        n_entries=2,
        n_bytes=0,
        budget_bytes=0,
        trouble=trouble,
        directory="redis://store:6379/0",
    )
    responder.cache = CacheStatus(
        model_class="dense", off_because=None, tiers=(tier,), counters=CacheCounters()
    )
    return responder


def test_health_reports_only_whether_the_shared_store_answers() -> None:
    reply = get("/health", responder=shared_store(None))
    assert reply.json() == {"status": "ok", "shared_store": "ok"}
    reply = get("/health", responder=shared_store("connection refused"))
    assert reply.json() == {"status": "ok", "shared_store": "not answering"}
    assert reply.status_code == 200


def test_props_tell_where_the_shared_store_is_and_what_is_wrong_with_it() -> None:
    props = get("/props", responder=shared_store("connection refused")).json()
    [tier] = props["rekindle"]["cache"]["tiers"]
    assert tier["directory"] == "redis://store:6379/0"
    assert (tier["name"], tier["entries"], tier["trouble"]) == ("shared", 2, "connection refused")


def test_props_tell_what_llama_servers_clients_look_for() -> None:
    props = get("/props").json()
    settings = props.pop("default_generation_settings")
    assert settings["n_ctx"] == 512
    assert settings["params"]["top_k"] == 20
    assert settings["params"]["seed"] == -1
    assert props == {
        "total_slots": 4,
        "model_alias": "tiny",
        "model_path": "/models/tiny.gguf",
        "model_ftype": "Q8_0",
        "modalities": {"vision": False, "audio": False},
        "chat_template": "{{ messages }}",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "build_info": f"rekindle-{__version__}",
        "rekindle": {
            "version": __version__,
            "dialect": {
                "name": "generic",
                "origin": "setting",
                "line": "generic, by the setting",
                "losses": [],
                "refused_by_grammar": [],
            },
            "cache": None,
            "no_drafts_because": None,
        },
    }


def test_props_tell_why_nothing_is_drafted() -> None:
    responder = FakeResponder()
    responder.no_drafts_because = "--speculate is off"
    props = get("/props", responder=responder).json()
    assert props["rekindle"]["no_drafts_because"] == "--speculate is off"


def test_props_tell_what_the_cache_holds_and_what_keeps_it_from_more() -> None:
    responder = FakeResponder()
    responder.cache = CacheStatus(
        model_class="dense",
        off_because=None,
        tiers=(
            TierStatus(name=CacheSource.MEMORY, n_entries=3, n_bytes=70, budget_bytes=100),
            TierStatus(
                name=CacheSource.DISK,
                n_entries=5,
                n_bytes=90,
                budget_bytes=90,
                trouble="full",
                directory="/cache",
            ),
        ),
        counters=CacheCounters(),
    )
    memory = {"name": "memory", "entries": 3, "bytes": 70, "budget_bytes": 100}
    memory |= {"trouble": None, "directory": None}
    disk = {"name": "disk", "entries": 5, "bytes": 90, "budget_bytes": 90}
    disk |= {"trouble": "full", "directory": "/cache"}
    assert get("/props", responder=responder).json()["rekindle"]["cache"] == {
        "model_class": "dense",
        "off_because": None,
        "tiers": [memory, disk],
    }


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_models_lists_the_one_that_is_served(prefix: str) -> None:
    (model,) = get(f"{prefix}/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["meta"]["n_ctx"] == 512
    assert get(f"{prefix}/models/tiny").json() == model


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, list(b"a<|im_end|>")),
        ({"parse_special": True}, [97, 257]),
        ({"parse_special": True, "add_special": True}, [256, 97, 257]),
    ],
)
def test_tokenize_makes_control_tokens_only_when_asked(
    fields: dict[str, bool], tokens: list[int]
) -> None:
    assert post("/tokenize", {"content": "a<|im_end|>", **fields}).json() == {"tokens": tokens}


def test_pieces_that_are_no_text_are_bytes() -> None:
    reply = post("/tokenize", {"content": "a\u00e9", "with_pieces": True}).json()
    assert reply["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


def test_detokenize_shows_control_tokens_and_survives_broken_text() -> None:
    reply = post("/detokenize", {"tokens": [104, 105, 257, 0xC3]}).json()
    assert reply == {"content": "hi<|im_end|>\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("/detokenize", {"tokens": [258]}, "tokens.0"),
        ("/detokenize", {"tokens": "hi"}, "tokens"),
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_bad_field_is_named(path: str, body: object, param: str) -> None:
    reply = post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_v1_health_is_health_without_a_key() -> None:
    async def run() -> httpx.Response:
        async with client_of(FakeResponder(), api_settings(api_keys=("secret",))) as client:
            return await client.get("/v1/health")

    assert asyncio.run(run()).json() == {"status": "ok"}


def test_without_lora_adapters_naming_one_is_an_error() -> None:
    assert get("/lora-adapters").json() == []
    assert post("/lora-adapters", []).json() == {"success": True}
    refused = post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "0.id"
    assert "no LoRA adapter 0" in refused.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"id": 0}, [{"scale": 1}], ["a"], [{"id": "0", "scale": 1}]])
def test_wrong_lora_scales_are_errors(body: object) -> None:
    assert post("/lora-adapters", body).status_code == 400


def test_properties_cannot_be_changed() -> None:
    refused = post("/props", {})
    assert refused.status_code == 501
    assert refused.json()["error"]["type"] == "not_supported_error"


def test_models_have_the_fields_that_clients_of_llama_server_read() -> None:
    reply = get("/v1/models").json()
    assert reply["data"][0]["meta"] == {
        "vocab_type": 2,
        "n_ctx": 512,
        "n_ctx_train": 2048,
        "n_vocab": 258,
        "n_embd": 576,
        "n_params": 135_000_000,
        "size": 1_000_000,
    }
    assert [(each["name"], each["model"]) for each in reply["models"]] == [("tiny", "tiny")]
    assert reply["models"][0]["capabilities"] == ["completion"]


def test_lora_adapters_are_listed_and_keep_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = LoraCard("a.gguf", 0.5, "", "")
    monkeypatch.setattr(client, "CARD", replace(CARD, adapters=(adapter,)))
    [listed] = get("/lora-adapters").json()
    assert (listed["id"], listed["path"], listed["scale"]) == (0, "a.gguf", 0.5)
    assert post("/lora-adapters", [{"id": 0, "scale": 0.5}]).json() == {"success": True}
    changed = post("/lora-adapters", [{"id": 0, "scale": 1.0}])
    assert (changed.status_code, changed.json()["error"]["param"]) == (400, "0.scale")
    assert post("/lora-adapters", []).status_code == 400  # not listed: the scale 0


CHAT = {"messages": [client.USER]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/completion", {"prompt": "a"}),
    ],
)
def test_a_request_may_name_the_scales_that_the_adapters_have(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = (LoraCard("a.gguf", 0.5, "", ""), LoraCard("b.gguf", 0.0, "", ""))
    monkeypatch.setattr(client, "CARD", replace(CARD, adapters=adapters))
    for lora in ([], [{"id": 0, "scale": 0.5}], [{"id": 1, "scale": 0}, {"id": 0, "scale": 0.5}]):
        assert post(path, {**body, "lora": lora}).status_code == 200
    for wrong, param in (
        ([{"id": 0, "scale": 1}], "lora.0.scale"),
        ([{"id": 1, "scale": 0}], "lora"),
        ([{"id": 0, "scale": 0.5}, {"id": 2, "scale": 0}], "lora.1.id"),
    ):
        refused = post(path, {**body, "lora": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_slots_and_the_dashboard_can_be_turned_off() -> None:
    settings = api_settings(serves_slots=False, serves_dashboard=False)

    async def run() -> list[tuple[str, int]]:
        async with client_of(FakeResponder(), settings) as opened:
            paths = ("/slots", "/", "/dashboard/app.js", "/props")
            return [(path, (await opened.get(path)).status_code) for path in paths]

    assert asyncio.run(run()) == [
        ("/slots", 501),
        ("/", 404),
        ("/dashboard/app.js", 404),
        ("/props", 200),
    ]
