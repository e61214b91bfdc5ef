"""Cached contents: kept under a name, continued, isolated, and gone when they expire."""

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from rekindle.api.body import SMALL_BYTES
from rekindle.api.gemini.cached import FOLDER, CachedContent, CachedContents, CachedRecord
from rekindle.api.http.caller import SALT_HEADER
from rekindle.api.http.session_header import SESSION_HEADER
from rekindle.cache.responses.store import MemoryResponses
from rekindle.chat.reply.events import ToolMode
from rekindle.generation.forgetting import UNKNOWN_OWNER, Scope, Tombstone, Tombstones
from tests.api.client import app_of, client_of
from tests.api.fakes import HELLO, FakeResponder, api_settings

BOOK = {"role": "user", "parts": [{"text": "The book."}]}
ASK = {"contents": [{"parts": [{"text": "Who?"}]}]}
CONTENTS, ONE = "/v1beta/cachedContents", "/v1beta/{}"
GENERATE, COUNT = "/v1beta/models/any:generateContent", "/v1beta/models/any:countTokens"
TOOLS = {
    "tools": [{"functionDeclarations": [{"name": "f"}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
}


def run(
    steps: Callable[[httpx.AsyncClient, FakeResponder], Awaitable[None]], **settings: Any
) -> None:
    async def all_steps() -> None:
        responder = FakeResponder(HELLO)
        async with client_of(responder, api_settings(**settings)) as client:
            await steps(client, responder)

    asyncio.run(all_steps())


async def keep(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "models/any", "contents": [BOOK], **fields}
    reply = await client.post(CONTENTS, json=body)
    assert reply.status_code == 200, reply.text
    kept: dict[str, Any] = reply.json()
    return kept


def test_a_content_is_primed_named_and_pinned() -> None:
    async def steps(client: httpx.AsyncClient, responder: FakeResponder) -> None:
        kept = await keep(client, ttl="90.5s", cacheKey="mine", stream=True)
        options = responder.started[-1].options
        assert (options.max_tokens, options.terms.name) == (0, kept["name"])
        [pin] = options.terms.pins
        assert (pin.n_tokens, pin.seconds) == (len("[user]The book."), 90.5)
        assert kept["model"] == "models/tiny"
        assert kept["usageMetadata"] == {"totalTokenCount": 10}

    run(steps)


def test_a_request_continues_a_content_with_its_tools() -> None:
    async def steps(client: httpx.AsyncClient, responder: FakeResponder) -> None:
        name = (await keep(client, **TOOLS))["name"]
        await client.post(GENERATE, json={**ASK, "cachedContent": name})
        conversation, options = responder.conversations[-1], responder.started[-1].options
        assert [message.text for message in conversation.messages] == ["The book.", "Who?"]
        assert [tool.name for tool in conversation.tools] == ["f"]
        assert options.tool_choice.mode is ToolMode.REQUIRED
        [pin] = options.terms.pins
        assert pin.n_tokens == len("[user]The book.")
        counted = await client.post(COUNT, json={**ASK, "cached_content": name})
        assert counted.json() == {"totalTokens": len("[user]The book.[user]Who?")}

    run(steps)


def test_a_content_without_contents_is_the_head_of_prompts() -> None:
    async def steps(client: httpx.AsyncClient, responder: FakeResponder) -> None:
        head = {"systemInstruction": {"parts": [{"text": "Be brief."}]}}
        name = (await keep(client, contents=[], **head))["name"]
        await client.post(GENERATE, json={**ASK, "cachedContent": name})
        texts = [message.text for message in responder.conversations[-1].messages]
        assert texts == ["Be brief.", "Who?"]

    run(steps)


@pytest.mark.parametrize("fields", [TOOLS, {"systemInstruction": {"parts": []}}])
def test_a_request_cannot_change_the_head_of_a_content(fields: dict[str, Any]) -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        name = (await keep(client))["name"]
        reply = await client.post(GENERATE, json={**ASK, "cachedContent": name, **fields})
        assert reply.status_code == 400
        assert "leave them out" in reply.json()["error"]["message"]

    run(steps)


def test_an_expired_content_is_gone_and_its_life_can_be_extended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        short = (await keep(client, ttl="10s"))["name"]
        longer = (await keep(client, ttl="10s"))["name"]
        await client.patch(ONE.format(longer), json={"ttl": "100s"})
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 50)
        for name, status in ((short, 404), (longer, 200)):
            assert (await client.get(ONE.format(name))).status_code == status
            reply = await client.post(GENERATE, json={**ASK, "cachedContent": name})
            assert reply.status_code == status

    run(steps)


def test_a_deleted_content_is_gone() -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        name = (await keep(client, displayName="b"))["name"]
        assert (await client.get(ONE.format(name))).json()["displayName"] == "b"
        assert (await client.delete(ONE.format(name))).json() == {}
        for method in ("GET", "DELETE"):
            assert (await client.request(method, ONE.format(name))).status_code == 404

    run(steps)


def test_a_content_of_another_key_is_not_found() -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        client.headers["x-goog-api-key"] = "ann"
        name = (await keep(client))["name"]
        client.headers["x-goog-api-key"] = "bob"
        assert (await client.get(ONE.format(name))).status_code == 404
        reply = await client.post(GENERATE, json={**ASK, "cachedContent": name})
        assert reply.json()["error"]["status"] == "NOT_FOUND"

    run(steps, api_keys=("ann", "bob"), separates_keys=True)


def test_a_content_is_no_response_and_a_response_no_content() -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        name = (await keep(client))["name"]
        body = {"input": "hi", "previous_response_id": name}
        assert (await client.post("/v1/responses", json=body)).status_code == 404
        response = (await client.post("/v1/responses", json={"input": "hi"})).json()["id"]
        for wrong in (response, f"cachedContents/{response}", "cachedContents/../x", "x"):
            reply = await client.post(GENERATE, json={**ASK, "cachedContent": wrong})
            assert reply.status_code == 404

    run(steps)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttl": "0s"}, "`ttl` should be at most"),
        ({"ttl": "9999999s"}, "`ttl` should be at most"),
        ({"ttl": "5m"}, "`ttl`"),
        ({"expireTime": "2001-01-01T00:00:00Z"}, "`expireTime` should be at most"),
        ({"expire_time": "tomorrow"}, "`expireTime` should be a time"),
        ({"contents": []}, "`contents` is required"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], words: str) -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        reply = await client.post(CONTENTS, json={"contents": [BOOK], **fields})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]

    run(steps)


def test_a_large_content_is_serialised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    dump = BaseModel.model_dump_json

    def noted(model: BaseModel, **options: Any) -> str:
        text = dump(model, **options)
        if len(text) > SMALL_BYTES:
            threads.append(threading.current_thread())
        return text

    async def steps(client: httpx.AsyncClient, responder: FakeResponder) -> None:
        text = "x" * 2 * SMALL_BYTES
        name = (await keep(client, contents=[{"parts": [{"text": text}]}]))["name"]
        await client.patch(ONE.format(name), json={"ttl": "100s"})
        await client.post(GENERATE, json={**ASK, "cachedContent": name})
        assert responder.conversations[-1].messages[0].text == text

    monkeypatch.setattr(BaseModel, "model_dump_json", noted)
    run(steps)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_salt_in_the_body_is_the_salt_in_the_header() -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        name = (await keep(client, cacheSalt="s"))["name"]
        one, asked, header = ONE.format(name), {**ASK, "cachedContent": name}, {SALT_HEADER: "s"}
        bodies = {GENERATE: asked, COUNT: asked, one: {"ttl": "9s"}}
        for path, body in bodies.items():
            method = "PATCH" if path == one else "POST"
            plain = await client.request(method, path, json=body)
            salted = await client.request(method, path, json={**body, "cacheSalt": "s"})
            headed = await client.request(method, path, json=body, headers=header)
            found = [each.status_code for each in (plain, salted, headed)]
            assert found == [404, 200, 200], path
        wrapped = {"generateContentRequest": {**asked, "cacheSalt": "s"}}
        assert (await client.post(COUNT, json=wrapped)).status_code == 200
        assert (await client.get(CONTENTS)).json() == {"cachedContents": []}
        [listed] = (await client.get(CONTENTS, headers=header)).json()["cachedContents"]
        assert listed["name"] == name
        assert (await client.delete(one)).status_code == 404
        assert (await client.delete(one, headers=header)).status_code == 200

    run(steps)


def test_contents_are_listed_by_pages_without_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        client.headers["x-goog-api-key"] = "bob"
        await keep(client)
        client.headers["x-goog-api-key"] = "ann"
        names = sorted([(await keep(client))["name"] for _ in range(5)])
        await client.post("/v1/responses", json={"input": "hi"})
        short = [(await keep(client, ttl="1s"))["name"] for _ in range(3)]
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 2)
        whole = (await client.get(CONTENTS)).json()
        assert [each["name"] for each in whole["cachedContents"]] == names
        assert "nextPageToken" not in whole
        pages: list[list[str]] = []
        token = ""
        while len(pages) < 9:
            page = (await client.get(f"{CONTENTS}?pageSize=2&pageToken={token}")).json()
            pages.append([each["name"] for each in page["cachedContents"]])
            if not (token := page.get("nextPageToken", "")):
                break
        assert pages == [names[:2], names[2:4], names[4:]]
        assert (await client.get(ONE.format(short[0]))).status_code == 404

    run(steps, api_keys=("ann", "bob"), separates_keys=True)


def test_a_page_holds_one_prompt_at_a_time() -> None:
    n_contents, n_bytes = 20, 2**20
    contents = CachedContents(MemoryResponses(Tombstones()), "")
    record = CachedRecord(
        model="any", created_at=0.0, updated_at=time.time(), expires_at=time.time() + 60, n_tokens=1
    )
    for number in range(n_contents):
        content = CachedContent(record, b"x" * n_bytes, UNKNOWN_OWNER)
        contents.keep(f"{FOLDER}/{number:032x}", content)
    tracemalloc.start()
    try:
        listed = contents.page("", n_contents)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(listed["cachedContents"]) == n_contents
    assert peak < 4 * n_bytes


@pytest.mark.parametrize("query", ["pageSize=0", "pageSize=1001", "pageSize=x", "pageToken=../x"])
def test_a_page_that_cannot_be_is_refused(query: str) -> None:
    async def steps(client: httpx.AsyncClient, _: FakeResponder) -> None:
        reply = await client.get(f"{CONTENTS}?{query}")
        assert reply.status_code == 400
        assert query.partition("=")[0] in reply.json()["error"]["message"]

    run(steps)


def test_a_longer_life_leaves_a_content_to_the_session_that_made_it() -> None:
    """A deletion of that session must find it."""
    store = MemoryResponses(Tombstones())

    async def steps() -> None:
        app = app_of(FakeResponder(HELLO), stored_responses=store)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            made = await client.post(
                CONTENTS, json={"contents": [BOOK]}, headers={SESSION_HEADER: "ann"}
            )
            await client.patch(ONE.format(made.json()["name"]), json={"ttl": "100s"})

    asyncio.run(steps())
    scope = Scope(namespace="", session="ann")
    assert store.forget(Tombstone(scope=scope, at=time.time() + 1)) == 1
