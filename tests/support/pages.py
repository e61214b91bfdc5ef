"""Pages in a real browser; a test fails if anything went wrong in one of them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.needs import program

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 30_000  # a machine under load; nothing is measured here

OpenPage = Callable[..., Page]


@contextmanager
def running_browser() -> Iterator[Browser]:
    path = program(*BROWSERS)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        # Without a sandbox, as the tests may run as root in a container.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened_pages(browser: Browser, *, view: str = "", ignores: str = r"(?!)") -> Iterator[OpenPage]:
    """Yield a function that opens pages. At the end no page may have reported a problem.

    `ignores` matches messages that are expected, such as those of a lost connection.
    """
    problems: list[str] = []
    contexts: list[BrowserContext] = []

    def opened(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        context.on("console", lambda message: problems.append(message.text))
        context.on("weberror", lambda error: problems.append(str(error.error)))
        page = context.new_page()
        page.goto(f"{url}/{view}")
        return page

    try:
        yield opened
    finally:  # a server waits for its streams before it stops
        for context in contexts:
            context.close()
    assert [each for each in problems if not re.search(ignores, each)] == []
