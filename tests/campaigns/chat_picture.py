"""Take the picture of the chat in docs/guides/chat.md: a reply, an edit, and a restarted server.

python -m tests.campaigns.chat_picture docs/images/chat-page.png
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.support.pages import opened_pages, running_browser
from tests.support.server_process import ServerProcess, free_port, serve
from tests.support.workloads import Client, prose

RULES = "You are a helpful assistant. Answer in one short sentence."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder, running_browser() as browser:
        port = free_port()

        @contextmanager
        def started() -> Iterator[ServerProcess]:
            with serve(environment={"REKINDLE_CACHE_DIR": folder}, port=port) as server:
                yield server

        # Chromium reports the connection that the restart ends.
        with opened_pages(browser, ignores="net::ERR_") as opened:
            with started() as server:
                page = opened(server.url, viewport={"width": 1280, "height": 1000})
                talk(page)
                with closing(Client(server.url)) as client:
                    client.wait_until_on_disk()
            with started():
                expect(page.locator("#connection")).to_have_text("live")
                say(page, "And which one is the largest?")
                page.locator("#thread").evaluate("thread => { thread.scrollTop = 1e6; }")
                page.screenshot(path=file)


def talk(page: Page) -> None:
    page.click("#settings-toggle")
    page.fill("#set-system", f"{RULES} {prose('the notes of the assistant', 700)}")
    page.fill("#set-max_tokens", "48")
    page.fill("#set-temperature", "0")
    page.click("#settings-toggle")
    say(page, "Which planets have rings?")
    say(page, "Name one of their moons.")
    reply = page.locator(".message.assistant").first
    reply.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Jupiter, Saturn, Uranus and **Neptune**.")
    page.get_by_role("button", name="Save").click()
    say(page, "Name one of their moons.")


def say(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".message.assistant").last.locator(".message-facts")).to_be_visible()


if __name__ == "__main__":
    main()
