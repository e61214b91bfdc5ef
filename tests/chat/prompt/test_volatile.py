"""Rules that replace volatile text: only where they are switched on, and never a user's words."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.chat.prompt.volatile import SHIPPED, Neutralised, VolatileRules
from rekindle.errors import StartupError


def conversation(system: str, user: str = "Hi.") -> Conversation:
    return Conversation(
        (Message(Role.SYSTEM, (Text(system),)), Message(Role.USER, (Text(user),))),
        tools=(Tool("f", '{"type": "function", "function": {"name": "f"}}'),),
    )


def neutralised(rule: str, system: str) -> str:
    return VolatileRules([rule]).neutralise(conversation(system))[0].messages[0].text


@pytest.mark.parametrize(
    ("rule", "one", "two"),
    [
        ("timestamps", "Now: 2026-11-15T09:30:12.5Z.", "Now: 2026-11-16 10:31."),
        ("times", "It is 9:30 AM here.", "It is 17:05:59 here."),
        (
            "uuids",
            "id=123e4567-e89b-12d3-a456-426614174000",
            "id=00000000-0000-0000-0000-ffffffffffff",
        ),
        (
            "claude-code-attribution",
            "x-anthropic-billing-header: cc_version=2.1.325.35d; a\nYou are Claude.",
            "x-anthropic-billing-header: cc_version=2.1.325.9af; b\nYou are Claude.",
        ),
        (
            "git-status",
            "Git status:\nM a.py\nM b.py\n\nBe brief.",
            "Git status:\n?? new.py\n\nBe brief.",
        ),
        (r"session-\w+", "In session-a1.", "In session-zz."),
    ],
)
def test_two_prompts_that_differ_in_volatile_text_become_one(rule: str, one: str, two: str) -> None:
    assert one != two
    assert neutralised(rule, one) == neutralised(rule, two)


def test_a_tool_keeps_the_format_of_its_input() -> None:
    asked = conversation("It is 2026-11-15 09:30.")
    asked = replace(asked, tools=(replace(asked.tools[0], patterns=(("input", "[a-z]+"),)),))
    changed, _ = VolatileRules(["timestamps"]).neutralise(asked)
    assert changed.tools == asked.tools


def test_replacements_are_reported() -> None:
    rules = VolatileRules(["timestamps", "uuids"])
    changed, found = rules.neutralise(conversation("2026-11-15 09:30 and 2026-11-15 09:31"))
    assert found == (Neutralised("timestamps", 2),)
    assert changed.messages[0].text == "[timestamps] and [timestamps]"


def test_a_first_group_stays() -> None:
    assert neutralised(r"(Branch:) \S+", "Branch: main, go.") == "Branch: [volatile 1] go."


def test_volatile_text_in_tool_definitions_is_replaced() -> None:
    asked = conversation("s")
    tool = Tool("f", asked.tools[0].definition_json.replace('"f"}', '"f", "description": "09:30"}'))
    changed, found = VolatileRules(["times"]).neutralise(replace(asked, tools=(tool,)))
    assert found == (Neutralised("times", 1),)
    assert "09:30" not in changed.tools[0].definition_json


def test_a_rule_never_breaks_a_definition() -> None:
    source = '{"function": {"name": "f", "description": "v1, \\"quoted\\"", "enum": ["v1"]}}'
    asked = replace(conversation("s"), tools=(Tool("f", source),))
    changed, _ = VolatileRules(["v.*"]).neutralise(asked)
    definition = json.loads(changed.tools[0].definition_json)["function"]
    assert definition == {"name": "f", "description": "[volatile 1]", "enum": ["v1"]}


@given(st.text(), st.text())
def test_without_rules_nothing_changes_and_users_are_never_touched(system: str, user: str) -> None:
    asked = conversation(system, user)
    assert VolatileRules([]).neutralise(asked) == (asked, ())
    changed, _ = VolatileRules(list(SHIPPED)).neutralise(asked)
    assert changed.messages[1] == asked.messages[1]


def test_an_invalid_rule_is_an_error_at_start_up() -> None:
    with pytest.raises(StartupError, match=r"timestamps.*nor a regular expression"):
        VolatileRules(["[unclosed"])
