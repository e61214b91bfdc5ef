"""Take the pictures of docs/guides/slow.md: parts of the dashboard of a real server.

    .venv/bin/python -m scripts.guide_pictures     needs Chromium, as the tests of the dashboard do

Two agents share rules. `ann` sends them as they are; `bob` puts the time of day in front, so that
nothing is found in the cache.
"""

from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from tests.support.needs import program
from tests.support.server_process import serve

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RULES = " ".join(
    f"Rule {number}: answer in plain words, and name the shelf of book {37 * number}."
    for number in range(12)
)
QUESTIONS = ("Which book is about gardens?", "Which one is older?")
SECONDS = 120  # for a reply on a busy machine


def main() -> None:
    with serve() as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        for session, times in (("ann", ("", "")), ("bob", ("It is 10:41. ", "It is 10:42. "))):
            history: list[dict[str, str]] = []
            for now, question in zip(times, QUESTIONS, strict=True):
                system = {"role": "system", "content": f"{now}You help in a bookshop. {RULES}"}
                history.append({"role": "user", "content": question})
                body = {"messages": [system, *history], "max_tokens": 8, "user": session}
                reply = client.post("/v1/chat/completions", json=body).raise_for_status()
                history.append(reply.json()["choices"][0]["message"])
        _take(server.url)


def _take(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 1200}, color_scheme="light")
        page.goto(f"{url}/#cache")
        page.get_by_text("system prompt changed").first.wait_for(timeout=1000 * SECONDS)
        for name in ("now", "misses"):
            page.locator(f"section.{name}").screenshot(path=IMAGES / f"slow-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
