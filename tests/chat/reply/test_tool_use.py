"""Which calls a reply may make, and from where on its grammar holds."""

import json
import math
from dataclasses import replace

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.chat.dialects import choose
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.chat.reply.tool_use import ToolUse, ToolUses
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind, Sampling
from tests.chat.test_responder import ByteTokenizer


def tool(name: str) -> Tool:
    function = {"name": name, "parameters": {"type": "object", "properties": {}}}
    return Tool(name, json.dumps({"type": "function", "function": function}))


ASKED = Conversation((Message(Role.USER, (Text("?"),)),), (tool("read"), tool("write")))
PROMPT = Prompt((1,), (), "", conversation=ASKED)


class Checks:
    """Compiles nothing, and refuses grammars that hold a word."""

    def __init__(self, refused: str = "\0") -> None:
        self.refused = refused

    def __call__(self, grammar: Grammar) -> None:
        if self.refused in grammar.source:
            raise InvalidRequest("no", "response_format")


def plan(
    choice: ToolChoice,
    *,
    prompt: Prompt = PROMPT,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    refused: str = "\0",
) -> ToolUse:
    uses = ToolUses(choose("", supports_tools=False), ByteTokenizer(), Checks(refused))
    return uses.plan(prompt, ReplyOptions(sampling=sampling, tool_choice=choice))


def test_under_auto_the_grammar_waits_for_a_call_outside_reasoning() -> None:
    grammar = plan(ToolChoice()).sampling.grammar
    assert grammar is not None
    assert [trigger.text for trigger in grammar.start.triggers] == ["<tool_call>"]
    assert grammar.start.quiet == ("<think>", "</think>")


def test_under_required_the_grammar_holds_at_once_or_behind_the_open_reasoning() -> None:
    for begins_in_reasoning in (False, True):
        prompt = replace(PROMPT, begins_in_reasoning=begins_in_reasoning)
        grammar = plan(ToolChoice(ToolMode.REQUIRED), prompt=prompt).sampling.grammar
        assert grammar is not None
        assert grammar.start.triggers == ()
        assert grammar.start.begins_quiet == begins_in_reasoning


def test_only_the_named_tools_are_in_the_grammar() -> None:
    grammar = plan(ToolChoice(ToolMode.REQUIRED, ("write",))).sampling.grammar
    assert grammar is not None
    assert "write" in grammar.source
    assert "read" not in grammar.source


def test_under_none_no_calls_are_read_and_their_mark_is_ruled_out_if_it_is_one_token() -> None:
    class OneToken(ByteTokenizer):
        def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
            return (
                [7]
                if text == "<tool_call>"
                else super().tokenize(text, parse_special=parse_special)
            )

    dialect = choose("", supports_tools=False)
    options = ReplyOptions(sampling=Sampling(), tool_choice=ToolChoice(ToolMode.NONE))
    use = ToolUses(dialect, OneToken(), Checks()).plan(PROMPT, options)
    assert use.schemas is None
    assert use.sampling.logit_bias == ((7, -math.inf),)
    assert plan(ToolChoice(ToolMode.NONE)).sampling.logit_bias == ()


def test_a_reply_under_a_schema_calls_nothing_and_begins_behind_the_reasoning() -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, "{}")
    prompt = replace(PROMPT, begins_in_reasoning=True)
    use = plan(ToolChoice(), prompt=prompt, sampling=Sampling(grammar=schema))
    assert use.schemas is None
    assert use.sampling.grammar is not None
    assert use.sampling.grammar.source == "{}"
    assert use.sampling.grammar.start.begins_quiet


def test_tools_that_no_grammar_can_hold_are_refused_only_if_a_call_is_required() -> None:
    use = plan(ToolChoice(), refused="start")
    assert use.sampling.grammar is None
    assert use.schemas is not None
    with pytest.raises(InvalidRequest) as caught:
        plan(ToolChoice(ToolMode.REQUIRED), refused="start")
    assert caught.value.param == "tools"


def test_without_an_end_of_turn_there_is_no_grammar() -> None:
    assert plan(ToolChoice(), sampling=Sampling(ignore_eos=True)).sampling.grammar is None


def test_calls_of_tools_that_are_not_allowed_are_not_read() -> None:
    """Also where no grammar holds."""
    choice = ToolChoice(ToolMode.AUTO, ("write",))
    use = plan(choice, sampling=Sampling(ignore_eos=True))
    assert use.schemas is not None
    assert set(use.schemas) == {"write"}
