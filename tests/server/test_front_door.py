"""Pages of others and a real browser: DNS rebinding and cross-site requests reach nothing."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from tests.conftest import TinyModels
from tests.support.needs import program
from tests.support.raw_http import exchange, request_of
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000  # a machine under load; nothing is measured here
SECRET = "the secret plan of the shop "
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

N_ATTACKS = 15
# Each promise settles when the browser is done with its request, whatever came of it.
ATTACKS = """async ([url, key, model]) => {
  const chat = JSON.stringify({messages: [{role: "user", content: "hi"}], max_tokens: 1});
  const post = (path, body, type) => fetch(url + path, {
    method: "POST", mode: "no-cors", body, headers: type ? {"content-type": type} : {},
  }).catch(() => null);
  const loaded = (element, parent = document.body) => new Promise((done) => {
    element.onload = element.onerror = () => done();
    setTimeout(done, 30000);
    parent.append(element);
  });
  const element = (name, properties) => Object.assign(document.createElement(name), properties);
  await post("/v1/chat/completions", chat, "text/plain");
  await post("/v1/chat/completions", chat, "application/x-www-form-urlencoded");
  await post("/v1/chat/completions", new Blob([chat]));
  await post(`/v1/cache/${key}/pin`, '{"seconds": 3600}', "text/plain");
  await post(`/v1/models/${model}/unload`);
  navigator.sendBeacon(url + "/v1/chat/completions", chat);
  for (const method of ["DELETE", "PUT"]) {
    await fetch(url + "/v1/cache", {method}).catch(() => null);
  }
  await fetch(url + "/v1/chat/completions", {
    method: "POST", body: chat, headers: {"content-type": "application/json"},
  }).catch(() => null);
  await fetch(url + `/v1/cache/${key}/text`, {mode: "no-cors"}).catch(() => null);
  await loaded(element("img", {src: url + "/v1/cache"}));
  await loaded(element("script", {src: url + "/v1/cache"}));
  await loaded(element("iframe", {src: url + "/"}));
  const frame = element("iframe", {name: "sink"});
  document.body.append(frame);
  const form = element("form", {
    method: "POST", action: url + `/v1/models/${model}/unload`, target: "sink",
    enctype: "text/plain",
  });
  form.append(element("input", {name: '{"a": "', value: '"}'}));
  document.body.append(form);
  const sent = new Promise((done) => { frame.onload = done; setTimeout(done, 30000); });
  form.submit();
  await sent;
  const events = new EventSource(url + "/v1/events");
  await new Promise((done) => { events.onopen = events.onerror = done; });
  events.close();
}"""


class EmptyPages:
    """Another web server: every path is an empty page."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(b"<!doctype html><title>page</title><body></body>")

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_port

    @contextmanager
    def running(self) -> Iterator["EmptyPages"]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


@pytest.fixture(scope="module")
def pages() -> Iterator[EmptyPages]:
    with EmptyPages().running() as pages:
        yield pages


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, pages: EmptyPages) -> Iterator[ServerProcess]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    flags = ("--allowed-hosts", "llm.example", "--cors", f"http://friend.example:{pages.port}")
    with serve(model, "--ctx-size", "4096", *flags) as server:
        body = {"messages": [{"role": "user", "content": SECRET * 40}], "max_tokens": 1}
        url = f"{server.url}/v1/chat/completions"
        httpx.post(url, json=body, timeout=60).raise_for_status()
        server.wait_for_metric("rekindle_cache_writes_total")
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = program(*BROWSERS)
    expect.set_options(timeout=WAIT_MS)
    rules = "--host-resolver-rules=MAP *.example 127.0.0.1"
    with sync_playwright() as playwright:
        # Without a sandbox, as the tests may run as root in a container.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", rules])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


def port_of(server: ServerProcess) -> int:
    port = httpx.URL(server.url).port
    assert port is not None
    return port


def state_of(server: ServerProcess) -> dict[str, Any]:
    """What a foreign page must not change."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        branches = client.get("/v1/cache/forest").json()["data"]
        [model] = client.get("/v1/models").json()["data"]
        metrics = client.get("/metrics").text.splitlines()
    [tokens] = [line for line in metrics if line.startswith("rekindle_generated_tokens_total ")]
    pins = [branch["pinned_until"] for branch in branches]
    return {"pins": pins, "model": model["status"], "id": model["id"], "tokens": tokens}


def n_refused(server: ServerProcess) -> int:
    metrics = httpx.get(f"{server.url}/metrics").text
    counts = re.findall(r'^rekindle_http_requests_total\{.*status="403"\} (\S+)$', metrics, re.M)
    return int(sum(map(float, counts)))


def key_of(server: ServerProcess) -> str:
    key: str = httpx.get(f"{server.url}/v1/cache/forest").json()["data"][0]["key"]
    return key


@pytest.mark.parametrize(
    "request_line",
    [
        "{} {} HTTP/1.1\r\nhost: evil.example",
        "{} http://evil.example{} HTTP/1.1\r\nhost: localhost",
    ],
    ids=["host", "target"],
)
def test_no_route_but_health_answers_to_a_foreign_name(
    server: ServerProcess, request_line: str
) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    answered = []
    for path, operations in paths.items():
        for method in operations:
            head = request_line.format(method.upper(), path.replace("{", "").replace("}", ""))
            if exchange(server.url, f"{head}\r\n\r\n".encode()).status != 403:
                answered.append(path)
    assert answered == ["/health", "/v1/health"]


def test_a_request_without_a_host_is_served(server: ServerProcess) -> None:
    assert exchange(server.url, b"GET /health HTTP/1.0\r\n\r\n").status == 200
    assert exchange(server.url, b"GET /v1/models HTTP/1.0\r\n\r\n").status == 200
    assert exchange(server.url, request_of("GET", "/v1/models", "host: llm.example")).status == 200
    two = request_of("GET", "/v1/models", "host: localhost", "host: evil.example")
    assert exchange(server.url, two).status == 400


def test_a_rebound_name_reads_and_deletes_nothing(server: ServerProcess, page: Page) -> None:
    before = state_of(server)
    response = page.goto(f"http://evil.example:{port_of(server)}/")
    assert response is not None
    assert response.status == 403
    assert "--allowed-hosts evil.example" in page.content()
    reply = page.evaluate(
        """async (key) => {
          const text = await fetch(`/v1/cache/${key}/text`);
          const deleted = await fetch("/v1/cache", {method: "DELETE"});
          return {statuses: [text.status, deleted.status], text: await text.text()};
        }""",
        key_of(server),
    )
    assert reply["statuses"] == [403, 403]
    assert SECRET not in reply["text"]
    assert state_of(server) == before


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1", "localhost"])
def test_a_page_of_another_origin_does_nothing(
    server: ServerProcess, pages: EmptyPages, page: Page, name: str
) -> None:
    before, n_before = state_of(server), n_refused(server)
    seen: list[tuple[str, int]] = []

    def note(response: Response) -> None:
        if response.url.startswith(server.url):
            seen.append((response.url.removeprefix(server.url), response.status))

    page.on("response", note)
    page.goto(f"http://{name}:{pages.port}/")
    page.evaluate(ATTACKS, [server.url, key_of(server), before["id"]])
    assert len(seen) >= 9  # of the others the browser shows no response
    assert [each for each in seen if each[1] != 403] == []
    deadline = time.monotonic() + WAIT_MS / 1000
    while n_refused(server) - n_before < N_ATTACKS:
        assert time.monotonic() < deadline, "not all were refused"
        time.sleep(0.05)
    assert n_refused(server) - n_before == N_ATTACKS
    assert state_of(server) == before


def test_an_origin_that_cors_allows_chats_and_reads_the_reply(
    server: ServerProcess, pages: EmptyPages, page: Page
) -> None:
    page.goto(f"http://friend.example:{pages.port}/")
    reply = page.evaluate(
        """async ([url, chat]) => {
          const response = await fetch(url + "/v1/chat/completions", {
            method: "POST",
            body: JSON.stringify(chat),
            headers: {"content-type": "application/json"},
          });
          return (await response.json()).object;
        }""",
        [server.url, CHAT],
    )
    assert reply == "chat.completion"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "llm.example", "rekindle.localhost"])
def test_the_dashboard_works_under_every_name_of_the_server(
    server: ServerProcess, pages: EmptyPages, page: Page, name: str
) -> None:
    # Through a link on a foreign page, as from a bookmarks page.
    page.goto(f"http://evil.example:{pages.port}/")
    page.evaluate("(url) => { location.href = url; }", f"http://{name}:{port_of(server)}/")
    expect(page.locator("#connection")).to_have_text("live")
    status = page.evaluate(
        """async (key) => (await fetch(`/v1/cache/${key}/pin`, {
          method: "POST", body: '{"seconds": 0}', headers: {"content-type": "application/json"},
        })).status""",
        key_of(server),
    )
    assert status == 200
