"""Who asks: sessions, ranks and namespaces, as real clients name them."""

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.cache_controls import hints_of
from rekindle.api.http.caller import Caller, Hints, caller_of, namespace_of
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.responses.schema import CreateResponseRequest
from rekindle.errors import InvalidRequest
from rekindle.generation.forgetting import Scope
from rekindle.generation.request import Rank, session_name
from tests.api.client import USER, post

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Once"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}

# As recorded, with other ids and without what says nothing about who asks.
CODEX = {
    "x-codex-window-id": "01a1-7917:0",
    "x-client-request-id": "01a1-7917",
    "session-id": "01a1-7917",
    "thread-id": "01a1-7917",
    "originator": "codex_exec",
}
CODEX_SUBAGENT = CODEX | {
    "x-codex-window-id": "01a1-c0de:0",
    "thread-id": "01a1-c0de",
    "x-codex-parent-thread-id": "01a1-7917",
    "x-openai-subagent": "collab_spawn",
}
CODEX_REVIEW = CODEX_SUBAGENT | {"x-openai-subagent": "review"}
OPENCODE = {"x-session-affinity": "ses_e2333", "x-session-id": "ses_e2333"}
OPENCODE_SUBAGENT = {
    "x-session-affinity": "ses_e2332",
    "x-session-id": "ses_e2332",
    "x-parent-session-id": "ses_e2333",
}
PI = {"user-agent": "pi (linux 6.18; arm64)", "accept-language": "*", "sec-fetch-mode": "cors"}
HERMES = {"user-agent": "Anthropic/Python 0.125.0", "anthropic-version": "2023-06-01"}
# As their users describe them.
CLAUDE_CODE = {"X-Claude-Code-Session-Id": "c1a0"}
CLAUDE_CODE_SUBAGENT = CLAUDE_CODE | {"x-claude-code-agent-id": "a7"}
COPILOT_ROUND = {"x-initiator": "agent", "x-interaction-type": "conversation-agent"}
COPILOT_SUBAGENT = COPILOT_ROUND | {"x-interaction-type": "conversation-subagent"}
COPILOT_SIDE = COPILOT_ROUND | {"x-interaction-type": "conversation-background"}


def caller(headers: dict[str, str] | None = None, **hints: str) -> Caller:
    return caller_of(Headers(headers or {}), Hints(**hints), None)  # type: ignore[arg-type]


def session(headers: dict[str, str] | None = None, *named: str | None) -> str:
    return caller_of(Headers(headers or {}), Hints(sessions=named), None).session


def messages_session(user_id: str | None, headers: dict[str, str] | None = None) -> str:
    body = MessagesRequest.model_validate(
        {"messages": [USER], "max_tokens": 1, "metadata": {"user_id": user_id}}
    )
    return caller_of(Headers(headers or {}), hints_of(body), None).session


@pytest.mark.parametrize("model", [ChatCompletionRequest, CreateResponseRequest])
def test_a_session_is_named_by_the_cache_key_else_by_the_user(
    model: type[ChatCompletionRequest] | type[CreateResponseRequest],
) -> None:
    what = {"messages": [USER], "input": "hi"}
    both = model.model_validate({**what, "user": "ann", "prompt_cache_key": "k"})
    assert session({}, *hints_of(both).sessions) == "k"
    user = model.model_validate({**what, "user": "ann"})
    assert session(OPENCODE, *hints_of(user).sessions) == "ann"
    neither = model.model_validate(what)
    assert session({}, *hints_of(neither).sessions) == "default"


def test_a_session_is_named_by_the_user_id_of_messages() -> None:
    assert messages_session("ann") == "ann"
    assert messages_session(None) == "default"
    assert messages_session(None, OPENCODE) == "ses_e2333"


def test_the_session_inside_claude_codes_user_id_counts() -> None:
    user_id = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "c1a0"})
    assert messages_session(user_id) == "c1a0"
    assert messages_session(user_id, CLAUDE_CODE) == "c1a0"
    assert messages_session(user_id, CLAUDE_CODE_SUBAGENT) == "c1a0/a7"


@pytest.mark.parametrize("user_id", ['{"a": 1}', '{"session_id": 3}', "[1]", "17", "{"])
def test_other_json_in_a_user_id_is_a_name_like_any(user_id: str) -> None:
    assert messages_session(user_id) == user_id


def test_the_role_user_is_never_a_session() -> None:
    chat = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "hi", "name": "bob", "user": "eve"}]}
    )
    assert session({}, *hints_of(chat).sessions) == "default"
    assert messages_session(None) == "default"
    items = CreateResponseRequest.model_validate({"input": [{"role": "user", "content": "hi"}]})
    assert session({}, *hints_of(items).sessions) == "default"


@pytest.mark.parametrize(
    ("headers", "named", "rank"),
    [
        ({}, "default", None),
        (CODEX, "01a1-7917", None),
        (CODEX_SUBAGENT, "01a1-7917/01a1-c0de", Rank.EPHEMERAL),
        (CODEX_REVIEW, "01a1-7917/01a1-c0de", Rank.EPHEMERAL),
        ({"thread-id": "t"}, "t", None),
        (OPENCODE, "ses_e2333", None),
        (OPENCODE_SUBAGENT, "ses_e2332", Rank.EPHEMERAL),
        ({"session_id": "pi-1"}, "pi-1", None),
        (PI, "default", None),
        (HERMES, "default", None),
        (CLAUDE_CODE, "c1a0", None),
        (CLAUDE_CODE_SUBAGENT, "c1a0/a7", Rank.EPHEMERAL),
        (COPILOT_ROUND, "default", None),
        (COPILOT_SUBAGENT, "default", Rank.EPHEMERAL),
        (COPILOT_SIDE, "default", Rank.BACKGROUND),
        (OPENCODE | {"x-rekindle-session": "mine"}, "mine", None),
    ],
)
def test_headers_of_real_clients_name_sessions_and_sub_agents(
    headers: dict[str, str], named: str, rank: Rank | None
) -> None:
    assert caller(headers) == Caller(named, rank, "")


def test_codex_sub_agents_have_sessions_of_their_own_though_they_share_a_cache_key() -> None:
    assert session(CODEX, "01a1-7917") == "01a1-7917"
    assert session(CODEX, "chosen") == "chosen"
    assert session(CODEX_SUBAGENT, "01a1-7917") == "01a1-7917/01a1-c0de"


def test_a_name_of_nothing_but_blanks_and_controls_is_none() -> None:
    assert session(OPENCODE, " \t\x00", None, "") == "ses_e2333"
    assert session({}, "a\x1b[31m\nb\u202e") == "a[31mb"


def test_long_names_are_bounded_and_stay_apart() -> None:
    longest = "x" * 128
    assert session({}, longest) == longest
    first, second = session({}, longest + "a"), session({}, longest + "b")
    assert first != second
    assert max(len(first), len(second)) <= 128


@pytest.mark.parametrize("parent", ["short", "x" * 90, "x" * 128, "x" * 200])
@pytest.mark.parametrize("agent", ["a7", "y" * 60, "z" * 500])
def test_a_deletion_of_a_session_covers_its_sub_agents_however_long_their_names(
    parent: str, agent: str
) -> None:
    headers = {"x-claude-code-agent-id": agent}
    named = session(headers, parent)
    assert len(named) <= 128
    assert Scope(session=session_name(parent)).covers_session(named)
    assert session(headers, named) == named  # sent back


def test_a_declared_class_counts_more_than_what_headers_let_guess() -> None:
    assert caller(CODEX_SUBAGENT | {"x-rekindle-class": "Main"}).rank is Rank.MAIN
    assert caller({"x-rekindle-class": "background"}).rank is Rank.BACKGROUND
    body_first = caller({"x-rekindle-class": "main"}, cache_class="ephemeral")
    assert body_first.rank is Rank.EPHEMERAL


def test_an_unknown_class_in_a_header_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="`x-rekindle-class` should be one of `main`") as error:
        caller({"x-rekindle-class": "vip"})
    assert error.value.param == "x-rekindle-class"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_class", "vip"),
        ("cache_key", ""),
        ("cache_key", "x" * 129),
        ("cache_key", "two words"),
        ("cache_key", "line\n"),
        ("cache_salt", ""),
        ("cache_salt", 7),
        ("persist", "yes"),
        ("prefill", 1),
    ],
)
def test_bad_values_are_refused_by_name_in_every_dialect(
    path: str, field: str, value: object
) -> None:
    reply = post(path, BODIES[path] | {field: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert f"`{field}`" in error["message"]
    if path == "/v1/messages":
        assert reply.json()["type"] == "error"
    else:
        assert error["param"] == field


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": 7}, "user"),
        ({"prompt_cache_key": ["k"]}, "prompt_cache_key"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "loud"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "2d"}}, "prompt_cache_options.ttl"),
    ],
)
def test_bad_cache_controls_are_refused_by_name(
    path: str, fields: dict[str, object], param: str
) -> None:
    reply = post(path, BODIES[path] | fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_bad_metadata_and_diagnostics_of_messages_are_refused_by_name() -> None:
    for fields, named in (
        ({"metadata": {"user_id": 7}}, "`metadata.user_id`"),
        ({"diagnostics": {"previous_message_id": 7}}, "`diagnostics.previous_message_id`"),
    ):
        reply = post("/v1/messages", BODIES["/v1/messages"] | fields)
        assert reply.status_code == 400
        assert named in reply.json()["error"]["message"]


def namespace(key: str | None = None, salt: str | None = None, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return namespace_of(Headers(named), salt, key)


def test_without_key_and_salt_there_is_one_namespace() -> None:
    assert namespace() == ""


def test_each_key_makes_a_namespace() -> None:
    assert namespace("k") == namespace("k") != ""
    assert namespace("k") != namespace("other")


def test_salts_and_keys_never_make_the_same_namespace() -> None:
    made = [
        namespace("s"),
        namespace(salt="s"),
        namespace("s", salt="s"),
        namespace("t", salt="s"),
        namespace("s", salt="t"),
        namespace(salt='s", "api_key": "t'),
    ]
    assert len(set(made)) == len(made)
    assert namespace(salt="s") == namespace(x_rekindle_cache_salt="s")


def test_neither_key_nor_salt_can_be_read_from_a_namespace() -> None:
    made = namespace("sk-secret", salt="sesame")
    assert len(made) == 32
    assert set(made) <= set("0123456789abcdef")
