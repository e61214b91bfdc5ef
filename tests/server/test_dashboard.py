"""The dashboard in a real browser, over a real model; over fakes where only the page matters."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from rekindle.api.dashboard.bodies import Hour
from rekindle.api.dashboard.history import BUCKET_SECONDS, HourHistory
from rekindle.api.dashboard.views import request_seen, snapshot_of
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.generation.events import NO_SPANS, CacheSource
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import Rank
from rekindle.generation.status import CacheCounters, CacheStatus, StoredBranch, TierStatus
from tests.api.client import serving
from tests.api.fakes import CARD, FakeResponder, FakeStore, FixedModels, api_settings
from tests.conftest import TinyModels
from tests.support.pages import WAIT_MS, OpenPage, opened_pages, running_browser
from tests.support.records import RECORD
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client, assistant, prose, user

RULES = "These are the rules of the shop."
EVIL = "<script>document.title='broken'</script><img src=x onerror=alert(1)>"

TRUNK = StoredBranch(
    key="0",
    parent=None,
    start=0,
    stop=1000,
    n_bytes=1,
    names=(EVIL,),
    sources=(CacheSource.DISK,),
    session="many",
    rank=Rank.MAIN,
    hits=0,
    used_at=0.0,
    pinned_until=None,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "2") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    with opened_pages(browser, view="#cache") as opened:
        yield opened


def is_live(page: Page) -> Page:
    expect(page.locator("#connection")).to_have_text("live")
    return page


def shows_branches(page: Page, n: int) -> None:
    expect(page.locator("#forest")).to_have_attribute("data-branches", str(n))


def forest_of(server: ServerProcess) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/cache/forest").json()["data"]
    return data


@pytest.fixture(scope="module")
def two_conversations(server: ServerProcess) -> list[dict[str, Any]]:
    """They share a system prompt; the first one. Runs after the tests of an empty server."""
    with closing(Client(server.url)) as client:
        rules = {"role": "system", "content": f"{RULES} {prose('rules', 300)}"}
        first = [rules, user(f"{EVIL} {prose('a question', 40)}")]
        for asked in (first, [rules, user(prose("of somebody else", 40))]):
            client.post("/v1/chat/completions", {"messages": asked})
        client.wait_until_on_disk()
    return first


def test_an_empty_server_says_what_to_do(server: ServerProcess, open_page: OpenPage) -> None:
    page = is_live(open_page(server.url))
    for place in ("#tokens-chart", "#forest-empty", "#sessions"):
        expect(page.locator(place)).to_contain_text(f"curl {server.url}/v1/chat/completions")
    expect(page.locator(".slot.idle")).to_have_count(2)
    expect(page.locator("#misses")).to_contain_text("None.")
    expect(page.locator("#legend .legend-item")).to_have_text(
        ["live", "memory", "disk", "prefilled"]
    )
    expect(page.locator("#forest-legend .legend-item")).to_have_text(["memory", "disk", "pinned"])
    expect(page.locator("#shared-store")).to_have_count(0)


def test_a_running_request_shows_its_progress(server: ServerProcess, open_page: OpenPage) -> None:
    page = is_live(open_page(server.url))
    with running_request(server, session="a long story"):
        slot = page.locator(".slot.decoding")
        expect(slot.locator(".slot-name")).to_have_text("a long story")
        expect(slot.locator(".slot-state")).to_contain_text("tokens/s")
        expect(slot.locator(".part.decoded")).to_be_visible()
    expect(page.locator(".slot.decoding")).to_have_count(0)
    expect(page.locator("#finished")).to_contain_text("cancelled")


@contextmanager
def running_request(server: ServerProcess, *, session: str) -> Iterator[None]:
    is_over = threading.Event()

    def read() -> None:
        # Nothing of it is kept: the others wait until all that is kept is on disk.
        asked = {"messages": [user("Go on for ever.")], "cache_prompt": False}
        body = {**asked, "stream": True, "ignore_eos": True}
        headers = {"x-rekindle-session": session}
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_MS) as response:
            for _ in response.iter_bytes():
                if is_over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_two_conversations_that_share_a_prefix_are_a_tree_with_text(
    server: ServerProcess, two_conversations: list[dict[str, Any]], open_page: OpenPage
) -> None:
    branches = forest_of(server)
    trunks = {branch["parent"] for branch in branches} - {None}
    assert len(trunks) == 1
    page = is_live(open_page(server.url))
    shows_branches(page, len(branches))
    [place] = trunks
    expect(page.locator("#forest-note")).to_contain_text(f"{branches[place]['stop']:,} saved")
    page.locator("#forest").click(position={"x": 20, "y": 10})
    expect(page.locator("#branch .text")).to_contain_text(RULES)
    expect(page.locator("#branch .facts")).to_contain_text("memory and disk")
    page.get_by_role("button", name="Pin 1 h").click()
    expect(page.locator("#branch .facts")).to_contain_text("until")
    page.get_by_role("button", name="Unpin").click()
    expect(page.get_by_role("button", name="Unpin")).to_have_count(0)


def test_markup_in_a_message_is_shown_as_text(
    server: ServerProcess, two_conversations: list[dict[str, Any]], open_page: OpenPage
) -> None:
    page = is_live(open_page(server.url))
    shows_branches(page, n_branches := len(forest_of(server)))
    text = page.locator("#branch .text")
    texts = []
    page.locator("#forest").focus()
    for _ in range(n_branches):
        page.keyboard.press("ArrowDown")
        expect(text).not_to_have_text("\u2026")
        texts.append(text.inner_text())
    assert any(EVIL in each for each in texts)
    assert page.title() == "Rekindle"


def test_a_changed_message_is_shown_with_the_expected_and_the_sent_text(
    server: ServerProcess,
    client: Client,
    two_conversations: list[dict[str, Any]],
    open_page: OpenPage,
) -> None:
    page = is_live(open_page(server.url))
    changed = two_conversations[1]["content"].replace("alert(1)", "alert(2)")
    history = [two_conversations[0], user(changed), assistant("Yes."), user("And?")]
    client.post("/v1/chat/completions", {"messages": history})
    miss = page.locator(".miss").first
    expect(miss.locator(".chip")).to_have_text("text changed")
    expect(miss.locator(".before")).to_contain_text("onerror=alert(")
    expect(miss.locator(".expected")).to_contain_text("1)>")
    expect(miss.locator(".got")).to_contain_text("2)>")
    expect(miss.locator(".lost")).to_contain_text("tokens lost")
    page.reload()  # the server remembers it
    expect(page.locator(".miss .got").first).to_contain_text("2)>")
    assert page.locator("#misses img, #misses script").count() == 0


def test_a_lookup_shows_what_would_be_found(
    server: ServerProcess, two_conversations: list[dict[str, Any]], open_page: OpenPage
) -> None:
    page = is_live(open_page(server.url))
    page.fill("#lookup-body", json.dumps({"messages": two_conversations}))
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#lookup-result")).to_contain_text("would be found")
    page.fill("#lookup-body", "not json")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#lookup-result")).to_contain_text("This is not JSON")


def test_a_branch_that_is_deleted_is_gone_from_the_page_and_the_server(
    server: ServerProcess, two_conversations: list[dict[str, Any]], open_page: OpenPage
) -> None:
    n_before = len(forest_of(server))
    page = is_live(open_page(server.url))
    shows_branches(page, n_before)
    page.locator("#forest").click(position={"x": 20, "y": 10})
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep it").click()
    assert len(forest_of(server)) == n_before
    page.get_by_role("button", name="Delete").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#branch")).to_be_hidden()
    assert len(forest_of(server)) < n_before
    shows_branches(page, len(forest_of(server)))


def test_the_theme_follows_the_system_until_it_is_chosen(
    server: ServerProcess, open_page: OpenPage
) -> None:
    def background(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark = is_live(open_page(server.url, color_scheme="dark"))
    light = is_live(open_page(server.url, color_scheme="light"))
    is_dark, is_light = background(dark), background(light)
    assert is_dark != is_light
    dark.get_by_role("button", name="Light").click()
    assert background(dark) == is_light
    dark.reload()
    assert background(dark) == is_light


def test_nothing_is_cut_off_on_a_narrow_screen(server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.set_viewport_size({"width": 400, "height": 800})
    is_live(page)
    expect(page.locator(".slot").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_a_page_without_a_key_asks_for_one_and_keeps_it_in_its_tab(browser: Browser) -> None:
    with (
        serving(FakeResponder(), api_settings(api_keys=("secret",))) as url,
        closing(browser.new_context()) as context,
    ):
        page = context.new_page()
        page.goto(url)
        for key in ("wrong", "secret"):
            expect(page.locator("#key-dialog")).to_be_visible()
            page.fill("#key", key)
            page.get_by_role("button", name="Continue").click()
        is_live(page)
        page.reload()
        is_live(page)
        expect(page.locator("#key-dialog")).to_be_hidden()
        assert page.evaluate("localStorage.length") == 0


def test_ten_thousand_branches_are_drawn_and_found(open_page: OpenPage) -> None:
    twigs = [
        replace(TRUNK, key=str(n), parent=0, start=1000, stop=1000 + n, names=())
        for n in range(1, 10_000)
    ]
    responder = FakeResponder()
    responder.store = FakeStore(branches=[TRUNK, *twigs])
    with serving(responder) as url:
        page = is_live(open_page(url))
        shows_branches(page, 10_000)
        page.locator("#forest-view").evaluate("view => { view.scrollTop = 24 * 9_998; }")
        page.locator("#forest").click(position={"x": 20, "y": 60})
        expect(page.locator("#branch h3")).to_have_text(EVIL)
        page.locator("#forest").press("ArrowRight")
        expect(page.locator("#branch h3")).to_have_text("many")
        page.context.close()


def test_a_shared_store_has_its_place_in_legends_charts_and_budgets(open_page: OpenPage) -> None:
    responder = FakeResponder()
    responder.store = FakeStore(branches=[replace(TRUNK, sources=(CacheSource.SHARED,))])
    tier = TierStatus(
        name=CacheSource.SHARED,
        n_entries=7,
        n_bytes=0,
        budget_bytes=0,
        trouble="connection refused",
        directory="redis://store:6379/0",
    )
    cache = CacheStatus(
        model_class="dense", off_because=None, tiers=(tier,), counters=CacheCounters()
    )
    responder.cache = cache
    history = HourHistory(Tombstones())
    spans = NO_SPANS.extended(CacheSource.SHARED, 60).extended(CacheSource.UPSTREAM, 75)
    history.observe(replace(RECORD, n_prompt=100, is_evaluated=True, spans=spans))
    with serving(responder) as url:
        page = is_live(open_page(url))
        page.route("**/v1/events", lambda route: route.fulfill(body=feed_of(responder, history)))
        page.reload()
        expect(page.locator("#legend .legend-item")).to_have_text(
            ["live", "memory", "disk", "shared", "upstream", "prefilled"]
        )
        expect(page.locator("#hit-share")).to_have_text("75.0 %")
        for source, n_tokens in (("shared", 60), ("upstream", 15)):
            bar = page.locator(f"#tokens-chart .fill-{source} title")
            expect(bar).to_have_text(f"{source}: {n_tokens} tokens")
        store = page.locator("#shared-store")
        expect(store.locator(".place")).to_have_text("redis://store:6379/0")
        expect(store.locator(".facts > div").first).to_have_text("Known here7")
        expect(store.locator(".numbers")).to_have_text("not answering")
        expect(store.locator(".problem")).to_have_text("connection refused")
        shows_branches(page, 1)
        expect(page.locator("#forest-legend .legend-item")).to_have_text(
            ["memory", "disk", "shared", "pinned"]
        )
        page.wait_for_function(CANVAS_IS_SHARED)
        responder.cache = replace(cache, tiers=(replace(tier, trouble=None),))
        expect(store.locator(".numbers")).to_have_text("ok")
        expect(store.locator(".problem")).to_have_count(0)
        page.context.close()


def test_accepted_drafts_are_shown_for_the_hour_and_for_each_reply(open_page: OpenPage) -> None:
    responder = FakeResponder()
    responder.cache = CacheStatus(
        model_class="dense", off_because=None, tiers=(), counters=CacheCounters()
    )
    responder.no_drafts_because = "--speculate is off"
    history = HourHistory(Tombstones())
    drafts = DraftCounts(reply=DraftCount(30, 30), context=DraftCount(10, 0))
    with serving(responder) as url:
        page = is_live(open_page(url))
        expect(page.locator("#accepted-note")).to_have_text("nothing was drafted")
        expect(page.locator("#no-drafts")).to_have_text("Nothing is drafted: --speculate is off")
        history.observe(replace(RECORD, drafts=drafts))
        history.observe(RECORD)
        page.route("**/v1/events", lambda route: route.fulfill(body=feed_of(responder, history)))
        page.reload()
        expect(page.locator("#accepted")).to_have_text("75.0 %")
        expect(page.locator("#accepted-note")).to_have_text("30 of 40 tokens")
        plain, drafted = page.locator(".finished-row .slot-state").all()
        expect(drafted).to_contain_text("30 of 40 drafted")
        expect(plain).not_to_contain_text("drafted")
        page.context.close()


CANVAS_IS_SHARED = """() => {
  const [red, green, blue] =
    document.getElementById("forest").getContext("2d").getImageData(3, 5, 1, 1).data;
  const swatch = getComputedStyle(document.querySelector(".swatch.shared"));
  return swatch.backgroundColor === `rgb(${red}, ${green}, ${blue})`;
}"""


def feed_of(responder: FakeResponder, history: HourHistory) -> bytes:
    hour = Hour(
        bucket_seconds=BUCKET_SECONDS,
        buckets=history.buckets(None),
        requests=[request_seen(each) for each in history.requests(None)],
    )
    snapshot = snapshot_of(FixedModels(responder, CARD), history, None)
    frames = (("hour", hour), ("snapshot", snapshot))
    return "".join(f"event: {name}\ndata: {json.dumps(body)}\n\n" for name, body in frames).encode()


def test_an_open_page_does_not_delay_the_shutdown(
    tiny_models: TinyModels,
) -> None:
    with serve(str(tiny_models(TinyArchitecture.LLAMA)), "--shutdown-grace", "600") as server:
        with httpx.stream("GET", f"{server.url}/v1/events", timeout=WAIT_MS) as feed:
            lines = feed.iter_lines()
            assert next(lines) == "event: hour"
            assert "event: snapshot" in lines
            server.process.terminate()
            assert list(lines)[-1] == ""  # to its end, which is a proper one
        assert server.process.wait(timeout=60) == 0
