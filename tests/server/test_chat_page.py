"""The page's chat in a real browser, over a tiny model; over fakes where only the page matters."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, FilePayload, Locator, Page, expect

from rekindle.chat.reply.events import FinishReason, ReplyEvent, ReplyReasoning, ReplyText
from rekindle.errors import InvalidRequest
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, Script, Wait, api_settings, calling, done
from tests.conftest import TinyModels
from tests.support.pages import opened_pages, running_browser
from tests.support.server_process import free_port, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client, prose

EVIL = "<script>document.title='broken'</script><img src=x onerror=alert(1)>"
RULES = f"You are terse. {prose('rules of the house', 300)}"
TOOLS = '[{"name": "weather", "parameters": {"type": "object", "properties": {}}}]'
BODY = ".message-main > .body"  # reasoning has one, too
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


Faked: TypeAlias = Callable[..., Page]


@pytest.fixture
def faked(browser: Browser) -> Iterator[Faked]:
    """Opens the page of a server whose replies follow a script."""
    with ExitStack() as servers, opened_pages(browser) as opened:
        yield lambda responder, **options: opened(
            servers.enter_context(serving(responder)), **options
        )


def send(page: Page, text: str) -> None:
    page.fill("#draft", text)
    page.keyboard.press("Enter")


def finished(page: Page) -> Page:
    expect(page.locator("#send")).to_be_visible()
    return page


def replies(page: Page) -> Locator:
    return page.locator(".message.assistant")


def set_field(page: Page, name: str, value: str) -> None:
    if page.locator("#settings").is_hidden():
        page.click("#settings-toggle")
    page.fill(f"#set-{name}", value)


def tokens_by_source(reply: Locator) -> dict[str, int]:
    expect(reply.locator(".message-facts")).to_be_visible()
    words = [item.split() for item in reply.locator(".legend-item").all_inner_texts()]
    return {source: int(n.replace(",", "")) for source, n in words}


def test_a_conversation_is_stopped_edited_regenerated_reloaded_and_outlives_the_server(
    browser: Browser, tiny_models: TinyModels, tmp_path: Path
) -> None:
    model, port = str(tiny_models(TinyArchitecture.LLAMA)), free_port()
    kept = {"REKINDLE_CACHE_DIR": str(tmp_path)}

    def started() -> Any:
        return serve(model, "--ctx-size", "4096", "--parallel", "2", environment=kept, port=port)

    # Chromium itself reports a lost connection.
    with opened_pages(browser, ignores=r"net::ERR_") as opened:
        with started() as server:
            page = opened(server.url)
            set_field(page, "system", RULES)
            set_field(page, "extra", '{"ignore_eos": true}')
            set_field(page, "max_tokens", "12")
            page.click("#settings-toggle")
            send(page, "What is the first rule?")
            first = tokens_by_source(replies(finished(page)))
            assert first["prefilled"] > 300

            send(page, "And the second?")
            second = tokens_by_source(replies(finished(page)).nth(1))
            assert second["live"] > first["prefilled"]
            assert second["prefilled"] < 60

            stops_a_reply(page)
            edits_the_first_message(page)
            regenerates(page)
            before = page.locator("#thread").inner_text()
            page.reload()
            expect(page.locator("#thread")).to_have_text(re.compile("What is the third rule"))
            assert page.locator("#thread").inner_text() == before
            with closing(Client(server.url)) as client:
                client.wait_until_on_disk()
            page.get_by_role("button", name="Settings").click()
            set_field(page, "max_tokens", "4000")
            send(page, "Go on for ever.")
            expect(replies(page).last.locator(BODY)).not_to_be_empty()
            server.kill()
        expect(replies(page).last.locator(".state")).to_contain_text("The connection ended")
        with started():
            set_field(page, "max_tokens", "12")
            expect(page.locator("#connection")).to_have_text("live")
            replies(page).last.get_by_role("button", name="Regenerate").click()
            after = tokens_by_source(replies(finished(page)).last)
            assert after["disk"] > 300
            assert "live" not in after
            assert after["prefilled"] < after["disk"]
            expect(page.locator("#talk-total")).to_contain_text("not computed again")


def stops_a_reply(page: Page) -> None:
    set_field(page, "max_tokens", "3000")
    send(page, "Go on until I stop you.")
    reply = replies(page).nth(2)
    expect(reply.locator(BODY)).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(reply.locator(".state")).to_have_text("Stopped.")
    stopped = tokens_by_source(reply)  # the feed has them
    assert stopped["live"] > 300
    set_field(page, "max_tokens", "12")
    page.click("#settings-toggle")
    text = reply.locator(BODY).inner_text()
    reply.get_by_role("button", name="Continue").click()
    expect(reply.locator(".state")).to_have_text("The reply reached its limit of tokens.")
    expect(reply.locator(".message-facts")).to_contain_text("in 2 parts")
    continued = tokens_by_source(reply)
    n_found = sum(continued.values()) - continued["prefilled"]
    # Of the reply itself more may be computed: the server had sampled more than the page had.
    assert n_found > sum(stopped.values()) - 60
    assert reply.locator(BODY).inner_text().startswith(text)


def edits_the_first_message(page: Page) -> None:
    """The edit is a branch: the first message is still there, with all that followed."""
    message = page.locator(".message.user").first
    message.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("What is the third rule?")
    page.keyboard.press("Enter")
    expect(replies(finished(page))).to_have_count(1)
    assert tokens_by_source(replies(page).first)["prefilled"] < 60
    page.get_by_role("button", name="Earlier branch").click()
    expect(replies(page)).to_have_count(3)
    expect(page.locator(".message.user").first).to_contain_text("What is the first rule?")
    changes_the_past(page)
    page.locator(".message.user").first.get_by_role("button", name="Later branch").click()
    expect(replies(page)).to_have_count(1)


def changes_the_past(page: Page) -> None:
    """A reply that is edited before others follow is a miss: what was expected, and what came."""
    replies(page).first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("A reply that was never sampled.")
    page.get_by_role("button", name="Save").click()
    send(page, "And the second?")
    miss = replies(finished(page)).nth(1).locator(".miss")
    expect(miss.locator(".chip")).to_have_text("text changed")
    expect(miss.locator(".got")).to_contain_text("A reply that was never sampled.")
    expect(miss.locator(".expected")).not_to_be_empty()
    expect(miss.locator(".lost")).to_contain_text("tokens lost")


def regenerates(page: Page) -> None:
    replies(page).first.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant .branch-number")).to_have_text("2 of 2")
    assert tokens_by_source(replies(finished(page)).first)["prefilled"] == 0


MARKED = f"# Title\n\n{EVIL}\n\n```html\n{EVIL}\n```\n\n[x](javascript:alert(1)) [y](https://example.org/)"


def test_markup_in_a_reply_stays_text(faked: Faked) -> None:
    page = faked(FakeResponder([*(ReplyText(piece) for piece in MARKED), done()]))
    send(page, EVIL)
    body = replies(finished(page)).locator(BODY)
    expect(body.locator("p").first).to_have_text(EVIL)
    expect(body.locator("pre code")).to_have_text(EVIL)
    expect(body.locator("h3")).to_have_text("Title")
    expect(body.locator("a")).to_have_count(1)
    expect(body.locator("a")).to_have_attribute("rel", "noopener noreferrer")
    expect(page.locator(".title")).to_contain_text("<script>")
    assert page.locator("#chat-view img, #chat-view script").count() == 0
    assert page.title() == "Rekindle"


def test_code_is_copied_as_it_was_written(faked: Faked) -> None:
    page = faked(FakeResponder([ReplyText("```py\nif x:\n    y()\n```"), done()]))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(page, "code")
    replies(finished(page)).get_by_role("button", name="Copy code").click()
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "if x:\n    y()"


def test_reasoning_is_folded_and_sent_back(faked: Faked) -> None:
    responder = FakeResponder([ReplyReasoning("Let me *think*."), ReplyText("Four."), done()])
    page = faked(responder)
    send(page, "2 + 2?")
    thoughts = replies(finished(page)).get_by_text("Let me think.")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(thoughts).to_be_visible()
    send(page, "Sure?")
    expect(replies(finished(page))).to_have_count(2)
    reply = responder.conversations[-1].messages[1]
    assert (reply.reasoning, reply.text) == ("Let me *think*.", "Four.")


def test_a_call_is_shown_and_answered_by_hand(faked: Faked) -> None:
    called: Script = [
        *calling(0, "call_1", "weather", '{"city":', '"Oslo"}'),
        done(finish=FinishReason.TOOL_CALLS),
    ]
    responder = FakeResponder(lambda i: HELLO if i else called)
    page = faked(responder)
    set_field(page, "tools", "[{")
    expect(page.locator("#settings-problem")).to_contain_text("Tools: this is not JSON")
    set_field(page, "tools", TOOLS)
    expect(page.locator("#settings-problem")).to_be_hidden()
    send(page, "Weather?")
    expect(replies(finished(page)).locator(".call")).to_contain_text('"city": "Oslo"')
    page.get_by_label("Result of weather").fill("Snow.")
    page.get_by_role("button", name="Send results").click()
    expect(replies(page).nth(1)).to_contain_text("Hello")
    conversation = responder.conversations[-1]
    assert [tool.name for tool in conversation.tools] == ["weather"]
    assert [(each.call_id, each.text) for each in conversation.messages[-1].results] == [
        ("call_1", "Snow.")
    ]
    expect(page.get_by_label("Result of weather")).to_have_count(0)


def test_an_error_of_the_server_is_shown_and_the_reply_can_be_tried_again(
    faked: Faked,
) -> None:
    too_long = InvalidRequest("The prompt is too long.", "messages")
    responder = FakeResponder(lambda i: HELLO if i else [ReplyText("Hel"), too_long])
    page = faked(responder)
    send(page, "hi")
    expect(replies(page).locator(".state")).to_contain_text("The prompt is too long.")
    page.get_by_role("button", name="Regenerate").click()
    expect(replies(finished(page)).locator(BODY)).to_have_text("Hello")


def test_escape_cancels_the_request_at_the_server(faked: Faked) -> None:
    responder = FakeResponder([ReplyText("Hel"), Wait()])
    page = faked(responder)
    page.fill("#draft", "one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(replies(page).locator(BODY)).to_have_text("Hel")
    page.keyboard.press("Escape")
    expect(replies(page).locator(".state")).to_have_text("Stopped.")
    assert responder.started[0].stream.closed.wait(30)
    assert responder.conversations[0].messages[0].text == "one\ntwo"


def test_a_reply_that_was_cut_grows_on_as_the_same_message(faked: Faked) -> None:
    cut: Script = [ReplyText("Once upon"), done(finish=FinishReason.LENGTH)]
    rest: Script = [ReplyText(" a time"), Wait()]
    end: Script = [ReplyText("."), done()]
    responder = FakeResponder(lambda i: [cut, rest, end][i])
    page = faked(responder)
    send(page, "A story.")
    replies(finished(page)).get_by_role("button", name="Continue").click()
    expect(replies(page).locator(BODY)).to_have_text("Once upon a time")
    page.keyboard.press("Escape")
    expect(replies(page).locator(".state")).to_have_text("Stopped.")
    page.reload()
    expect(replies(page).locator(BODY)).to_have_text("Once upon a time")
    replies(page).get_by_role("button", name="Continue").focus()
    page.keyboard.press("Enter")
    expect(replies(page).locator(BODY)).to_have_text("Once upon a time.")
    expect(replies(finished(page)).locator(".state")).to_be_hidden()
    expect(replies(page).get_by_role("button", name="Continue")).to_have_count(0)
    expect(replies(page)).to_have_count(1)
    expect(page.locator("#talk-total")).to_contain_text("1 reply:")
    first, *continued = responder.conversations
    assert not first.continue_last
    assert [(each.continue_last, each.messages[-1].text) for each in continued] == [
        (True, "Once upon"),
        (True, "Once upon a time"),
    ]


def test_only_the_last_reply_can_be_continued_and_not_its_calls_or_reasoning(faked: Faked) -> None:
    length = done(finish=FinishReason.LENGTH)
    scripts: list[Script] = [
        [ReplyText("Once"), length],
        [ReplyReasoning("Hm."), length],
        [ReplyText("Look."), *calling(0, "call_1", "weather", "{}"), length],
        HELLO,
    ]
    page = faked(FakeResponder(lambda i: scripts[i]))
    set_field(page, "tools", TOOLS)
    for n in range(4):
        send(page, f"message {n}")
        expect(replies(page)).to_have_count(n + 1)
        is_cut = finished(page).get_by_role("button", name="Continue")
        expect(is_cut).to_have_count(1 if n == 0 else 0)
    replies(page).last.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Begin like this:")
    page.get_by_role("button", name="Save").click()
    expect(replies(page).last.get_by_role("button", name="Continue")).to_be_visible()


def test_a_new_title_stays_also_if_another_tab_still_has_the_old_one(faked: Faked) -> None:
    page = faked(FakeResponder(), viewport=PHONE)
    expect(page.locator("#rename")).to_be_disabled()
    send(page, "first words")
    other = finished(page).context.new_page()
    other.goto(page.url)
    expect(other.locator("#talk-title")).to_have_text("first words")
    page.locator("#rename").press("Enter")
    page.keyboard.type("Something else")
    page.keyboard.press("Escape")
    expect(page.locator("#talk-title")).to_have_text("first words")
    expect(page.locator("#rename")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("  A better title ")
    page.keyboard.press("Enter")
    expect(page.locator("#talk-title")).to_have_text("A better title")
    send(other, "more")
    expect(replies(finished(other))).to_have_count(2)
    page.reload()
    expect(replies(page)).to_have_count(2)
    expect(page.locator("#talk-title")).to_have_text("A better title")
    expect(page.locator("#conversation-list .title")).to_have_text("A better title")
    page.click("#rename")
    page.get_by_label("Title", exact=True).fill("")
    page.keyboard.press("Enter")
    expect(page.locator("#talk-title")).to_have_text("first words")


def press_within_composition(area: Locator, key: str) -> None:
    """As Safari reports the key that ends a composition."""
    area.evaluate(
        """(area, key) => area.dispatchEvent(
          new KeyboardEvent("keydown", { key, keyCode: 229, bubbles: true, cancelable: true }))""",
        key,
    )


def test_a_key_of_an_input_method_neither_sends_nor_stops_nor_closes(faked: Faked) -> None:
    page = faked(FakeResponder([ReplyText("Hel"), Wait()]))
    page.fill("#draft", "one")
    press_within_composition(page.locator("#draft"), "Enter")
    assert page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    expect(replies(page).locator(BODY)).to_have_text("Hel")
    press_within_composition(page.locator("#draft"), "Escape")
    assert page.locator("#stop").is_visible()
    page.keyboard.press("Escape")
    finished(page)
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    for key in ("Escape", "Enter"):
        press_within_composition(page.get_by_label("Edited message"), key)
        expect(page.get_by_label("Edited message")).to_be_visible()


def test_the_focus_stays_with_the_branches_and_with_the_list(faked: Faked) -> None:
    page = faked(FakeResponder())
    send(page, "first talk")
    for n in (2, 3):
        replies(finished(page)).get_by_role("button", name="Regenerate").click()
        expect(page.locator(".branch-number")).to_have_text(f"{n} of {n}")
    replies(finished(page)).get_by_role("button", name="Earlier branch").focus()
    for n in (2, 1, 2, 3):  # at the first one only the other way is left
        page.keyboard.press("Enter")
        expect(page.locator(".branch-number")).to_have_text(f"{n} of 3")
    page.click("#new-chat")
    send(page, "second talk")
    expect(page.locator("#conversation-list li")).to_have_count(2)
    entry = finished(page).locator("#conversation-list .open", has_text="first talk")
    entry.focus()
    page.keyboard.press("Enter")
    expect(entry).to_have_attribute("aria-current", "true")
    expect(entry).to_be_focused()


def test_a_message_gets_one_reply_whatever_number_is_wanted(faked: Faked) -> None:
    responder = FakeResponder()
    page = faked(responder)
    set_field(page, "extra", '{"n": 2}')
    send(page, "hi")
    expect(replies(finished(page)).locator(BODY)).to_have_text("Hello")
    assert len(responder.started) == 1


def test_scaled_usage_does_not_change_what_a_reply_cost(browser: Browser) -> None:
    scaled = api_settings(usage_window=("5120",))
    with serving(FakeResponder(), scaled) as url, opened_pages(browser) as opened:
        page = opened(url)
        send(page, "hi")
        facts = replies(finished(page)).locator(".message-facts")
        expect(facts).to_contain_text("40.0 % of 10 prompt tokens")
        expect(facts).to_contain_text("Written2 tokens")


def test_the_forest_is_read_only_where_it_is_shown(faked: Faked) -> None:
    responder = FakeResponder()
    page = faked(responder)
    send(page, "hi")
    expect(replies(finished(page)).locator(".message-facts")).to_be_visible()
    page.wait_for_timeout(400)  # the page reads it 300 ms after a reply
    assert responder.store.asked == []
    with page.expect_response(re.compile("/v1/cache/forest")):
        page.get_by_role("link", name="Cache").click()


def test_conversations_are_kept_apart_exported_and_imported(faked: Faked) -> None:
    page = faked(FakeResponder())
    for title in ("first talk", "second talk"):
        page.click("#new-chat")
        send(page, title)
        finished(page)
    expect(page.locator("#conversation-list .title")).to_have_text(["second talk", "first talk"])
    with page.expect_download() as download:
        page.click("#export-all")
    path = Path(download.value.path())
    file = json.loads(path.read_text("utf-8"))
    assert {each["title"] for each in file["conversations"]} == {"first talk", "second talk"}
    page.get_by_role("button", name="Delete second talk").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#conversation-list .title")).to_have_text(["first talk"])
    page.set_input_files("#import-file", path)
    expect(page.locator("#list-status")).to_have_text("2 conversations imported.")
    expect(page.locator("#conversation-list li")).to_have_count(3)
    page.get_by_role("button", name="second talk", exact=False).first.click()
    expect(replies(page)).to_contain_text("Hello")
    expect(replies(page).locator(".message-facts")).to_contain_text("40.0 %")
    for broken in ("{}", "no", json.dumps({**file, "conversations": [{"messages": {"a": 1}}]})):
        wrong = FilePayload(name="x.json", mimeType="application/json", buffer=broken.encode())
        page.set_input_files("#import-file", wrong)
        expect(page.locator("#list-status")).to_contain_text("Nothing was imported")
    expect(page.locator("#conversation-list li")).to_have_count(3)


def test_a_conversation_deleted_while_its_reply_runs_stays_deleted(faked: Faked) -> None:
    responder = FakeResponder([ReplyText("Hel"), Wait()])
    page = faked(responder)
    send(page, "a secret")
    expect(replies(page).locator(BODY)).to_have_text("Hel")
    page.get_by_role("button", name="Delete a secret").click()
    page.locator("#confirm-yes").click()
    expect(replies(page)).to_have_count(0)
    assert responder.started[0].stream.closed.wait(30)
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#thread-empty")).to_be_visible()
    expect(page.locator("#conversation-list li")).to_have_count(0)


def test_a_second_tab_neither_cuts_a_reply_nor_brings_back_a_deleted_conversation(
    faked: Faked,
) -> None:
    script: list[ReplyEvent | Wait]
    script = [ReplyText("Hel"), *[Wait(0.05)] * 600, ReplyText("lo"), done()]
    page = faked(FakeResponder(script))
    send(page, "hi")
    expect(replies(page).locator(BODY)).to_have_text("Hel")
    other = page.context.new_page()
    other.goto(page.url)
    expect(replies(other).locator(".state")).to_contain_text("The connection ended")
    script[:] = [Wait(0) if isinstance(step, Wait) else step for step in script]
    expect(replies(finished(page)).locator(BODY)).to_have_text("Hello")
    set_field(other, "system", "Be kind.")
    page.reload()
    expect(page.locator("#set-system")).to_have_value("Be kind.")
    expect(replies(page).locator(BODY)).to_have_text("Hello")
    page.get_by_role("button", name="Delete hi").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#conversation-list li")).to_have_count(0)
    set_field(other, "system", "Be terse.")
    expect(other.locator("#list-status")).to_contain_text("another tab deleted it")
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#conversation-list li")).to_have_count(0)


def test_an_edit_during_a_reply_stops_that_reply(faked: Faked) -> None:
    responder = FakeResponder(lambda i: [ReplyText("Hel"), Wait()] if i == 1 else HELLO)
    page = faked(responder)
    send(page, "one")
    finished(page)
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    send(page, "two")
    expect(replies(page)).to_have_count(2)
    page.get_by_label("Edited message").fill("three")
    page.get_by_role("button", name="Send", exact=True).first.click()
    assert responder.started[1].stream.closed.wait(30)
    expect(replies(finished(page))).to_have_count(1)
    expect(replies(page).locator(BODY)).to_have_text("Hello")
    assert responder.conversations[-1].messages[0].text == "three"


def test_a_key_is_used_and_never_kept_with_the_conversations(browser: Browser) -> None:
    with (
        serving(FakeResponder(), api_settings(api_keys=("secret-key",))) as url,
        opened_pages(browser, ignores="401") as opened,
    ):
        page = opened(url)
        page.fill("#key", "secret-key")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#connection")).to_have_text("live")
        send(page, "hi")
        expect(replies(finished(page)).locator(BODY)).to_have_text("Hello")
        with page.expect_download() as download:
            page.click("#export-all")
        assert "secret-key" not in Path(download.value.path()).read_text("utf-8")
        assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_serious_and_nothing_is_cut_off(
    faked: Faked, scheme: str, size: dict[str, int]
) -> None:
    table = "\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quoted\n\n1. one\n   - two\n"
    script: Script = [ReplyReasoning("Hm."), ReplyText(MARKED + table), done()]
    page = faked(FakeResponder(script), color_scheme=scheme, viewport=size)
    send(page, "Show me everything. " + "x" * 300)
    finished(page)
    replies(page).get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant .branch-number")).to_have_text("2 of 2")
    page.click("#settings-toggle")
    page.click("#rename")
    for view in ("#chat", "#cache"):
        page.goto(re.sub("#.*", "", page.url) + view)
        expect(page.locator(f"{view}-view")).to_be_visible()
        assert serious_findings(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == size["width"]
    if size == PHONE:
        page.goto(re.sub("#.*", "", page.url) + "#chat")
        expect(page.locator("#new-chat")).to_be_hidden()
        page.get_by_role("button", name="Conversations").click()
        page.click("#new-chat")
        expect(page.locator("#new-chat")).to_be_hidden()
        expect(replies(page)).to_have_count(0)


def serious_findings(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {[node['target'] for node in each['nodes']]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


MARKDOWN = [
    (
        "a *b* **c** _d_ __e__ ~~f~~",
        "<p>a <em>b</em> <strong>c</strong> <em>d</em> <strong>e</strong> <s>f</s></p>",
    ),
    (
        "***both*** **a *b* c**",
        "<p><strong><em>both</em></strong> <strong>a <em>b</em> c</strong></p>",
    ),
    (
        "2 * 3 * 4, snake_case_name, **open, \\*no\\*",
        "<p>2 * 3 * 4, snake_case_name, **open, *no*</p>",
    ),
    ("`a*b*` and `` ` `` and `open", "<p><code>a*b*</code> and <code>`</code> and `open</p>"),
    ("[a](ftp://x) [b](/v1) [c] ](", "<p>[a](ftp://x) [b](/v1) [c] ](</p>"),
    (
        "# One ##\n## Two\ntext",
        '<h3 class="level-1">One</h3><h4 class="level-2">Two</h4><p>text</p>',
    ),
    (
        "- a\n- b\n  1. c\n  2. d\n\n- e",
        "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    ),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    (
        "> a\n> > b\n\nc",
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    ),
    ("one\n\n---\n\ntwo\nthree", "<p>one</p><hr><p>two\nthree</p>"),
    ("<b>&amp;", "<p>&lt;b&gt;&amp;amp;</p>"),
]
LINKS = "See https://a.example/x_(y). <https://b.example/?q=1>, [**c**](https://c.example)!"


def test_markdown_becomes_the_nodes_it_means(faked: Faked) -> None:
    page = faked(FakeResponder())
    rendered = """async (texts) => {
      const { markdown } = await import("/dashboard/chat/markdown.js");
      return texts.map((text) => {
        const holder = document.createElement("div");
        holder.append(markdown(text));
        return holder.innerHTML;
      });
    }"""
    texts = [text for text, _ in MARKDOWN]
    assert dict(zip(texts, page.evaluate(rendered, texts), strict=True)) == dict(MARKDOWN)
    [links] = page.evaluate(rendered, [LINKS])
    assert re.findall(r'href="([^"]+)"', links) == [
        "https://a.example/x_(y)",
        "https://b.example/?q=1",
        "https://c.example",
    ]
    [table] = page.evaluate(rendered, ["| a | b |\n|:-:|--:|\n| `x|y` | 2 |\n| only |"])
    assert re.findall(r'<t[hd] class="(\w+)"[^>]*>(.*?)</t', table) == [
        ("center", "a"),
        ("right", "b"),
        ("center", "<code>x|y</code>"),
        ("right", "2"),
        ("center", "only"),
        ("right", ""),
    ]


def test_a_text_that_grows_ends_as_the_whole_text_and_keeps_its_nodes(
    faked: Faked,
) -> None:
    page = faked(FakeResponder())
    code, table = "```py\nx = 1\n\ny = 2\n```", "| a |\n|---|\n| 1 |"
    text = f"# A\n\nword *em* `c`\n\n{code}\n\n- a\n- b\n\n{table}\n\nend"
    grown, whole, is_same_node = page.evaluate(
        """async (text) => {
          const { markdown, MarkdownView } = await import("/dashboard/chat/markdown.js");
          const [one, other] = [document.createElement("div"), document.createElement("div")];
          const view = new MarkdownView(one);
          let first = null;
          for (let n = 1; n <= text.length; n += 1) {
            view.show(text.slice(0, n));
            if (n === 8) first = one.firstChild;
          }
          other.append(markdown(text));
          return [one.innerHTML, other.innerHTML, one.firstChild === first];
        }""",
        text,
    )
    assert grown == whole
    assert is_same_node


HOSTILE = [
    "*a ",
    "**",
    "[",
    "](",
    "`" * 3 + "a",
    "> ",
    "- ",
    "  - a\n",
    "|a",
    "|-\n",
    "_",
    "a*",
    "~~a",
    "<http://",
    "[a](",
    "# #",
]


def test_hostile_markdown_takes_linear_time(faked: Faked) -> None:
    """Four times the text may take about four times as long; quadratic work takes 16 times."""
    page = faked(FakeResponder())
    slow = page.evaluate(
        """async (parts) => {
          const { markdown } = await import("/dashboard/chat/markdown.js");
          const seconds = (text) => {
            const start = performance.now();
            markdown(text);
            return (performance.now() - start) / 1000;
          };
          const isSlow = (part) => {
            const text = part.repeat(Math.ceil(20_000 / part.length));
            const least = (of) => Math.min(seconds(of), seconds(of));
            const four = least(text + text + text + text);
            return four > 0.1 && four > 9 * least(text);
          };
          // Other programs may halt one measurement; quadratic work is slow every time.
          return parts.filter((part) => isSlow(part) && isSlow(part) && isSlow(part));
        }""",
        HOSTILE,
    )
    assert slow == []
