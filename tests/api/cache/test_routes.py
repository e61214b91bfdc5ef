"""The cache endpoints on a fake engine."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from rekindle.api.admission.keys import ApiKeys, Keys
from rekindle.api.body import BodyReader
from rekindle.api.cache.bodies import CacheDeleted, Lookup, SessionList, StoredList
from rekindle.api.cache.detect import detect
from rekindle.api.cache.routes import CacheApi
from rekindle.api.cache_controls import CommonFields
from rekindle.api.errors import answer_http_exception, answer_rekindle_error
from rekindle.api.http.caller import namespace_of
from rekindle.api.http.context import RequestContext
from rekindle.api.models import Lease
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Exchange, Pipeline, RawPrompt, WireFormat
from rekindle.chat.accounts.sessions import Ledger, Sessions
from rekindle.errors import RekindleError
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.generation.forgetting import Deleted, Place, Scope
from rekindle.generation.request import Rank, session_name
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    Forecast,
    StoredPrefix,
    TierStatus,
)
from rekindle.observe.telemetry import Telemetry
from tests.api.fakes import CARD, FakeResponder, FakeStore, FixedModels, api_settings

FORMATS = ("chat", "completions", "messages", "responses")
LIVE, MEMORY, DISK = CacheSource.LIVE, CacheSource.MEMORY, CacheSource.DISK
STORED = StoredPrefix(
    key="k1",
    name="docs/v1",
    session="ann",
    rank=Rank.BACKGROUND,
    n_tokens=300,
    n_bytes=4096,
    sources=(MEMORY, DISK),
    hits=2,
    used_at=1000.5,
    pinned_until=None,
)
CACHE = CacheStatus(
    model_class="dense",
    off_because=None,
    tiers=(TierStatus(name=MEMORY, n_entries=3, n_bytes=5, budget_bytes=7),),
    counters=CacheCounters(),
)
FORECAST = Forecast(
    n_prompt=10,
    spans=Spans([CachedSpan(LIVE, 0, 3), CachedSpan(DISK, 3, 5), CachedSpan(LIVE, 5, 6)]),
    restore_seconds=0.0015,
    prefill_seconds=0.25,
)


@dataclass
class Store(FakeStore):
    stored: list[StoredPrefix] = field(default_factory=lambda: [STORED])
    forecast: Forecast = FORECAST
    cache: CacheStatus | None = CACHE
    models: list[str | None] = field(default_factory=list)
    deletions: list[tuple[Scope, float]] = field(default_factory=list)


class Models(FixedModels):
    def __init__(self, store: Store) -> None:
        self.responder = FakeResponder()
        self.responder.store, self.responder.cache = store, store.cache
        super().__init__(self.responder, CARD)
        self.store = store

    async def lease(self, name: str | None) -> Lease:
        self.store.models.append(name)
        return await super().lease(name)


def format_of(name: str) -> WireFormat[CommonFields]:
    def read(*_: object) -> Exchange:
        return Exchange(
            prompt=[RawPrompt("prompt", name)],
            marks=(),
            options=lambda *_: pytest.fail("nothing is generated"),
            encoder=lambda *_: pytest.fail("nothing is generated"),
            whole=lambda *_: pytest.fail("nothing is generated"),
        )

    return WireFormat(
        name=name,
        operation=name,
        paths=(),
        schema=CommonFields,
        body=dict,
        event=dict,
        id_prefix="",
        read=read,
    )


def ask(
    method: str,
    path: str,
    store: Store | None = None,
    *,
    body: object = None,
    separates_keys: bool = False,
    **headers: str,
) -> httpx.Response:
    """Prompts are the names of the formats that were found."""
    handlers: Any = {RekindleError: answer_rekindle_error, HTTPException: answer_http_exception}
    app = FastAPI(exception_handlers=handlers)
    app.add_middleware(ApiKeys, keys=Keys())
    formats = [format_of(name) for name in FORMATS]
    sessions = Sessions()
    ledger = Ledger(requests=1, prompt_tokens=9, prefilled_tokens=9)
    sessions.use("", "ann", asked_at=0).ledger = ledger

    models = Models(store or Store())
    models.responder.sessions = sessions
    telemetry = Telemetry()
    settings = api_settings(separates_keys=separates_keys)
    context = RequestContext(models, telemetry, settings, BodyReader(telemetry))

    async def forget(scope: Scope, at: float) -> Deleted:
        models.store.deletions.append((scope, at))
        return DELETED

    CacheApi(context, Pipeline(context), formats, forget).add_routes(Routes(app))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, json=body, headers=named)

    return asyncio.run(run())


def test_stored_prompts_are_listed_with_tiers_and_tokens() -> None:
    store = Store()
    reply = ask("GET", "/v1/cache", store).json()
    TypeAdapter(StoredList).validate_python(reply, extra="forbid")
    assert reply == {
        "object": "list",
        "data": [
            {
                "key": "k1",
                "name": "docs/v1",
                "session": "ann",
                "class": "background",
                "tokens": 300,
                "bytes": 4096,
                "tiers": ["memory", "disk"],
                "hits": 2,
                "last_used": 1000.5,
                "pinned_until": None,
            }
        ],
        "usage": [{"name": "memory", "entries": 3, "bytes": 5, "budget_bytes": 7}],
    }
    assert store.asked == [("list", 100, "")]


def test_an_engine_that_still_starts_has_an_empty_list() -> None:
    reply = ask("GET", "/v1/cache?limit=7", store := Store(stored=[], cache=None)).json()
    assert reply == {"object": "list", "data": [], "usage": []}
    assert store.asked == [("list", 7, "")]


@pytest.mark.parametrize(
    "limit", ["0", "-1", "1001", "10000000000", "x", "", "\u0663\u0663\u0663\u0663"]
)
def test_a_bad_limit_is_refused_by_name(limit: str) -> None:
    reply = ask("GET", f"/v1/cache?limit={limit}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("key", ["k1", "docs/v1"])
def test_a_prompt_is_deleted_by_key_or_name(key: str) -> None:
    store = Store()
    reply = ask("DELETE", f"/v1/cache/{key}", store).json()
    TypeAdapter(CacheDeleted).validate_python(reply, extra="forbid")
    assert reply == {
        "object": "cache.deleted",
        "key": key,
        "deleted": 1,
        "places": {"memory": 1},
        "unreached": [],
    }
    again = ask("DELETE", f"/v1/cache/{key}", store)
    assert again.status_code == 404
    error = again.json()["error"]
    assert (error["param"], error["code"]) == ("key", "not_found")
    assert f"'{key}'" in error["message"]


DELETED = Deleted(counts={Place.DISK: 2, Place.TURNS: 1}, unreached=("The store is away.",))
LONG = "x" * 5000
SALTED = namespace_of(Headers(), "s", None)


@pytest.mark.parametrize(
    ("path", "salt", "scope"),
    [
        ("/v1/cache", "", Scope(namespace="")),
        ("/v1/cache", "s", Scope(namespace=SALTED)),
        ("/v1/cache?session=ann/b", "", Scope(namespace="", session="ann/b")),
        (f"/v1/cache?session={LONG}", "", Scope(namespace="", session=session_name(LONG))),
        ("/v1/cache?scope=all", "s", Scope()),
    ],
)
def test_a_deletion_covers_a_namespace_a_session_or_everything_until_now(
    path: str, salt: str, scope: Scope
) -> None:
    store = Store()
    began = time.time()
    reply = ask("DELETE", path, store, x_rekindle_cache_salt=salt).json()
    TypeAdapter(CacheDeleted).validate_python(reply, extra="forbid")
    assert reply == {
        "object": "cache.deleted",
        "key": None,
        "deleted": 3,
        "places": {"disk": 2, "turns": 1},
        "unreached": ["The store is away."],
    }
    [(deleted, at)] = store.deletions
    assert deleted == scope
    assert began <= at <= time.time()
    assert store.models == []  # no model is loaded for it


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("scope=mine", "scope"),
        ("scope=all&session=ann", "scope"),
        ("session=", "session"),
        ("session=%20%07", "session"),
        ("model=small", "model"),
        ("sesion=ann", "sesion"),
        ("Scope=all", "Scope"),
        ("session=ann&session=bob", "session"),
    ],
)
def test_a_deletion_of_an_unclear_scope_is_refused(query: str, param: str) -> None:
    store = Store()
    reply = ask("DELETE", f"/v1/cache?{query}", store)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert store.deletions == []


def test_a_lookup_reports_cached_tokens_and_expected_time() -> None:
    store = Store()
    reply = ask("POST", "/v1/cache/lookup", store, body={"messages": []}).json()
    TypeAdapter(Lookup).validate_python(reply, extra="forbid")
    assert reply == {
        "object": "cache.lookup",
        "prompt_tokens": 10,
        "cached": [{"tier": "live", "tokens": 4}, {"tier": "disk", "tokens": 2}],
        "prefilled": 4,
        "expected_ms": {"restore": 1.5, "prefill": 250.0, "total": 251.5},
        "miss": None,
    }
    assert store.asked == [("look_up", "chat", "")]


@pytest.mark.parametrize(
    ("restore", "prefill", "expected"),
    [
        (None, None, {"restore": None, "prefill": None, "total": None}),
        (0.0, None, {"restore": 0.0, "prefill": None, "total": None}),
        (None, 0.5, {"restore": None, "prefill": 500.0, "total": None}),
    ],
)
def test_expected_times_are_null_until_measured(
    restore: float | None, prefill: float | None, expected: dict[str, float | None]
) -> None:
    store = Store(forecast=Forecast(10, Spans(), restore, prefill))
    reply = ask("POST", "/v1/cache/lookup", store, body={"prompt": "x"}).json()
    assert (reply["cached"], reply["prefilled"]) == ([], 10)
    assert reply["expected_ms"] == expected


ANTHROPIC_TOOL = {"name": "f", "input_schema": {}}
OPENAI_TOOL = {"type": "function", "function": {"name": "f"}}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
ASKED = {"role": "user", "content": [{"type": "text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("body", "headers", "dialect"),
    [
        ({"prompt": [1, 2]}, {}, "completions"),
        ({"input": "hi"}, {}, "responses"),
        ({"messages": [ASKED], "options": {}}, {}, "ollama_chat"),
        ({"messages": [ASKED], "think": True}, {}, "ollama_chat"),
        ({"prompt": "hi", "system": "s", "keep_alive": 0}, {}, "ollama_generate"),
        ({"messages": [ASKED]}, {}, "chat"),
        ({"messages": [ASKED], "tools": [OPENAI_TOOL]}, {}, "chat"),
        ({"messages": [{"role": "system", "content": "s"}, ASKED]}, {}, "chat"),
        ({"messages": [ASKED], "system": "s"}, {}, "messages"),
        ({"messages": [ASKED]}, {"Anthropic-Version": "2023-06-01"}, "messages"),
        ({"messages": [ASKED], "tools": [ANTHROPIC_TOOL]}, {}, "messages"),
        ({"messages": [ASKED, USED]}, {}, "messages"),
        ({"messages": [ASKED, RESULT]}, {}, "messages"),
        ({"messages": "x", "tools": {"input_schema": 1}}, {}, "chat"),
        ({"messages": [None, {"content": [3]}], "tools": [None]}, {}, "chat"),
        ({"messages": [{"content": [{"type": ["tool_use"]}]}]}, {}, "chat"),
        ({}, {}, "chat"),
    ],
)
def test_the_wire_format_of_a_body_is_detected(
    body: dict[str, Any], headers: dict[str, str], dialect: str
) -> None:
    assert detect(body, Headers(headers)) == dialect


def test_a_named_wire_format_overrides_the_detected_one() -> None:
    store = Store()
    for dialect in FORMATS:
        ask("POST", f"/v1/cache/lookup?dialect={dialect}", store, body={"input": "hi"})
    assert [prompt for _, prompt, _ in store.asked] == list(FORMATS)
    refused = ask("POST", "/v1/cache/lookup?dialect=soap", body={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dialect")


def test_a_lookup_without_json_is_refused() -> None:
    assert ask("POST", "/v1/cache/lookup", body=[1]).status_code == 400


def test_every_cache_route_uses_the_callers_namespace() -> None:
    store = Store()
    key = {"authorization": "Bearer sk-1"}
    ask("GET", "/v1/cache", store, separates_keys=True, **key)
    ask("DELETE", "/v1/cache/k1", store, separates_keys=True, **key)
    ask("POST", "/v1/cache/lookup", store, separates_keys=True, body={"input": "hi"}, **key)
    own = namespace_of(Headers(key), None, "sk-1")
    assert own != ""
    assert [namespace for _, _, namespace in store.asked] == [own] * 3
    assert ask("GET", "/v1/sessions", store, separates_keys=True, **key).json()["data"] == []


def test_a_salt_opens_the_namespace_of_those_who_know_it() -> None:
    store = Store()
    ask("GET", "/v1/cache", store, x_rekindle_cache_salt="s")
    ask("POST", "/v1/cache/lookup", store, body={"input": "hi", "cache_salt": "s"})
    salted = namespace_of(Headers(), "s", None)
    assert [namespace for _, _, namespace in store.asked] == [salted] * 2


def test_sessions_are_listed_with_their_costs() -> None:
    reply = ask("GET", "/v1/sessions").json()
    TypeAdapter(SessionList).validate_python(reply, extra="forbid")
    [entry] = reply["data"]
    assert entry.pop("last_used") > 0
    assert entry == {
        "session": "ann",
        "requests": 1,
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "prefilled_tokens": 9,
        "prefilled_twice_tokens": 0,
    }


def test_the_model_that_is_named_is_asked() -> None:
    store = Store()
    ask("GET", "/v1/cache?model=a", store)
    ask("DELETE", "/v1/cache/k1?model=b", store)
    ask("POST", "/v1/cache/lookup", store, body={"input": "hi", "model": "c"})
    ask("POST", "/v1/cache/lookup", store, body={"input": "hi"})
    assert store.models == ["a", "b", "c", None]
