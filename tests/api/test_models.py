"""Which model answers, and for how long it is held; HEAD; slots."""

import asyncio
from typing import Any

import httpx
import pytest

from rekindle.errors import MAX_NAMES_SHOWN, Overloaded, UnknownModel
from rekindle.generation.request import Rank
from rekindle.generation.status import EngineStatus, SlotStatus
from tests.api.client import USER, app_on
from tests.api.fakes import CARD, HELLO, FakeResponder, FixedModels, Script, Wait
from tests.api.native.test_routes import get

CHAT = {"model": "any", "messages": [USER], "max_tokens": 5}
REPLIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Once"},
    "/v1/messages": CHAT,
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Once"},
    "/v1/messages/count_tokens": CHAT,
    "/v1/chat/completions/input_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "Once"},
    "/tokenize": {"content": "Once"},
    "/detokenize": {"tokens": [97]},
    "/apply-template": CHAT,
}


def uses_after(path: str, body: dict[str, Any], script: Script = HELLO) -> tuple[int, int]:
    """The status, and how many uses of the model are left."""

    async def run() -> tuple[int, int]:
        models = FixedModels(FakeResponder(script), CARD)
        app = app_on(models)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.post(path, json=body)
        assert models.n_leases > 0
        return reply.status_code, models.n_uses

    return asyncio.run(run())


@pytest.mark.parametrize("path", [*REPLIES, *OTHERS])
def test_a_model_is_held_no_longer_than_its_request(path: str) -> None:
    assert uses_after(path, (REPLIES | OTHERS)[path]) == (200, 0)


@pytest.mark.parametrize("path", REPLIES)
def test_a_stream_lets_go_of_its_model_at_its_end(path: str) -> None:
    assert uses_after(path, {**REPLIES[path], "stream": True}) == (200, 0)


@pytest.mark.parametrize("path", REPLIES)
def test_a_refused_request_lets_go_of_its_model(path: str) -> None:
    busy = (Overloaded("busy", retry_after_seconds=1),)
    assert uses_after(path, REPLIES[path], busy)[1] == 0


@pytest.mark.parametrize("path", REPLIES)
def test_a_stream_holds_its_model_while_it_runs(path: str) -> None:
    async def run() -> None:
        responder = FakeResponder((HELLO[0], Wait()))
        models = FixedModels(responder, CARD)
        app = app_on(models)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {**REPLIES[path], "stream": True}
            reply = asyncio.create_task(client.post(path, json=body))
            async with asyncio.timeout(10):
                while not responder.started:  # noqa: ASYNC110 - set by another task
                    await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert models.n_uses > 0
            reply.cancel()
            await asyncio.wait([reply])
            assert models.n_uses == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    ["/health", "/props", "/slots", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json"],
)
def test_head_is_answered_like_get_without_the_body(path: str) -> None:
    asked, head = get(path), get(path, "HEAD")
    assert head.status_code == asked.status_code == 200
    assert head.headers["content-type"] == asked.headers["content-type"]
    assert head.content == b""
    assert asked.content


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/hello", 404), ("/v1/messages/x", 404), ("/v1/messages", 405)],
)
def test_probes_of_what_is_not_here_get_json(method: str, path: str, status: int) -> None:
    reply = get(path, method)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    if method == "GET":
        is_anthropic = path.startswith("/v1/messages")
        assert (reply.json().get("type") == "error") == is_anthropic
        error = reply.json()["error"]
        assert error if path.startswith("/api/") else error["message"]


def test_a_base_url_with_v1_twice_is_named() -> None:
    message = get("/v1/v1/chat/completions", "GET").json()["error"]["message"]
    assert "The base URL ends with /v1; leave that out." in message


def test_slots_have_llama_servers_shape_and_what_we_know_beside_it() -> None:
    class Busy(FakeResponder):
        def status(self) -> EngineStatus:
            slots = (
                SlotStatus(
                    id=0,
                    request_id="req-1",
                    session="main",
                    rank=Rank.MAIN,
                    n_prompt=40,
                    n_rows=45,
                    n_generated=5,
                ),
                SlotStatus(
                    id=1,
                    request_id=None,
                    session="side",
                    rank=Rank.EPHEMERAL,
                    n_prompt=7,
                    n_rows=0,
                    n_generated=0,
                ),
            )
            return EngineStatus(2, 1, 0, 8, 512, 1024, 45, slots=slots)

    busy, idle = get("/slots", responder=Busy()).json()
    assert busy == {
        "id": 0,
        "n_ctx": 512,
        "is_processing": True,
        "id_task": "req-1",
        "next_token": [{"n_decoded": 5}],
        "session": "main",
        "class": "main",
        "n_prompt_tokens": 40,
        "n_rows": 45,
    }
    assert (idle["is_processing"], idle["id_task"], idle["class"]) == (False, None, "ephemeral")


def test_the_names_in_an_error_are_bounded() -> None:
    error = UnknownModel("x" * 1000, [f"m{i}" for i in range(MAX_NAMES_SHOWN + 5)])
    assert "`m19` and 5 more" in error.message
    assert len(error.message) < 500
