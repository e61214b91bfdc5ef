"""Which hosts, origins and content types pass; the browser's side is in tests/server."""

import json
import re
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from rekindle.api.admission.hosts import server_names
from tests.api.client import USER, app_of, client_of
from tests.api.fakes import FakeResponder, api_settings

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"messages": [USER]}
HOME = {"host": "localhost:8080"}
NAMED = api_settings(server_names=("box", "LLM.Example.org.", ".team.example", "*.lab.example"))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "127.0.0.1",
        "192.168.1.20:80",
        "[::1]:8080",
        "[::1]",
        "[fe80::1%25eth0]:8080",
        "localhost",
        "LOCALHOST:8080",
        "localhost.:8080",
        "app.localhost:8080",
        "host.docker.internal:8080",
        "host.containers.internal",
        "box:1234",
        "llm.example.org",
        "LLM.example.ORG.:443",
        "team.example",
        "a.b.team.example:8080",
        "gpu.lab.example",
        "",
    ],
)
async def test_names_of_the_server_are_served(host: str) -> None:
    async with client_of(FakeResponder(), NAMED) as client:
        reply = await client.get("/v1/models", headers={"host": host})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "evil.example.",
        "box.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80@evil.example",
        "127.1",
        "evil.example#localhost",
        "evillocalhost",
        "localhost.evil.example",
        "notteam.example",
        "evil.docker.internal",
        "evil.host.docker.internal",
        "[::1",
        "[::1]evil.example",
        "[evil.example]:80",
        ":8080",
        "localhost, evil.example",
        "127.0.0.1:" + "8" * 5000,
    ],
)
async def test_other_names_are_refused_with_the_flag_that_allows_them(host: str) -> None:
    async with client_of(FakeResponder(), NAMED) as client:
        reply = await client.get("/v1/models", headers={"host": host})
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in reply.json()["error"]["message"]
        assert (await client.get("/health", headers={"host": host})).status_code == 200
        messages = await client.post("/v1/messages", json=BODY, headers={"host": host})
        assert messages.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("name", ["", "."])
async def test_an_empty_name_allows_no_host(name: str) -> None:
    async with client_of(FakeResponder(), api_settings(server_names=(name,))) as client:
        for host in ("evil.example", "evil.example.."):
            reply = await client.get("/v1/models", headers={"host": host})
            assert reply.status_code == 403


async def test_a_star_allows_every_host() -> None:
    async with client_of(FakeResponder(), api_settings(server_names=("*",))) as client:
        reply = await client.get("/v1/models", headers={"host": "evil.example"})
    assert reply.status_code == 200


async def test_two_hosts_are_refused() -> None:
    app = app_of(FakeResponder(), NAMED)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        twice = [("host", "localhost"), ("host", "evil.example")]
        reply = await client.get("http://localhost/v1/models", headers=twice)
    assert reply.status_code == 400


def test_the_machines_own_name_is_allowed_where_other_machines_can_connect() -> None:
    machine = socket.gethostname()
    assert server_names("127.0.0.1", ()) == ()
    assert server_names("::1", ("a",)) == ("a",)
    assert server_names("localhost", ()) == ("localhost",)
    assert server_names("0.0.0.0", ()) == (machine, f"{machine}.local")
    assert server_names("box.lan", ()) == ("box.lan", machine, f"{machine}.local")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-mode": "cors"},  # Node's fetch
        {"origin": "http://localhost:8080"},
        {"origin": "http://localhost:8080", "sec-fetch-site": "same-origin"},
        {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},  # it changed `Host`
        {"origin": "chrome-extension://abc", "sec-fetch-site": "none"},  # may use this host
        {"origin": "vscode-webview://0a1b", "sec-fetch-site": "cross-site"},
        {"origin": "app://obsidian.md"},
        {"origin": "tauri://localhost"},
        {"origin": "http://tauri.localhost", "sec-fetch-site": "cross-site"},  # on Windows
        {"origin": "https://tauri.localhost"},
        {"origin": "capacitor://localhost"},
        {"origin": "https://app.example", "sec-fetch-site": "cross-site"},
        {"origin": "file://"},
        {"origin": "moz-extension://1-2-3"},
    ],
)
async def test_own_pages_programs_and_allowed_origins_may_post(headers: dict[str, str]) -> None:
    settings = api_settings(cors_origins=("https://app.example/", "moz-extension://*", "file://"))
    async with client_of(FakeResponder(), settings) as client:
        reply = await client.post(CHAT, json=BODY, headers={**HOME, **headers})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("https://localhost:3000", 200),
        ("http://127.0.0.1:3000", 200),
        ("http://[::1]:3000", 200),
        ("http://localhost.evil.example", 403),
        ("http://notlocalhost", 403),
        ("http://127.0.0.10", 403),
        ("http://localhost:80.evil.example", 403),
    ],
)
async def test_localhost_stands_for_every_page_of_this_machine(origin: str, status: int) -> None:
    async with client_of(FakeResponder(), api_settings(cors_origins=("localhost",))) as client:
        reply = await client.post(
            CHAT, json=BODY, headers={**HOME, "origin": origin, "sec-fetch-site": "same-site"}
        )
    assert reply.status_code == status
    assert reply.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.mark.parametrize("method", ["POST", "DELETE", "GET", "OPTIONS"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "http://localhost"},
        {"origin": "http://tauri.localhost:3000"},
        {"origin": "http://evil.tauri.localhost"},
        {"origin": "http://localhost.evil.example:8080"},
        {"origin": "null"},
        {"origin": "file://"},
        {"origin": "chrome-extension://abc"},
        {"origin": "app.evil.example"},
        {"origin": "http://localhost:notaport"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"sec-fetch-site": "cross-site", "origin": "http://localhost:8080"},
    ],
)
async def test_foreign_pages_may_do_nothing(method: str, headers: dict[str, str]) -> None:
    settings = api_settings(cors_origins=("https://app.example",))
    async with client_of(FakeResponder(), settings) as client:
        reply = await client.request(method, "/v1/cache", headers={**HOME, **headers})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert "--cors" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers


async def test_a_port_of_thousands_of_digits_is_refused_beside_an_origin() -> None:
    headers = {"host": "127.0.0.1:" + "8" * 5000, "origin": "http://127.0.0.1"}
    async with client_of(FakeResponder()) as client:
        reply = await client.get("/health", headers=headers)  # served under every name
    assert reply.status_code == 403


async def test_the_flag_that_a_refusal_names_allows_the_origin() -> None:
    for origin in ("https://evil.example", "file://"):
        headers = {**HOME, "origin": origin}
        async with client_of(FakeResponder()) as client:
            reply = await client.post(CHAT, json=BODY, headers=headers)
            flag = re.search(r"`--cors (.+)`", reply.json()["error"]["message"])
        assert flag is not None
        async with client_of(FakeResponder(), api_settings(cors_origins=(flag[1],))) as client:
            assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 200


async def test_a_page_behind_a_proxy_that_passes_on_its_name_is_the_servers_own() -> None:
    settings = api_settings(server_names=("nas.lan",))
    async with client_of(FakeResponder(), settings) as client:
        for origin in ("http://nas.lan", "https://nas.lan"):
            own = {"host": "nas.lan", "origin": origin}
            assert (await client.post(CHAT, json=BODY, headers=own)).status_code == 200
            renamed = {"host": "127.0.0.1:8080", "origin": origin}
            assert (await client.post(CHAT, json=BODY, headers=renamed)).status_code == 403


async def test_a_link_on_a_foreign_page_opens_the_dashboard() -> None:
    visit = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    async with client_of(FakeResponder()) as client:
        assert (await client.get("/", headers={**HOME, **visit})).status_code == 200
        assert (await client.post(CHAT, headers={**HOME, **visit})).status_code == 403


async def test_every_origin_of_a_request_counts() -> None:
    origins = [("host", HOME["host"]), ("origin", "http://localhost:8080")]
    async with client_of(FakeResponder()) as client:
        reply = await client.post(CHAT, json=BODY, headers=origins)
        assert reply.status_code == 200, reply.text
        reply = await client.post(
            CHAT, json=BODY, headers=[*origins, ("origin", "http://evil.example")]
        )
        assert reply.status_code == 403


async def test_a_body_in_chunks_is_json_too() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield json.dumps(BODY).encode()

    async with client_of(FakeResponder()) as client:
        for kind, status in (("application/json", 200), ("text/plain", 415)):
            reply = await client.post(CHAT, content=chunks(), headers={"content-type": kind})
            assert reply.status_code == status, reply.text


@pytest.mark.parametrize(
    ("kind", "status", "browser_status"),
    [
        ("application/json", 200, 200),
        ("Application/JSON; charset=utf-8", 200, 200),
        ("application/vnd.api+json", 200, 200),
        ("application/x-www-form-urlencoded", 200, 415),  # curl -d
        (None, 200, 415),
        ("text/plain", 415, 415),
        ("text/plain;charset=UTF-8", 415, 415),
        ("multipart/form-data; boundary=a", 415, 415),
        ("text/json+json", 415, 415),
        ("application/jsonp", 415, 415),
    ],
)
async def test_a_body_is_json(kind: str | None, status: int, browser_status: int) -> None:
    headers = {"content-type": kind} if kind else {}
    content = httpx.Request("POST", "http://test", json=BODY).content
    async with client_of(FakeResponder()) as client:
        reply = await client.post(CHAT, content=content, headers=headers)
        assert reply.status_code == status, reply.text
        reply = await client.post(
            CHAT, content=content, headers={**headers, "sec-fetch-site": "same-origin"}
        )
        assert reply.status_code == browser_status, reply.text
    if browser_status == 415:
        assert reply.json()["error"]["code"] == "unsupported_media_type"
        assert "application/json" in reply.json()["error"]["message"]


async def test_a_page_that_cors_allows_can_read_why_its_body_is_refused() -> None:
    settings = api_settings(cors_origins=("https://app.example",))
    headers = {"origin": "https://app.example", "content-type": "text/plain"}
    async with client_of(FakeResponder(), settings) as client:
        reply = await client.post(CHAT, content=b"{}", headers=headers)
    assert reply.status_code == 415
    assert reply.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/transcriptions"])
async def test_an_upload_to_a_route_that_does_not_exist_is_a_404(path: str) -> None:
    async with client_of(FakeResponder()) as client:
        reply = await client.post(path, files={"file": b"text"})
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "not_found"


async def test_the_key_is_checked_before_the_content_type() -> None:
    headers = {"content-type": "text/plain"}
    async with client_of(FakeResponder(), api_settings(api_keys=("k",))) as client:
        assert (await client.post(CHAT, content=b"{}", headers=headers)).status_code == 401
        headers["x-api-key"] = "k"
        assert (await client.post(CHAT, content=b"{}", headers=headers)).status_code == 415


async def test_an_empty_post_needs_no_content_type() -> None:
    async with client_of(FakeResponder()) as client:
        reply = await client.post("/v1/models/test/unload", headers={"content-type": "text/plain"})
    assert reply.status_code != 415
