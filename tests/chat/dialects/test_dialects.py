"""Which dialect a template speaks, and how each reads what models write."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from rekindle.chat.conversation import Conversation, Message, Role, ToolCall
from rekindle.chat.dialects.base import CallArguments, CallEnded, Dialect, ParsedCall
from rekindle.chat.dialects.families import GENERIC
from rekindle.chat.dialects.syntax.json_text import NotACall, dump
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.dialects.syntax.parameters import value_of
from rekindle.chat.reply.parser import parse
from rekindle.chat.template.toolless import write_out_calls
from tests.chat.dialects.cases import ARGUMENTS, CASES, JSON, NAME, SCHEMAS, Case, ParsedCalls, read
from tests.support.dialects import dialect_of

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def calls(dialect: Dialect, text: str, schemas: Schemas = SCHEMAS) -> list[tuple[str, Any]]:
    found = read(dialect, text, schemas)
    assert found is not None, text
    return [(call.name, json.loads(call.arguments_json)) for call in found.calls]


def test_the_generic_form_is_what_tools_are_described_with() -> None:
    message = Message(Role.ASSISTANT, (ToolCall("1", NAME, JSON),))
    [written] = write_out_calls(Conversation((message,))).messages
    assert read(GENERIC, written.text) == ParsedCalls((ParsedCall(NAME, JSON),), len(written.text))


@by_case
def test_a_call_is_read_once_it_is_whole_and_not_before(case: Case) -> None:
    text = case.text
    begins = [
        i
        for i in range(len(text))
        if any(text.startswith(trigger.text, i) for trigger in case.dialect.triggers_for(SCHEMAS))
    ]
    text = text[begins[0] :]
    whole = read(case.dialect, text)
    assert whole is not None
    assert calls(case.dialect, text) == [(NAME, ARGUMENTS)]
    for end in range(len(text)):
        found = read(case.dialect, text[:end]) if text[:end] else None
        assert found == (whole if end >= whole.n_chars else None), text[:end]


@by_case
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_text_is_a_call_or_none_and_stays_what_it_is(case: Case, data: st.DataObject) -> None:
    trigger = data.draw(st.sampled_from(case.dialect.triggers_for(SCHEMAS))).text
    pieces = [case.call, case.text, case.closing, JSON, NAME, "{", "}", "[", "]", '"', "\\", "\n"]
    broken = st.builds(lambda s, i, j: s[i:j], st.sampled_from(pieces), *[st.integers(0, 80)] * 2)
    noise = st.lists(st.sampled_from(pieces) | broken | st.text(max_size=5), max_size=6)
    text = trigger + "".join(data.draw(noise))
    longer = text + data.draw(st.text(max_size=10))
    before, after = outcome(case.dialect, text), outcome(case.dialect, longer)
    assert before is None or before == after


def outcome(dialect: Dialect, text: str) -> ParsedCalls | str | None:
    try:
        return read(dialect, text)
    except NotACall:
        return "none"


@by_case
def test_deep_or_long_input_breaks_no_dialect(case: Case) -> None:
    for bracket in ("[", "{", '{"a":', "[{"):
        outcome(case.dialect, case.dialect.triggers_for(SCHEMAS)[0].text + bracket * 100_000)
    deep = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"
    outcome(case.dialect, case.text.replace(JSON, deep))
    outcome(case.dialect, case.text.replace("3", "9" * 5000))


HERMES = dialect_of("<tool_call>")
QWEN = dialect_of("<function=<parameter=")


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
    assert read(HERMES, text) == ParsedCalls((ParsedCall("ping", arguments_json),), len(text))


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


def test_a_section_is_read_to_its_end_and_may_lack_its_beginning() -> None:
    kimi = next(case for case in CASES if case.id == "kimi")
    found = read(kimi.dialect, kimi.two + "!")
    assert found is not None
    assert (len(found.calls), found.n_chars) == (2, len(kimi.two))
    said = parse(kimi.dialect, SCHEMAS, kimi.call + kimi.closing, begins_in_reasoning=False)
    assert (said.text, len(said.calls)) == ("", 1)


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
    lfm2 = dialect_of("<|tool_list_start|>")
    text = (
        "<|tool_call_start|>[ping(), f(a='it\\'s', b=[1, -2.5, None], c={'k': \"v\\n\"},"
        "\n d=False,)]<|tool_call_end|>"
    )
    assert calls(lfm2, text, {"ping": {}, "f": {}}) == [
        ("ping", {}),
        ("f", {"a": "it's", "b": [1, -2.5, None], "c": {"k": "v\n"}, "d": False}),
    ]


def test_a_list_whose_last_mark_ended_the_turn_leaves_no_text() -> None:
    lfm2 = dialect_of("<|tool_list_start|>")
    said = parse(lfm2, {"ping": {}}, "<|tool_call_start|>[ping()]", begins_in_reasoning=False)
    assert [call.name for call in said.calls] == ["ping"]
    assert not said.text


def test_gemma_nests_objects_in_its_own_quotes() -> None:
    gemma = dialect_of("<|tool_call>")
    text = '<|tool_call>call:ping{a:{<|"|>k:<|"|>:[1,<|"|>"x",}<|"|>]},b:null}<tool_call|>'
    assert calls(gemma, text) == [("ping", {"a": {"k:": [1, '"x",}']}, "b": None})]


def test_half_a_character_in_arguments_is_escaped() -> None:
    assert dump({"a": "\ud83d"}) == '{"a": "\\ud83d"}'


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ude00\ud83d!", "\ufffd\ufffd!"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d\u00e9", "\\ud83d\u00e9"),
    ],
)
def test_half_a_character_is_replaced_and_a_whole_one_stays(written: str, read: str) -> None:
    hermes, lfm2 = dialect_of("<tool_call>"), dialect_of("<|tool_list_start|>")
    for dialect, text in (
        (hermes, f'<tool_call>{{"name": "ping", "arguments": {{"a": "{written}"}}}}</tool_call>'),
        (lfm2, f"<|tool_call_start|>[ping(a='{written}')]<|tool_call_end|>"),
        (lfm2, f"<|tool_call_start|>[ping(a=['{written}'])]<|tool_call_end|>"),
    ):
        for pieces in ([text], list(text)):
            reader = dialect.reader({"ping": {}})
            parts = [part for piece in pieces for part in reader.feed(piece)]
            json_text = "".join(part.json for part in parts if isinstance(part, CallArguments))
            [call] = [part.call for part in parts if isinstance(part, CallEnded)]
            assert call.arguments_json == json_text
            assert from_json(json_text)["a"] in (read, [read])


@pytest.mark.parametrize("depth", [100, 300, 900])
def test_arguments_are_no_deeper_than_a_request_may_be(depth: int) -> None:
    value = "[" * depth + "]" * depth
    for marks, text in (
        ("<tool_call>", f'{{"name": "ping", "arguments": {{"a": {value}}}}}</tool_call>'),
        (
            "<function=<parameter=<tool_call>",
            f"\n<function=ping>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
        ),
    ):
        found = read(dialect_of(marks), f"<tool_call>{text}", {"ping": {}})
        assert (found is not None) == (depth == 100)
        for call in found.calls if found else ():
            sent_back = [{"content": [{"input": from_json(call.arguments_json)}]}]
            from_json(to_json({"messages": sent_back}))


def test_a_number_that_no_json_can_repeat_is_no_call() -> None:
    for number in ("1e999", "-1e999"):
        text = f'<tool_call>{{"name": "ping", "arguments": {{"a": {number}}}}}</tool_call>'
        assert read(dialect_of("<tool_call>"), text, {"ping": {}}) is None
