"""Several people on one server: nobody reads another's prompts, through a real server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import prose, user

ANN, BOB, ADMIN = "key-of-ann", "key-of-bob", "key-of-the-administrator"
KEYS = ("--api-key", ANN, "--api-key", BOB)
ENGINE = ("--ctx-size", "65536", "--parallel", "2", "--threads", "1")
CHAT = "/v1/chat/completions"
SECRET = f"The safe is behind the mirror. {prose('secret', 40)}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [user(text)], "max_tokens": 2, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> str:
    return str(tiny_models(TinyArchitecture.LLAMA))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with serve(model, *KEYS, "--admin-key", ADMIN, *ENGINE) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def story(http: httpx.Client, text: str, **headers: str) -> dict[str, Any]:
    """The account of a reply."""
    reply = http.post(CHAT, json=chat(text), headers={"x-rekindle-explain": "1", **headers})
    assert reply.status_code == 200, reply.text
    account: dict[str, Any] = reply.json()["rekindle"]
    return account


def test_several_keys_have_a_namespace_each_and_the_log_says_so(
    server: ServerProcess, http: httpx.Client
) -> None:
    assert "2 API keys, each with a namespace of its own" in server.log
    story(http, SECRET, **bearer(ANN))
    assert story(http, SECRET, **bearer(ANN))["prefilled"] <= 2
    other = story(http, SECRET.replace("mirror", "window"), **bearer(BOB))
    assert other["cached"] == []
    assert "mirror" not in json.dumps(other)  # the explanation quotes the prompt it compares with


def test_no_key_lists_or_reads_what_another_stored(http: httpx.Client) -> None:
    story(http, SECRET, **bearer(ANN))
    [*_, entry] = http.get("/v1/cache", headers=bearer(ANN)).json()["data"]
    text = f"/v1/cache/{entry['key']}/text"
    assert http.get(text, headers=bearer(ANN)).status_code == 200
    assert http.get(text, headers=bearer(BOB)).status_code == 404
    assert all(
        each["key"] != entry["key"]
        for each in http.get("/v1/cache", headers=bearer(BOB)).json()["data"]
    )


def test_a_revoked_key_beside_a_valid_one_opens_nothing(model: str, http: httpx.Client) -> None:
    story(http, SECRET, **bearer(ANN))
    revoked = {**bearer("revoked"), "x-api-key": BOB}
    own = http.get("/v1/cache", headers=bearer(BOB)).json()["data"]
    assert http.get("/v1/cache", headers=revoked).json()["data"] == own
    # The other way round: a client that still sends a removed key as its bearer token.
    stale = {**bearer(ANN + "-old"), "x-api-key": ANN}
    assert story(http, SECRET, **stale)["prefilled"] <= 2


def test_one_person_sees_nothing_of_another_who_is_being_served(http: httpx.Client) -> None:
    body = {"prompt": [5], "max_tokens": 30_000, "stream": True, "ignore_eos": True}
    session = {"x-rekindle-session": "ann-at-night"}
    with http.stream("POST", "/v1/completions", json=body, headers=bearer(ANN) | session) as stream:
        lines = stream.iter_lines()  # a generator that is dropped closes the stream
        next(lines)

        def seen_by(key: str) -> str:
            """The slots, and the first two events: the hour and a snapshot."""
            seen = http.get("/slots", headers=bearer(key)).text
            with http.stream("GET", "/v1/events", headers=bearer(key)) as events:
                frames = (line for line in events.iter_lines() if line.startswith("data:"))
                return seen + next(frames) + next(frames)

        assert "ann-at-night" in seen_by(ANN)
        assert "ann-at-night" in seen_by(ADMIN)
        other = seen_by(BOB)
    assert '"is_processing":true' in other
    assert "ann-at-night" not in other


def test_only_the_administrator_unloads_a_model(http: httpx.Client) -> None:
    [model] = http.get("/v1/models", headers=bearer(ANN)).json()["data"]
    path = f"/v1/models/{model['id']}/unload"
    assert http.post(path, headers=bearer(ANN)).status_code == 403
    assert http.get("/v1/models", headers=bearer(ANN)).json()["data"][0]["status"] == "loaded"
    assert http.post(path, headers=bearer(ADMIN)).status_code == 200
    story(http, "hello", **bearer(ANN))  # loaded again on its next use


def test_sharing_one_namespace_is_a_choice_that_the_log_names(model: str) -> None:
    with (
        serve(model, *KEYS, "--namespace-by", "none", *ENGINE) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        assert "2 API keys share one namespace" in server.log
        story(http, SECRET, **bearer(ANN))
        assert story(http, SECRET, **bearer(BOB))["prefilled"] <= 2
