import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.api.client import USER, app_of, client_of
from tests.api.fakes import FakeResponder, api_settings

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"messages": [USER]}
KEYED = api_settings(api_keys=("first", "s\u00e9cond"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "first"}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "s\u00e9cond"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer first"}, 200),
    ],
)
async def test_routes_need_a_key_when_keys_are_set(headers: dict[str, str], status: int) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    async with client_of(FakeResponder(), KEYED) as client:
        reply = await client.post(CHAT, json=BODY, headers=raw)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"


async def test_only_health_and_the_page_need_no_key() -> None:
    app = app_of(FakeResponder(), KEYED)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        paths = [path for route in app.routes if (path := getattr(route, "path", ""))]
        opened = [path for path in paths if (await client.get(path)).status_code != 401]
        files = {"/dashboard/{name}", "/dashboard/chat/{name}"}
        assert set(opened) == {"/health", "/v1/health", "/", *files}
        assert (await client.get("/nothing")).status_code == 401


@pytest.mark.parametrize("declared", [True, False])
async def test_body_over_the_limit_is_a_413(declared: bool) -> None:  # noqa: FBT001
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    responder = FakeResponder()
    async with client_of(responder, api_settings(body_limit_bytes=1000)) as client:
        content = b" " * 1100 if declared else in_pieces()
        reply = await client.post(CHAT, content=content)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_cors_is_off_unless_set() -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with client_of(FakeResponder()) as client:
        assert (await client.options(CHAT, headers=headers)).status_code == 403
        reply = await client.post(CHAT, json=BODY, headers={"origin": "http://test"})
        assert reply.status_code == 200
        assert "access-control-allow-origin" not in reply.headers


async def test_cors_lets_a_browser_ask_without_a_key_and_read_the_refusal() -> None:
    settings = api_settings(cors_origins=("https://app.example",), api_keys=("k",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with client_of(FakeResponder(), settings) as client:
        assert (await client.options(CHAT, headers=headers)).status_code == 200
        refusal = await client.post(CHAT, json=BODY, headers=headers)
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == "https://app.example"
        stranger = await client.options(CHAT, headers={**headers, "origin": "https://evil.example"})
        assert stranger.status_code == 403


@pytest.mark.parametrize(
    ("sent", "returned"),
    [("trace-1.a:B_", "trace-1.a:B_"), ("a b\tc<>", "abc"), ("x" * 500, "x" * 128)],
)
async def test_request_id_comes_back_and_names_the_reply(sent: str, returned: str) -> None:
    responder = FakeResponder()
    async with client_of(responder) as client:
        reply = await client.post(CHAT, json=BODY, headers={"x-request-id": sent})
        await client.post(CHAT, json=BODY, headers={"x-request-id": sent})
    assert reply.headers["x-request-id"] == returned
    first, second = [started.request_id for started in responder.started]
    assert first.startswith(returned)
    assert first != second


async def test_request_without_an_id_gets_one_of_its_own() -> None:
    async with client_of(FakeResponder()) as client:
        ids = {(await client.get("/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/owner/other", 404, "model_not_found"),
    ],
)
async def test_what_is_not_served_is_an_error_in_openais_shape(
    method: str, path: str, status: int, code: str
) -> None:
    async with client_of(FakeResponder()) as client:
        reply = await client.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code


async def test_a_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    responder = FakeResponder((ValueError("secret"),))
    async with client_of(responder) as client:
        with caplog.at_level(logging.ERROR):
            reply = await client.post(CHAT, json=BODY)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "ValueError: secret" in caplog.text
    assert reply.headers["x-request-id"] in caplog.text
