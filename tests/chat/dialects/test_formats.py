"""Formats of calls as published templates write them: read in pieces, and held to a grammar."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.dialects.base import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallPart,
    Dialect,
)
from rekindle.chat.dialects.formatted import formatted
from rekindle.chat.dialects.syntax.json_text import CutOff, NotACall
from rekindle.chat.reply.parser import parse
from tests.chat.dialects.formats import ALL, ARGUMENTS, ID, SCHEMAS
from tests.chat.dialects.writing import CALL_ID, Calls, written

by_format = pytest.mark.parametrize("name", ALL)

words = st.text(st.sampled_from("ab \n\"'\\{}[]<>/:,=%é😀3"), max_size=12)
# Text that a format without quotes can carry: white space at its ends is ambiguous.
texts = words.map(str.strip).map(lambda text: f"x{text}x")
arguments = st.fixed_dictionaries(
    {"query": texts},
    optional={
        "limit": st.integers(-5, 5000),
        "ratio": st.floats(-9, 9, allow_nan=False).map(lambda x: round(x, 2)),
        "exact": st.booleans(),
        "tags": st.lists(texts, max_size=3),
        "filter": st.fixed_dictionaries({}, optional={"key": texts}),
        "mode": st.sampled_from(["all", "any"]),
    },
)
calls = st.lists(
    st.tuples(st.just("search"), arguments) | st.tuples(st.just("ping"), st.just({})),
    min_size=1,
    max_size=2,
)


def begun(dialect: Dialect, text: str) -> str:
    """The text from its first trigger on, with which every reader begins."""
    triggers = [trigger.text for trigger in dialect.triggers_for(SCHEMAS)]
    return text[min(text.index(trigger) for trigger in triggers if trigger in text) :]


def read_in_pieces(dialect: Dialect, pieces: list[str]) -> tuple[list[CallPart], str]:
    """What the reader returns for the pieces, and the text that it leaves."""
    reader = dialect.reader(SCHEMAS)
    parts: list[CallPart] = []
    pieces = list(pieces)
    while pieces and not reader.is_done:
        parts += reader.feed(pieces.pop(0))
    while not reader.is_done:
        parts += reader.finish()
    return parts, reader.rest + "".join(pieces)


def cut(text: str, random: Any) -> list[str]:
    edges = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(12)))
    return [text[i:j] for i, j in zip([0, *edges], [*edges, len(text)], strict=True)]


def ended(parts: list[CallPart]) -> list[tuple[str, Any]]:
    return [
        (part.call.name, json.loads(part.call.arguments_json))
        for part in parts
        if isinstance(part, CallEnded)
    ]


def streamed(parts: list[CallPart]) -> list[tuple[str, str, str]]:
    """Name, id and arguments of each call, as its parts give them."""
    found: list[tuple[str, str, str]] = []
    for part in parts:
        match part:
            case CallBegan(name, call_id):
                found.append((name, call_id, ""))
            case CallArguments(piece):
                name, call_id, before = found.pop()
                found.append((name, call_id, before + piece))
            case CallEnded(call):
                assert found[-1] == (call.name, call.id, call.arguments_json)
    return found


@by_format
@settings(max_examples=60, deadline=None)
@given(data=st.data(), random=st.randoms())
def test_calls_are_read_as_written_in_whatever_pieces(
    name: str, data: st.DataObject, random: Any
) -> None:
    dialect = formatted(name, ALL[name])
    made: Calls = data.draw(calls)
    text = begun(dialect, written(ALL[name], made))
    whole, rest = read_in_pieces(dialect, [text])
    for pieces in (list(text), cut(text, random)):
        parts, left = read_in_pieces(dialect, pieces)
        assert (streamed(parts), left) == (streamed(whole), rest)
    reply = parse(dialect, SCHEMAS, written(ALL[name], made), begins_in_reasoning=False)
    assert [(call.name, json.loads(call.arguments_json)) for call in reply.calls] == made
    assert not reply.text


@by_format
def test_a_name_is_known_before_the_arguments_unless_an_id_follows_them(name: str) -> None:
    dialect = formatted(name, ALL[name])
    made: Calls = [("search", {"query": "x" * 50, "limit": 3})]
    text = begun(dialect, written(ALL[name], made))
    reader = dialect.reader(SCHEMAS)
    parts = reader.feed(text[: text.index("xxx") + 10])
    if ID in ALL[name].call[ALL[name].call.index(ARGUMENTS) :]:
        assert not parts
    else:
        assert parts[0] == CallBegan("search", CALL_ID if ID in ALL[name].call else "")
        assert any(isinstance(part, CallArguments) and "xxx" in part.json for part in parts)


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.members])
def test_a_string_without_quotes_streams_if_it_can_only_be_a_string(name: str) -> None:
    dialect = formatted(name, ALL[name])
    made: Calls = [("search", {"query": "x" * 50})]
    text = begun(dialect, written(ALL[name], made))
    parts: list[CallPart] = []
    reader = dialect.reader(SCHEMAS)
    for sign in text[: text.index("xxx") + 30]:
        parts += reader.feed(sign)
    assert "".join(p.json for p in parts if isinstance(p, CallArguments)).count("x") >= 29


@pytest.mark.parametrize(
    ("name", "triggers"),
    [
        ("hermes", ["<tool_call>"]),
        ("kimi", ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"]),
        ("qwen_xml", ["<tool_call>", "<function="]),
        ("command-r-plus", ["Action:\n```json"]),
        ("firefunction", ["functools["]),
        ("functionary-3.2", [">>>search\n{", ">>>ping\n{"]),
        ("llama-4", ["[search(", "[ping("]),
    ],
)
def test_a_mark_is_a_trigger_and_a_weak_one_only_with_a_name(
    name: str, triggers: list[str]
) -> None:
    found = formatted(name, ALL[name]).triggers_for(SCHEMAS)
    assert [trigger.text for trigger in found] == triggers
    assert {trigger.at_start for trigger in found} == {name == "llama-4"}


def test_what_was_read_stays_read_if_a_later_call_is_none() -> None:
    dialect = formatted("m1", ALL["minimax-m1"])
    broken = '\n{"name": "nonsense", "arguments": {}}'
    reader = dialect.reader(SCHEMAS)
    parts = reader.feed('<tool_calls>\n{"name": "ping", "arguments": {}}' + broken)
    assert ended(parts) == [("ping", {})]
    with pytest.raises(NotACall):
        reader.feed("\n</tool_calls>")
    assert reader.rest == broken + "\n</tool_calls>"


def test_a_call_that_is_cut_off_is_not_ended() -> None:
    for name, each in ALL.items():
        dialect = formatted(name, each)
        text = begun(dialect, written(each, [("search", {"query": "Bonn"})]))
        reader = dialect.reader(SCHEMAS)
        parts = reader.feed(text[: text.index("Bonn") + 2])
        assert not ended(parts)
        with pytest.raises(CutOff):
            reader.finish()


@pytest.mark.parametrize(
    ("name", "beginning", "endless"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"limit": ', "1"),
        ("hermes", '<tool_call>{"name": "ping", "arguments": {}}', "\n"),
        ("hermes", "<tool_call>", '{"function": '),
        ("llama-4", "[search(limit=", "1"),
        ("llama-4", "[search(limit=", "T"),
        ("llama-4", "[search(limit=1", " "),
    ],
)
def test_what_can_go_on_for_ever_is_no_call(name: str, beginning: str, endless: str) -> None:
    """Text that waits for its end is looked at again for each piece."""
    reader = formatted(name, ALL[name]).reader(SCHEMAS)
    pieces = iter([beginning, *[endless] * 5000])
    with pytest.raises(NotACall):
        list(map(reader.feed, pieces))
    assert next(pieces)


def test_white_space_behind_a_value_without_quotes_belongs_to_it_if_there_is_much() -> None:
    beginning = "<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>"
    end = "\n</parameter>\n</function>\n</tool_call>"
    reply = parse(
        formatted("qwen_xml", ALL["qwen_xml"]),
        SCHEMAS,
        beginning + " " * 2000 + end,
        begins_in_reasoning=False,
    )
    [call] = reply.calls
    assert json.loads(call.arguments_json) == {"query": "a\n</parameter>" + " " * 2000}
