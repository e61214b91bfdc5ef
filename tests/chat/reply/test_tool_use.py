"""Which calls a reply may make, and from where on its grammar holds."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.chat.dialects.choice import chosen
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.chat.reply.tool_use import MAX_KEPT_BYTES, ToolUse, ToolUses
from rekindle.errors import InvalidRequest
from rekindle.generation.request import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    ReasoningLimit,
    Sampling,
)
from tests.chat.test_responder import ByteTokenizer
from tests.support.dialects import dialect_of


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    parameters = parameters or {"type": "object", "properties": {}}
    function = {"name": name, "parameters": parameters}
    return Tool(name, json.dumps({"type": "function", "function": function}))


ASKED = Conversation((Message(Role.USER, (Text("?"),)),), (tool("read"), tool("write")))
PROMPT = Prompt((1,), (), "", conversation=ASKED)


def with_tool(parameters: dict[str, Any]) -> Prompt:
    asked = replace(ASKED, tools=(tool("read", parameters),))
    return Prompt((1,), (), "", conversation=asked)


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
    finishes_calls: bool = True,
) -> ToolUse:
    uses = ToolUses(
        chosen(dialect_of("")), ByteTokenizer(), Checks(refused), finishes_calls=finishes_calls
    )
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


def test_calls_are_ended_in_time_but_answers_in_a_format_are_not() -> None:
    for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
        grammar = plan(ToolChoice(mode)).sampling.grammar
        assert grammar is not None
        assert grammar.landing is not None
    answer = Sampling(grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}"))
    grammar = plan(ToolChoice(), sampling=answer).sampling.grammar
    assert grammar is not None
    assert grammar.landing is None


def test_where_calls_are_not_finished_by_force_they_do_not_stream_either() -> None:
    use = plan(ToolChoice(ToolMode.REQUIRED), finishes_calls=False)
    assert use.sampling.grammar is not None
    assert use.sampling.grammar.landing is None
    assert not use.streams


def test_a_budget_of_reasoning_is_in_the_dialects_own_marks() -> None:
    uses = ToolUses(chosen(dialect_of("[THINK]")), ByteTokenizer(), Checks(), finishes_calls=True)
    prompt = replace(PROMPT, begins_in_reasoning=True)
    for choice in (ToolChoice(), ToolChoice(ToolMode.NONE)):
        options = ReplyOptions(sampling=Sampling(), tool_choice=choice)
        assert uses.plan(prompt, options).sampling.reasoning_limit is None
        limited = replace(options, reasoning_budget=64)
        assert uses.plan(prompt, limited).sampling.reasoning_limit == ReasoningLimit(
            max_tokens=64, opening="[THINK]", closing="[/THINK]", begins_inside=True
        )


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

    dialect = dialect_of("")
    options = ReplyOptions(sampling=Sampling(), tool_choice=ToolChoice(ToolMode.NONE))
    use = ToolUses(chosen(dialect), OneToken(), Checks(), finishes_calls=True).plan(PROMPT, options)
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


def test_calls_stream_only_under_a_grammar_of_an_engine_that_finishes_them() -> None:
    assert plan(ToolChoice()).streams
    assert plan(ToolChoice(ToolMode.REQUIRED)).streams
    assert not plan(ToolChoice(), finishes_calls=False).streams
    assert not plan(ToolChoice(), refused="start").streams
    assert not plan(ToolChoice(), sampling=Sampling(ignore_eos=True)).streams


def test_sources_of_grammars_are_kept_by_their_bytes() -> None:
    uses = ToolUses(chosen(dialect_of("")), ByteTokenizer(), Checks(), finishes_calls=True)
    for number in range(40):
        names = [f"{number} {each} {'x' * 1_000}" for each in range(600)]
        uses.plan(
            with_tool({"type": "object", "properties": {"a": {"enum": names}}}),
            ReplyOptions(sampling=Sampling()),
        )
    assert 0 < len(uses._grammars) < 40
    assert uses._grammars.n_bytes <= MAX_KEPT_BYTES


def test_tools_beyond_the_limit_are_not_compiled() -> None:
    checked: list[Grammar] = []
    uses = ToolUses(chosen(dialect_of("")), ByteTokenizer(), checked.append, finishes_calls=True)
    uses.prove()
    checked.clear()
    prompt = with_tool({"type": "object", "description": "x" * MAX_GRAMMAR_BYTES})
    assert uses.plan(prompt, ReplyOptions(sampling=Sampling())).sampling.grammar is None
    required = ReplyOptions(sampling=Sampling(), tool_choice=ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequest, match="at most 1,048,576 are compiled") as refusal:
        uses.plan(prompt, required)
    assert refusal.value.param == "tools"
    assert checked == []
