"""Take the pictures of the documents: the page of real servers with the embedded model.

    .venv/bin/python -m scripts.pictures [NAME...]     needs Chromium, as the tests of the page do

Without names, all of them are taken, in a few minutes.
"""

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Browser, Page, expect

from scripts.apng import Frame, Pixels, encode
from tests.support.pages import opened_pages, running_browser
from tests.support.server_process import ServerProcess, free_port, serve
from tests.support.workloads import Client, prose

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SECONDS = 120  # for a reply on a busy machine
TERSE = "You are a helpful assistant. Answer in one short sentence."
SHOP = "You help in a bookshop. " + " ".join(
    f"Rule {number}: answer in plain words, and name the shelf of book {37 * number}."
    for number in range(24)
)
QUESTIONS = ("Which book is about gardens?", "Which one is older?")

Message = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    with running_browser() as browser:
        for name in names:
            PICTURES[name](browser)


def chat_page(browser: Browser) -> None:
    """A reply, an edited reply, and a reply after a restart of the server."""
    with restartable(browser, width=1280, height=1000) as (page, restart):
        prepare(page)
        say(page, "Which planets have rings?")
        say(page, "Name one of their moons.")
        reply = page.locator(".message.assistant").first
        reply.get_by_role("button", name="Edit").click()
        page.get_by_label("Edited message").fill("Jupiter, Saturn, Uranus and **Neptune**.")
        page.get_by_role("button", name="Save").click()
        say(page, "Name one of their moons.")
        restart()
        say(page, "And which one is the largest?")
        page.locator("#thread").evaluate("thread => { thread.scrollTop = 1e6; }")
        save(page, "chat-page")


def chat_recording(browser: Browser) -> None:
    """Ask, edit, regenerate, restart the server, ask on."""
    with restartable(browser, width=1120, height=700) as (page, restart):
        prepare(page)
        recorder = Recorder(page, browser)
        recorder.step("1. Ask. A long system prompt is computed.")
        recorder.reply(lambda: ask(page, "Which planets have rings?"))
        recorder.step("2. Ask on. Only the new message is computed.")
        recorder.reply(lambda: ask(page, "Name one of their moons."))
        recorder.step("3. Edit an earlier message.")
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        recorder.take(0.8)
        page.get_by_label("Edited message").fill("Which planet is the largest?")
        recorder.take(1.2)
        recorder.reply(lambda: page.keyboard.press("Enter"))
        recorder.step("4. Regenerate. One token is computed.")
        reply = page.locator(".message.assistant").last
        recorder.reply(lambda: reply.get_by_role("button", name="Regenerate").click())
        recorder.step("5. Restart the server.")
        restart(lambda: recorder.take(1.6))
        recorder.take(1.2)
        recorder.step("6. Ask on. The prompt comes from disk.")
        recorder.reply(lambda: ask(page, "How many moons does it have?"))
        (IMAGES / "chat-recording.png").write_bytes(encode(recorder.frames))


def dashboard(browser: Browser) -> None:
    """The cache of a server with four agents, two of which are being answered."""
    with serve("--parallel", "4", "--ctx-size", "16384") as server:
        let_agents_work(server, "ann", "carol", "dave", "bob")
        with cache_page(browser, server, width=1440) as page:
            # The page's own requests: they end with it.
            bodies = [shop_request(session, [], n_tokens=2000) for session in ("eve", "mallory")]
            page.evaluate(ASK, bodies)
            expect(page.locator("#slots").get_by_text("decoding")).to_have_count(2)
            page.locator("#forest").click(position={"x": 60, "y": 30})
            page.get_by_role("button", name="Pin 1 h").click()
            page.fill("#lookup-body", json.dumps(shop_request("frank", [])))
            page.get_by_role("button", name="Look up").click()
            expect(page.locator("#lookup-result")).to_contain_text("would be found")
            expect(page.locator("#branch")).to_contain_text("Pinned")
            save(page, "dashboard", full_page=True)


def slow(browser: Browser) -> None:
    """Two parts of the dashboard: recent requests by source, and the reason of a miss."""
    with serve() as server:
        let_agents_work(server, "ann", "bob")
        with cache_page(browser, server, width=1280) as page:
            for name in ("now", "misses"):
                page.locator(f"section.{name}").screenshot(path=IMAGES / f"slow-{name}.png")


PICTURES: dict[str, Callable[[Browser], None]] = {
    "chat-page": chat_page,
    "chat-recording": chat_recording,
    "dashboard": dashboard,
    "slow": slow,
}


class Recorder:
    """Frames of a page. What takes long here is shown for less time than it took."""

    PAUSE_SECONDS = 0.25  # between two frames of a reply that grows
    END_SECONDS = 2.5  # to read what a reply cost

    def __init__(self, page: Page, browser: Browser) -> None:
        self.frames: list[Frame] = []
        self._page = page
        self._decoder = browser.new_page()

    def step(self, text: str) -> None:
        """Show what comes next, in the empty place below the list of conversations."""
        self._page.evaluate(CAPTION, text)
        self.take(1.5)

    def reply(self, begin: Callable[[], None]) -> None:
        begin()
        while self._page.locator("#stop").is_visible():
            self.take(self.PAUSE_SECONDS)
            time.sleep(self.PAUSE_SECONDS)
        finish(self._page)
        self.take(self.END_SECONDS)

    def take(self, seconds: float) -> None:
        pixels = self._pixels(self._page.screenshot(caret="hide"))
        if self.frames and np.array_equal(self.frames[-1].pixels, pixels):
            seconds += self.frames.pop().seconds
        self.frames.append(Frame(pixels, seconds))

    def _pixels(self, png: bytes) -> Pixels:
        width, height, data = self._decoder.evaluate(DECODE, base64.b64encode(png).decode())
        rgba = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)
        return rgba[:, :, :3]


ASK = """(bodies) => {
  for (const body of bodies) {
    const headers = { "content-type": "application/json" };
    fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body) });
  }
}"""

CAPTION = """(text) => {
  const caption = document.getElementById("caption") ?? document.createElement("p");
  caption.id = "caption";
  caption.textContent = text;
  const style = { background: "#1c1917", color: "#fff", padding: "14px 16px" };
  Object.assign(caption.style, { ...style, borderRadius: "12px", fontSize: "17px" });
  document.getElementById("list-status").before(caption);
}"""

DECODE = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (char) => char.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  const url = await new Promise((done) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.readAsDataURL(new Blob([data]));
  });
  return [image.width, image.height, url.split(",")[1]];
}"""


@contextmanager
def restartable(browser: Browser, **size: int) -> Iterator[tuple[Page, Callable[..., None]]]:
    """Yield the page of a server, and a function that restarts the server."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as running,
        # Chromium reports the connection that the restart ends.
        opened_pages(browser, ignores="net::ERR_") as opened,
    ):

        def start() -> str:
            started = serve(environment={"REKINDLE_CACHE_DIR": folder}, port=port)
            return running.enter_context(started).url

        url = start()
        page = opened(url, viewport=size)

        def restart(between: Callable[[], None] = lambda: None) -> None:
            with closing(Client(url)) as client:
                client.wait_until_on_disk()
            running.close()
            expect(page.locator("#connection")).not_to_have_text("live")
            between()
            start()
            expect(page.locator("#connection")).to_have_text("live")

        yield page, restart


@contextmanager
def cache_page(browser: Browser, server: ServerProcess, **size: int) -> Iterator[Page]:
    with opened_pages(browser, view="#cache") as opened:
        page = opened(server.url, viewport={"height": 1200, **size})
        page.get_by_text("system prompt changed").first.wait_for(timeout=1000 * SECONDS)
        yield page


def let_agents_work(server: ServerProcess, *sessions: str) -> None:
    """The agents share rules. `bob` puts the time in front, so that nothing of his is found."""
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        for session in sessions:
            history: list[Message] = []
            for minute, question in enumerate(QUESTIONS, 41):
                now = f"It is 10:{minute}. " if session == "bob" else ""
                history.append({"role": "user", "content": f"I am {session}. {question}"})
                body = shop_request(session, history, now=now)
                reply = client.post("/v1/chat/completions", json=body).raise_for_status()
                history.append(reply.json()["choices"][0]["message"])


def shop_request(
    session: str, history: list[Message], *, now: str = "", n_tokens: int = 8
) -> dict[str, Any]:
    system = {"role": "system", "content": f"{now}{SHOP}"}
    asked = history or [{"role": "user", "content": f"I am {session}. {QUESTIONS[0]}"}]
    messages = [system, *asked]
    return {"messages": messages, "max_tokens": n_tokens, "ignore_eos": True, "user": session}


def prepare(page: Page) -> None:
    page.click("#settings-toggle")
    page.fill("#set-system", f"{TERSE} {prose('the notes of the assistant', 700)}")
    page.fill("#set-max_tokens", "48")
    page.fill("#set-temperature", "0.2")
    page.click("#settings-toggle")


def say(page: Page, text: str) -> None:
    ask(page, text)
    finish(page)


def ask(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.keyboard.press("Enter")


def finish(page: Page) -> None:
    expect(page.locator("#stop")).to_be_hidden(timeout=1000 * SECONDS)
    expect(page.locator(".message.assistant").last.locator(".message-facts")).to_be_visible()


def save(page: Page, name: str, **options: Any) -> None:
    page.screenshot(path=IMAGES / f"{name}.png", **options)


if __name__ == "__main__":
    main()
