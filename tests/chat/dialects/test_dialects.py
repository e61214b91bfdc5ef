"""Which dialect a template speaks, and how each reads what models write."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.conversation import Conversation, Message, Role, ToolCall
from rekindle.chat.dialects import NAMES, choose
from rekindle.chat.dialects.base import Dialect, ParsedCall, ParsedCalls
from rekindle.chat.dialects.syntax.json_text import NotACall, dump
from rekindle.chat.dialects.syntax.parameters import value_of
from rekindle.chat.reply.parser import parse
from rekindle.chat.template.toolless import write_out_calls
from rekindle.errors import StartupError
from tests.chat.dialects.cases import ARGUMENTS, CASES, JSON, NAME, SCHEMAS, Case

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def calls(dialect: Dialect, text: str) -> list[tuple[str, Any]]:
    read = dialect.read(text, SCHEMAS)
    assert read is not None, text
    return [(call.name, json.loads(call.arguments_json)) for call in read.calls]


def test_a_template_without_tools_gets_the_generic_dialect() -> None:
    generic = choose("[TOOL_CALLS]", supports_tools=False)
    assert generic.name == "generic"
    message = Message(Role.ASSISTANT, (ToolCall("1", NAME, JSON),))
    [written] = write_out_calls(Conversation((message,))).messages
    read = generic.read(written.text, SCHEMAS)
    assert read == ParsedCalls((ParsedCall(NAME, JSON),), len(written.text))


def test_an_unknown_family_gets_the_most_common_form() -> None:
    assert choose("{{ tools }}", supports_tools=True).name == "hermes"


def test_the_setting_overrides_the_detected_dialect() -> None:
    assert choose("<tool_call>", supports_tools=True, override="glm").name == "glm"
    assert choose("", supports_tools=False, override="mistral").name == "mistral"
    assert choose("<tool_call>", supports_tools=True, override="generic").name == "generic"
    for name in NAMES:
        assert choose("", supports_tools=True, override=name).name == name
    with pytest.raises(StartupError, match="hermes"):
        choose("", supports_tools=True, override="klingon")


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("", "<think>"),
        ("{{ '<think>' }}", "<think>"),
        ("<seed:think>", "<seed:think>"),
        ("[THINK]", "[THINK]"),
        ("<|START_THINKING|>", "<|START_THINKING|>"),
        ("<reasoning>", "<reasoning>"),
        ("'<|channel>thought\\n'", "<|channel>thought\n"),
        ("<|channel|>analysis", "<|channel|>analysis<|message|>"),
    ],
)
def test_thoughts_are_marked_as_the_template_marks_them(template: str, opening: str) -> None:
    for supports_tools in (True, False):
        marks = choose(template, supports_tools=supports_tools).reasoning
        assert marks is not None
        assert marks.opening == opening


@by_case
def test_a_call_is_read_once_it_is_whole_and_not_before(case: Case) -> None:
    text = case.text
    begins = [
        i
        for i in range(len(text))
        if any(text.startswith(trigger.text, i) for trigger in case.dialect.triggers)
    ]
    text = text[begins[0] :]
    whole = case.dialect.read(text, SCHEMAS)
    assert whole is not None
    assert calls(case.dialect, text) == [(NAME, ARGUMENTS)]
    for end in range(len(text)):
        read = case.dialect.read(text[:end], SCHEMAS) if text[:end] else None
        assert read == (whole if end >= whole.n_chars else None), text[:end]


@by_case
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_text_is_a_call_or_none_and_stays_what_it_is(case: Case, data: st.DataObject) -> None:
    trigger = data.draw(st.sampled_from(case.dialect.triggers)).text
    pieces = [case.call, case.text, case.closing, JSON, NAME, "{", "}", "[", "]", '"', "\\", "\n"]
    broken = st.builds(lambda s, i, j: s[i:j], st.sampled_from(pieces), *[st.integers(0, 80)] * 2)
    noise = st.lists(st.sampled_from(pieces) | broken | st.text(max_size=5), max_size=6)
    text = trigger + "".join(data.draw(noise))
    longer = text + data.draw(st.text(max_size=10))
    before, after = outcome(case.dialect, text), outcome(case.dialect, longer)
    assert before is None or before == after


def outcome(dialect: Dialect, text: str) -> ParsedCalls | str | None:
    try:
        return dialect.read(text, SCHEMAS)
    except NotACall:
        return "none"


@by_case
def test_deep_or_long_input_breaks_no_dialect(case: Case) -> None:
    for bracket in ("[", "{", '{"a":', "[{"):
        outcome(case.dialect, case.dialect.triggers[0].text + bracket * 100_000)
    deep = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"
    outcome(case.dialect, case.text.replace(JSON, deep))
    outcome(case.dialect, case.text.replace("3", "9" * 5000))


HERMES = choose("<tool_call>", supports_tools=True)
QWEN = choose("<function=<parameter=", supports_tools=True)


@pytest.mark.parametrize(
    ("written", "arguments_json"),
    [
        ('{"name": "ping", "parameters": {"a":  1}}', '{"a":  1}'),
        ('{"name": "ping", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "ping", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('{"name": "ping"}', "{}"),
        ('{"type": "function", "function": {"name": "ping", "arguments": {}}}', "{}"),
    ],
)
def test_slips_in_json_are_forgiven(written: str, arguments_json: str) -> None:
    text = f"<tool_call>\n{written}\n</tool_call>"
    assert HERMES.read(text, SCHEMAS) == ParsedCalls(
        (ParsedCall("ping", arguments_json),), len(text)
    )


def test_values_in_tags_keep_their_lines_and_may_hold_the_tag() -> None:
    value = "\n  def f():\n\n    return '</parameter>'\n"
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        f"{value}\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls(QWEN, text) == [(NAME, {"city": value})]


def test_the_outer_tag_may_be_forgotten() -> None:
    inner = "<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n</function>"
    assert calls(QWEN, inner) == [(NAME, {"city": "Bonn"})]
    said = parse(QWEN, SCHEMAS, f"Ok.\n{inner}\n</tool_call>", begins_in_reasoning=False)
    assert (said.text, len(said.calls)) == ("Ok.", 1)


def test_the_sections_of_a_turn_are_read_call_by_call() -> None:
    kimi = next(case for case in CASES if case.id == "kimi")
    read = kimi.dialect.read(kimi.two, SCHEMAS)
    assert read is not None
    assert kimi.two[: read.n_chars] == kimi.opening + kimi.call
    rest = kimi.two[read.n_chars :]
    assert calls(kimi.dialect, rest) == [(NAME, ARGUMENTS)]


STRING, INTEGER = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", STRING, "3"),
        ('"3"', STRING, '"3"'),
        ("3", INTEGER, 3),
        ("three", INTEGER, "three"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ("null", {"anyOf": [STRING, {"type": "null"}]}, None),
        ("3", {"anyOf": [STRING, INTEGER]}, 3),
        ("3", {"oneOf": [STRING, {"type": "number"}]}, 3),
        ("3.5", {"anyOf": [STRING, INTEGER]}, "3.5"),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("3", {"enum": [3, 4]}, 3),
        ("3", {}, 3),
        ("[1]", {}, [1]),
        ('"3"', {}, '"3"'),
        ("None", {}, "None"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1" * 5000, INTEGER, "1" * 5000),
    ],
)
def test_a_schema_tells_text_from_json(text: str, schema: dict[str, Any], value: Any) -> None:
    found = value_of(text, schema)
    assert (found, type(found)) == (value, type(value))


def test_python_calls_are_read_as_python_would() -> None:
    lfm2 = choose("<|tool_list_start|>", supports_tools=True)
    text = (
        "<|tool_call_start|>[ping(), f(a='it\\'s', b=[1, -2.5, None], c={'k': \"v\\n\"},"
        "\n d=False,)]<|tool_call_end|>"
    )
    assert calls(lfm2, text) == [
        ("ping", {}),
        ("f", {"a": "it's", "b": [1, -2.5, None], "c": {"k": "v\n"}, "d": False}),
    ]


def test_gemma_nests_objects_in_its_own_quotes() -> None:
    gemma = choose("<|tool_call>", supports_tools=True)
    text = '<|tool_call>call:ping{a:{<|"|>k:<|"|>:[1,<|"|>"x",}<|"|>]},b:null}<tool_call|>'
    assert calls(gemma, text) == [("ping", {"a": {"k:": [1, '"x",}']}, "b": None})]


def test_half_a_character_in_arguments_is_escaped() -> None:
    assert dump({"a": "\ud83d"}) == '{"a": "\\ud83d"}'
