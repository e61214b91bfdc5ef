"""The endpoints of the forest on a fake engine: branches, their text, pins."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from pydantic import TypeAdapter

from rekindle.api.cache.bodies import CachePinned, Forest, StoredText
from rekindle.api.http.caller import namespace_of
from rekindle.api.http.context import ApiSettings
from rekindle.generation.events import CacheSource
from rekindle.generation.request import Rank
from rekindle.generation.status import StoredBranch
from tests.api.client import client_of
from tests.api.fakes import FakeResponder, FakeStore, api_settings

TRUNK = StoredBranch(
    key="trunk",
    parent=None,
    start=0,
    stop=5,
    n_bytes=640,
    names=("docs/v1",),
    sources=(CacheSource.MEMORY, CacheSource.DISK),
    session="ann",
    rank=Rank.MAIN,
    hits=3,
    used_at=1000.5,
    pinned_until=2000.0,
)
TWIG = replace(
    TRUNK,
    key="<script>/twig",
    parent=0,
    start=5,
    stop=9,
    names=(),
    sources=(),
    rank=Rank.EPHEMERAL,
    pinned_until=None,
)
BY_KEY = api_settings(api_keys=("one", "two"), separates_keys=True)


def ask(
    method: str,
    path: str,
    store: FakeStore | None = None,
    *,
    body: object = None,
    settings: ApiSettings | None = None,
    key: str | None = None,
) -> httpx.Response:
    responder = FakeResponder()
    responder.store = store or FakeStore(branches=[TRUNK, TWIG])
    headers = {"authorization": f"Bearer {key}"} if key else {}

    async def run() -> httpx.Response:
        async with client_of(responder, settings) as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(run())


def test_branches_are_listed_with_their_forks() -> None:
    store = FakeStore(branches=[TRUNK, TWIG])
    reply = ask("GET", "/v1/cache/forest?limit=10000", store).json()
    TypeAdapter(Forest).validate_python(reply, extra="forbid")
    assert store.asked == [("forest", 10_000, "")]
    trunk, twig = reply["data"]
    assert trunk == {
        "key": "trunk",
        "parent": None,
        "start": 0,
        "stop": 5,
        "bytes": 640,
        "names": ["docs/v1"],
        "session": "ann",
        "class": "main",
        "tiers": ["memory", "disk"],
        "hits": 3,
        "last_used": 1000.5,
        "pinned_until": 2000.0,
    }
    assert (twig["parent"], twig["tiers"], twig["class"]) == (0, [], "ephemeral")


def test_a_branch_that_only_the_shared_store_holds_says_so() -> None:
    branch = replace(TRUNK, sources=(CacheSource.SHARED,))
    reply = ask("GET", "/v1/cache/forest", FakeStore(branches=[branch])).json()
    TypeAdapter(Forest).validate_python(reply, extra="forbid")
    assert reply["data"][0]["tiers"] == ["shared"]


@pytest.mark.parametrize("limit", ["0", "10001", "x", "\u0663\u0663"])
def test_a_bad_limit_of_the_forest_is_refused_by_name(limit: str) -> None:
    reply = ask("GET", f"/v1/cache/forest?limit={limit}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


def test_the_text_of_a_branch_is_all_that_leads_to_its_end_or_its_own_part() -> None:
    whole = ask("GET", "/v1/cache/trunk/text").json()
    TypeAdapter(StoredText).validate_python(whole, extra="forbid")
    assert (whole["start"], whole["stop"], whole["text"]) == (0, 5, "trunk")
    own = ask("GET", "/v1/cache/trunk/text?start=3").json()
    assert (own["start"], own["stop"], own["text"]) == (3, 5, "nk")
    beyond = ask("GET", "/v1/cache/trunk/text?start=99").json()
    assert (beyond["start"], beyond["stop"], beyond["text"]) == (5, 5, "")
    assert ask("GET", "/v1/cache/trunk/text?start=-1").json()["error"]["param"] == "start"


def test_a_key_with_slashes_and_marks_is_found_and_its_text_stays_json() -> None:
    reply = ask("GET", "/v1/cache/%3Cscript%3E%2Ftwig/text")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["text"] == "<script>/twig"


def test_a_pin_is_set_and_taken_away() -> None:
    store = FakeStore(branches=[TRUNK])
    reply = ask("POST", "/v1/cache/trunk/pin", store, body={"seconds": 3600}).json()
    TypeAdapter(CachePinned).validate_python(reply, extra="forbid")
    assert reply == {"object": "cache.pinned", "key": "trunk", "seconds": 3600.0}
    ask("POST", "/v1/cache/trunk/pin", store, body={"seconds": 0})
    assert store.asked == [("pin", "trunk", 3600.0, ""), ("pin", "trunk", 0.0, "")]


@pytest.mark.parametrize("body", [{}, {"seconds": -1}, {"seconds": "9"}, {"seconds": 1e300}])
def test_a_pin_without_a_sensible_time_is_refused_by_name(body: object) -> None:
    reply = ask("POST", "/v1/cache/trunk/pin", body=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "seconds")


@pytest.mark.parametrize(("method", "end"), [("GET", "text"), ("POST", "pin")])
def test_what_is_not_there_is_a_404_that_names_the_key(method: str, end: str) -> None:
    reply = ask(method, f"/v1/cache/gone/{end}", body={"seconds": 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "not_found", "key")
    assert "'gone'" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/forest"),
        ("GET", "/v1/cache/trunk/text"),
        ("POST", "/v1/cache/trunk/pin"),
    ],
)
def test_each_key_sees_its_own_namespace_and_no_key_nothing(method: str, path: str) -> None:
    body = {"seconds": 1}
    assert ask(method, path, body=body, settings=BY_KEY).status_code == 401
    for key in ("one", "two"):
        store = FakeStore(branches=[TRUNK])
        assert ask(method, path, store, body=body, settings=BY_KEY, key=key).status_code == 200
        [asked] = store.asked
        assert asked[-1] == namespace_of({}, None, key)
