"""The page and its feed on fakes: what is sent to whom, how often the engine is asked."""

import asyncio
import json
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rekindle.api.dashboard.bodies import Hour, RequestSeen, Snapshot
from rekindle.api.dashboard.feed import MAX_BEHIND, Feed, FeedReader
from rekindle.api.dashboard.history import MAX_NAMESPACES, MAX_REQUESTS, N_BUCKETS, HourHistory
from rekindle.api.dashboard.routes import MEDIA_TYPES, FeedStream
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import Rank
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    SlotPhase,
    SlotStatus,
    TierCounters,
    TierStatus,
)
from rekindle.observe.request_record import Miss, MissReason, RequestRecord
from tests.api.client import app_on, client_of
from tests.api.fakes import CARD, FakeResponder, FixedModels, api_settings
from tests.support.records import RECORD

pytestmark = pytest.mark.anyio

KEYED = api_settings(api_keys=("secret",))
LIVE, DISK, SHARED = CacheSource.LIVE, CacheSource.DISK, CacheSource.SHARED
DONE = replace(
    RECORD,
    namespace="",
    n_prompt=100,
    is_evaluated=True,
    spans=Spans([CachedSpan(LIVE, 0, 60), CachedSpan(DISK, 60, 70)]),
    n_recomputed=4,
    drafts=DraftCounts(reply=DraftCount(8, 5), context=DraftCount(2, 1)),
    first_token_seconds=0.25,
    miss=None,
    prompt_text="the whole prompt",
)
CHANGED = Miss(reason=MissReason.TEXT_CHANGED, before="a", expected="<b>", got="<i>", tokens_lost=9)
STATUS = EngineStatus(
    n_slots=1,
    n_running=1,
    n_waiting=2,
    max_waiting=64,
    n_ctx=512,
    n_cells=2048,
    n_cells_used=7,
    slots=(
        SlotStatus(
            id=0,
            request_id="r1",
            session="ann",
            rank=Rank.BACKGROUND,
            n_prompt=100,
            n_rows=80,
            n_generated=0,
            phase=SlotPhase.PREFILLING,
            n_cached=70,
        ),
    ),
    cache=CacheStatus(
        model_class="dense",
        off_because=None,
        tiers=(TierStatus(name=DISK, n_entries=3, n_bytes=5, budget_bytes=7, trouble="full"),),
        counters=CacheCounters(
            live=TierCounters(tokens=1), disk=TierCounters(writes_failed=3), prefilled_tokens=2
        ),
    ),
)


class Models(FixedModels):
    """Counts how often its engine is looked at."""

    def __init__(self, status: EngineStatus = STATUS) -> None:
        super().__init__(FakeResponder(), CARD)
        self.n_looks = 0
        self._status = status

    def status(self, name: str | None) -> EngineStatus:
        self.n_looks += 1
        return self._status


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def joined(feed: Feed, namespace: str | None = "") -> Iterator[FeedReader]:
    reader = feed.join(namespace)
    try:
        yield reader
    finally:
        feed.leave(reader)


async def events(reader: FeedReader, n: int) -> list[tuple[str, Any]]:
    frames = reader.frames()
    return [_parsed(await anext(frames)) for _ in range(n)]


def _parsed(frame: bytes) -> tuple[str, Any]:
    found = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", frame.decode())
    assert found is not None
    return found[1], json.loads(found[2])


async def test_a_reader_gets_the_hour_first_then_a_snapshot_then_each_request() -> None:
    history = HourHistory(Tombstones())
    feed = Feed(Models(), history)
    history.observe(DONE)
    with joined(feed) as reader:
        (first, hour), (second, snapshot) = await events(reader, 2)
        history.observe(replace(DONE, miss=CHANGED))
        [(third, request)] = await events(reader, 1)
    assert (first, second, third) == ("hour", "snapshot", "request")
    TypeAdapter(Hour).validate_python(hour, extra="forbid")
    TypeAdapter(Snapshot).validate_python(snapshot, extra="forbid")
    TypeAdapter(RequestSeen).validate_python(request, extra="forbid")
    [bucket] = hour["buckets"]
    del bucket["start"]
    assert bucket == {
        "requests": 1,
        "live": 60,
        "memory": 0,
        "disk": 10,
        "shared": 0,
        "upstream": 0,
        "prefilled": 30,
        "twice": 4,
        "drafted": 10,
        "accepted": 6,
        "first_token_ms": {"p50": 250.0, "p95": 250.0},
    }
    assert request["cached"] == [{"tier": "live", "tokens": 60}, {"tier": "disk", "tokens": 10}]
    assert request["miss"]["expected"] == "<b>"
    assert (request["drafted"], request["accepted"]) == (10, 6)


async def test_a_snapshot_has_slots_tiers_and_errors() -> None:
    with joined(Feed(Models(), HourHistory(Tombstones()))) as reader:
        _, (_, snapshot) = await events(reader, 2)
    [model] = snapshot["models"]
    assert model["waiting"] == 2
    assert model["slots"] == [
        {
            "id": 0,
            "request_id": "r1",
            "session": "ann",
            "class": "background",
            "phase": "prefilling",
            "n_prompt": 100,
            "n_rows": 80,
            "n_cached": 70,
            "n_generated": 0,
        }
    ]
    assert model["cache"]["tiers"][0]["trouble"] == "full"
    tokens = {"live": 1, "memory": 0, "disk": 0, "shared": 0, "upstream": 0, "prefilled": 2}
    assert model["cache"]["tokens"] == tokens
    assert model["cache"]["disk"]["writes_failed"] == 3
    assert model["cache"]["shared"] is None


async def test_a_snapshot_tells_of_the_shared_store_and_of_what_an_upstream_had() -> None:
    assert STATUS.cache is not None
    tier = TierStatus(
        name=SHARED,
        n_entries=3,
        n_bytes=0,
        budget_bytes=0,
        trouble="connection refused",
        directory="redis://store:6379/0",
    )
    counters = CacheCounters(
        shared=TierCounters(tokens=4, lookups=6), upstream=TierCounters(tokens=5)
    )
    status = replace(STATUS, cache=replace(STATUS.cache, tiers=(tier,), counters=counters))
    history = HourHistory(Tombstones())
    spans = Spans([CachedSpan(SHARED, 0, 60), CachedSpan(CacheSource.UPSTREAM, 60, 64)])
    history.observe(replace(DONE, spans=spans))
    with joined(Feed(Models(status), history)) as reader:
        (_, hour), (_, snapshot) = await events(reader, 2)
    TypeAdapter(Hour).validate_python(hour, extra="forbid")
    TypeAdapter(Snapshot).validate_python(snapshot, extra="forbid")
    cache = snapshot["models"][0]["cache"]
    assert cache["tiers"] == [
        {
            "name": "shared",
            "entries": 3,
            "bytes": 0,
            "budget_bytes": 0,
            "trouble": "connection refused",
            "directory": "redis://store:6379/0",
        }
    ]
    assert (cache["tokens"]["shared"], cache["tokens"]["upstream"]) == (4, 5)
    assert cache["shared"]["probes"] == 6
    [bucket] = hour["buckets"]
    assert (bucket["shared"], bucket["upstream"]) == (60, 4)
    [request] = hour["requests"]
    assert [each["tier"] for each in request["cached"]] == ["shared", "upstream"]


async def test_events_never_contain_the_text_of_a_prompt() -> None:
    history = HourHistory(Tombstones())
    with joined(Feed(Models(), history)) as reader:
        history.observe(DONE)
        told = await events(reader, 2)
    with joined(Feed(Models(), history)) as reader:
        told += await events(reader, 1)
    assert DONE.prompt_text not in json.dumps(told)


async def test_requests_of_another_namespace_are_not_sent() -> None:
    history = HourHistory(Tombstones())
    feed = Feed(Models(), history, sample_seconds=3600)
    history.observe(replace(DONE, namespace="other", id="theirs"))
    with joined(feed) as ours, joined(feed, "other") as theirs:
        history.observe(replace(DONE, namespace="other", id="theirs too"))
        history.observe(replace(DONE, id="ours"))
        (_, hour), *later = await events(ours, 3)
        assert hour["requests"] == []
        assert [body["id"] for name, body in later if name == "request"] == ["ours"]
        (_, hour), *later = await events(theirs, 3)
        assert [each["id"] for each in hour["requests"]] == ["theirs"]
        assert [body["id"] for name, body in later if name == "request"] == ["theirs too"]


async def test_one_sample_serves_all_readers_and_none_is_taken_without_readers() -> None:
    models = Models()
    feed = Feed(models, HourHistory(Tombstones()), sample_seconds=3600)
    before = asyncio.all_tasks()
    with joined(feed) as one, joined(feed) as other:
        await asyncio.gather(events(one, 2), events(other, 2))
        with joined(feed) as late:  # sees what was seen last
            await events(late, 2)
        assert models.n_looks == 1
    with joined(feed) as reader:  # too soon for another look
        await events(reader, 1)
        await asyncio.sleep(0)
    assert models.n_looks == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_slow_reader_is_disconnected_and_delays_no_other() -> None:
    history = HourHistory(Tombstones())
    feed = Feed(Models(), history, sample_seconds=3600)
    is_stuck = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            is_stuck.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    stream = asyncio.create_task(FeedStream(feed, "")({}, receive, send))
    await is_stuck.wait()
    with joined(feed) as reader:
        for _ in range(MAX_BEHIND + 1):
            history.observe(DONE)
            await events(reader, 1)
        await asyncio.wait_for(stream, 5)


async def test_the_end_of_the_server_ends_the_feed() -> None:
    feed = Feed(Models(), HourHistory(Tombstones()), sample_seconds=3600)
    with joined(feed) as reader:
        await events(reader, 2)
        feed.close()
        assert [frame async for frame in reader.frames()] == []
    with joined(feed) as late:
        assert len([frame async for frame in late.frames()]) == 1


async def test_a_snapshot_shows_slots_and_sizes_of_one_namespace_only() -> None:
    history = HourHistory(Tombstones())
    feed = Feed(Models(), history, sample_seconds=3600)  # the slot is of the common namespace
    history.observe(replace(DONE, namespace="other"))
    with joined(feed) as ours, joined(feed, "other") as theirs, joined(feed, None) as everybody:
        (_, hour), (_, now) = await events(ours, 2)
        assert (hour["buckets"], now["buckets"]) == ([], [])
        assert now["models"][0]["slots"][0]["session"] == "ann"
        (_, hour), (_, now) = await events(theirs, 2)
        assert [each["requests"] for each in hour["buckets"]] == [1]
        [slot] = now["models"][0]["slots"]
        assert (slot["request_id"], slot["session"], slot["n_prompt"]) == ("", "", 0)
        assert slot["phase"] == "prefilling"
        (_, hour), (_, now) = await events(everybody, 2)
        assert [each["requests"] for each in hour["buckets"]] == [1]
        assert now["models"][0]["slots"][0]["session"] == "ann"


def test_only_so_many_namespaces_have_an_hour_of_their_own() -> None:
    history = HourHistory(Tombstones(), clock=Clock())
    for number in range(2 * MAX_NAMESPACES):
        history.observe(replace(DONE, namespace=str(number)))
    assert history.buckets("0") == []
    assert [each["requests"] for each in history.buckets(None)] == [2 * MAX_NAMESPACES]
    assert len(history.buckets(str(2 * MAX_NAMESPACES - 1))) == 1


def test_the_hour_forgets_what_is_older_and_never_grows() -> None:
    clock = Clock()
    history = HourHistory(Tombstones(), clock=clock)
    history.observe(DONE)
    for _ in range(2 * N_BUCKETS):
        clock.now += 10
        history.observe(DONE)
    assert len(history.buckets(None)) == N_BUCKETS
    assert len(history.requests("")) == MAX_REQUESTS
    clock.now += 3600
    assert history.buckets(None) == []
    assert history.first_token_ms(None) == {"p50": None, "p95": None}


def test_requests_within_ten_seconds_are_one_bucket_with_its_percentiles() -> None:
    clock = Clock()
    history = HourHistory(Tombstones(), clock=clock)
    for n in range(1, 21):
        history.observe(replace(DONE, first_token_seconds=n / 1000))
    clock.now += 10
    history.observe(_without_first_token())
    first, second = history.last_buckets(None)
    assert (first["start"], first["requests"]) == (10_000, 20)
    assert first["first_token_ms"] == {"p50": 10.0, "p95": 19.0}
    assert second["first_token_ms"] == {"p50": None, "p95": None}


def _without_first_token() -> RequestRecord:
    return replace(DONE, first_token_seconds=None, is_evaluated=False)


async def test_the_page_needs_no_key_and_allows_nothing_but_its_own_files() -> None:
    async with client_of(FakeResponder(), KEYED) as client:
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in page.headers["content-security-policy"]
        for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/dashboard/none.js")).status_code == 404
        assert (await client.get("/dashboard/chat/app.js")).status_code == 404
        assert (await client.get("/dashboard/..%2Frequest_record.py")).status_code == 404
        assert (await client.get("/v1/events")).status_code == 401


async def test_every_file_is_served_and_imports_only_served_ones() -> None:
    async with client_of(FakeResponder()) as client:
        for name in MEDIA_TYPES.keys() - {"index.html"}:
            file = await client.get(f"/dashboard/{name}")
            assert file.headers["content-type"].startswith(MEDIA_TYPES[name])
            for other in re.findall(r'from "(\.[^"]+)"', file.text):
                imported = posixpath.normpath(posixpath.join(posixpath.dirname(name), other))
                assert imported in MEDIA_TYPES
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", file.text)


async def test_the_feed_comes_over_http_and_ends_with_the_reader() -> None:
    models, history = Models(), HourHistory(Tombstones())
    feed = Feed(models, history)
    app = app_on(models, feed=feed)
    sent: asyncio.Queue[Any] = asyncio.Queue()
    gone = asyncio.Event()
    before = asyncio.all_tasks()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = scope_of("/v1/events")
    serving = asyncio.create_task(app(scope, receive, sent.put))
    head = await sent.get()
    assert (head["status"], dict(head["headers"])[b"content-type"]) == (
        200,
        b"text/event-stream; charset=utf-8",
    )
    assert _parsed((await sent.get())["body"])[0] == "hour"
    assert _parsed((await sent.get())["body"])[0] == "snapshot"
    gone.set()
    await serving
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
        "http_version": "1.1",
    }
