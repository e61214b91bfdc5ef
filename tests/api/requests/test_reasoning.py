"""Reasoning budgets: their names on the wire, the server's limit, and what 0 does."""

from typing import Any

import pytest

from rekindle.api.requests.reasoning import effective_budget
from tests.api.client import USER
from tests.api.fakes import FakeResponder
from tests.api.requests.test_media import CHAT, MESSAGES, RESPONSES, send

ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


def read(
    path: str, fields: dict[str, Any], limit: int | None = None
) -> tuple[int | None, dict[str, Any]]:
    """The budget of the reply, and what the template gets."""
    said = {"input": "hi"} if path == RESPONSES else {"messages": [USER], "max_tokens": 9}
    reply, responder = send(path, {**said, **fields}, reasoning_limit=limit)
    assert reply.status_code == 200, reply.text
    return responder.started[0].options.reasoning_budget, _kwargs(responder)


def _kwargs(responder: FakeResponder) -> dict[str, Any]:
    return responder.conversations[0].template_kwargs


@pytest.mark.parametrize(
    ("path", "fields", "budget", "kwargs"),
    [
        (CHAT, {}, None, {}),
        (CHAT, {"reasoning_budget": 100}, 100, {}),
        (CHAT, {"reasoning_budget": -1}, None, {}),
        (CHAT, {"reasoning_budget": 0}, 0, OFF),
        (CHAT, {"reasoning_budget": 0, "enable_thinking": True}, 0, ON),
        (CHAT, {"reasoning_budget": 0, "chat_template_kwargs": ON}, 0, ON),
        (CHAT, {"reasoning_budget_tokens": 100}, 100, {}),
        (CHAT, {"thinking_budget_tokens": 100}, 100, {}),
        (CHAT, {"thinking_budget_tokens": 100, "reasoning_budget": 7}, 7, {}),
        (CHAT, {"thinking_budget_tokens": 100, "reasoning_budget": -1}, 100, {}),
        (CHAT, {"reasoning": {"max_tokens": 100}}, 100, {}),
        (CHAT, {"reasoning": {"enabled": False}}, 0, OFF),
        (CHAT, {"reasoning": {"effort": "low"}}, None, {"reasoning_effort": "low"}),
        (
            CHAT,
            {"chat_template_kwargs": {"thinking_budget": 100}},
            None,
            {"thinking_budget": 100},
        ),
        (RESPONSES, {"reasoning": {"max_tokens": 100}}, 100, {}),
        (RESPONSES, {"reasoning": {"max_tokens": 0}}, 0, OFF),
        (RESPONSES, {"reasoning": {"effort": "none"}}, 0, {"reasoning_effort": "none"} | OFF),
        (CHAT, {"reasoning_effort": "none"}, 0, {"reasoning_effort": "none"} | OFF),
        (CHAT, {"reasoning": {"effort": "none"}}, 0, {"reasoning_effort": "none"} | OFF),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024, ON),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None, ON),
        (MESSAGES, {"thinking": {"type": "disabled"}}, 0, OFF),
    ],
)
def test_budget_has_a_name_in_every_wire_format(
    path: str, fields: dict[str, Any], budget: int | None, kwargs: dict[str, Any]
) -> None:
    assert read(path, fields) == (budget, kwargs)


@pytest.mark.parametrize(
    ("asked", "limit", "budget"),
    [
        (None, None, None),
        (None, 50, 50),
        (20, None, 20),
        (20, 50, 20),
        (80, 50, 50),
        (0, 50, 0),
        (80, 0, 0),
    ],
)
def test_the_servers_limit_is_an_upper_bound(
    asked: int | None, limit: int | None, budget: int | None
) -> None:
    assert effective_budget(asked, limit) == budget


def test_the_servers_limit_holds_in_every_wire_format() -> None:
    asked = {"type": "enabled", "budget_tokens": 32_000}
    assert read(MESSAGES, {"thinking": asked}, limit=50) == (50, ON)
    assert read(RESPONSES, {}, limit=50) == (50, {})
    assert read(CHAT, {}, limit=0) == (0, OFF)


def test_raw_text_has_no_budget() -> None:
    _, responder = send("/v1/completions", {"prompt": "a"}, reasoning_limit=0)
    assert responder.started[0].options.reasoning_budget is None


def test_a_budget_of_0_renders_the_same_prompt_wherever_it_is_counted() -> None:
    body = {"messages": [USER], "max_tokens": 9}
    for path in (
        CHAT,
        MESSAGES,
        "/apply-template",
        "/v1/messages/count_tokens",
        "/v1/cache/lookup",
    ):
        reply, responder = send(path, body, reasoning_limit=0)
        assert reply.status_code == 200, reply.text
        assert _kwargs(responder) == OFF
