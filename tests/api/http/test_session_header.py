"""x-rekindle-session: what a reply tells whoever routes requests to several servers."""

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.http.caller import Hints, caller_of
from rekindle.api.http.session_header import SCOPE_KEY, SESSION_HEADER, show_session
from rekindle.chat.prompt.prompt import Prompt
from rekindle.errors import InvalidRequest, Overloaded
from rekindle.generation.request import DEFAULT_SESSION
from tests.api.client import USER, client_of, post
from tests.api.fakes import FakeResponder, api_settings

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Once"},
    "/v1/messages": {"messages": [USER], "max_tokens": 10},
    "/v1/responses": {"input": [USER]},
}
ANSWER = {"role": "assistant", "content": "Hello"}
MORE = {"role": "user", "content": "and now?"}


def name_of(reply: httpx.Response) -> str:
    name: str = reply.headers[SESSION_HEADER]
    return name


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_reply_carries_the_named_session(path: str, *, is_streaming: bool) -> None:
    body = {**BODIES[path], "stream": is_streaming}
    responder = FakeResponder()
    reply = post(path, body, responder, **{SESSION_HEADER: "mine"})
    assert reply.status_code == 200
    assert name_of(reply) == "mine"
    assert responder.started[0].options.terms.session == "mine"


def test_the_header_is_the_session_in_use_from_any_source() -> None:
    path = "/v1/chat/completions"
    assert name_of(post(path, {**BODIES[path], "prompt_cache_key": "key"})) == "key"
    agent = {"x-claude-code-session-id": "main", "x-claude-code-agent-id": "a1"}
    assert name_of(post(path, BODIES[path], None, **agent)) == "main/a1"
    sent_back = {**agent, SESSION_HEADER: "main/a1"}
    assert name_of(post(path, BODIES[path], None, **sent_back)) == "main/a1"


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_carries_the_session_too(path: str) -> None:
    busy = FakeResponder([Overloaded("All slots are busy.", retry_after_seconds=1)])
    reply = post(path, BODIES[path], busy, **{SESSION_HEADER: "mine"})
    assert reply.status_code in (429, 529)
    assert name_of(reply) == "mine"


def test_a_conversation_that_the_template_refuses_is_named_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object, **__: object) -> Prompt:
        raise InvalidRequest("The chat template refused this conversation.")

    path = "/v1/chat/completions"
    served = name_of(post(path, BODIES[path]))
    monkeypatch.setattr(FakeResponder, "prepare_chat", refuse)
    refused = post(path, BODIES[path])
    assert refused.status_code == 400
    assert name_of(refused) == served


@given(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=128))
def test_any_session_passes_as_visible_ascii_and_is_read_back_as_it_was(session: str) -> None:
    scope: dict[str, str] = {}
    show_session(scope, session)
    value = scope[SCOPE_KEY]
    assert all("!" <= char <= "~" for char in value)
    assert caller_of({SESSION_HEADER: value}, Hints(), None).session == session


def test_a_space_and_other_scripts_are_escaped() -> None:
    path = "/v1/chat/completions"
    reply = post(path, {**BODIES[path], "user": "Zo\u00eb B."})
    assert name_of(reply) == "Zo%C3%AB%20B."
    responder = FakeResponder()
    again = post(path, BODIES[path], responder, **{SESSION_HEADER: name_of(reply)})
    assert name_of(again) == name_of(reply)
    assert responder.started[0].options.terms.session == "Zo\u00eb B."


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_all_turns_of_a_conversation_without_a_session_have_one_name(path: str, field: str) -> None:
    first = BODIES[path]
    second = {**first, field: [USER, ANSWER, MORE]}
    other = {**first, field: [MORE]}
    responder = FakeResponder()
    names = [name_of(post(path, body, responder)) for body in (first, second, other)]
    assert names[0] == names[1] != names[2]
    # To route by, and for nothing else.
    assert {each.options.terms.session for each in responder.started} == {DEFAULT_SESSION}


def test_system_and_tools_are_part_of_how_a_conversation_begins() -> None:
    path = "/v1/chat/completions"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    system = {"role": "system", "content": "Be brief."}
    bodies: list[dict[str, Any]] = [
        {"messages": [USER]},
        {"messages": [system, USER]},
        {"messages": [USER], "tools": [tool]},
    ]
    assert len({name_of(post(path, body)) for body in bodies}) == len(bodies)


def test_a_long_text_that_grows_keeps_its_name() -> None:
    path, text = "/v1/completions", "a" * 400 + "b" * 2000
    names = [name_of(post(path, {"prompt": text[:length]})) for length in (1500, 2000)]
    assert names[0] == names[1]
    assert name_of(post(path, {"prompt": text[200:]})) != names[0]


async def test_a_browser_may_read_it() -> None:
    """CORS hides every header that is not listed."""
    settings = api_settings(cors_origins=("https://app.example",))
    async with client_of(FakeResponder(), settings) as client:
        headers = {"origin": "https://app.example"}
        reply = await client.post("/v1/completions", json={"prompt": "Once"}, headers=headers)
        assert SESSION_HEADER in reply.headers["access-control-expose-headers"]
