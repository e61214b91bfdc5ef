"""Replies taken apart as they stream, whatever they are and however they are cut."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.dialects.base import CallArguments, CallBegan, CallEnded, Dialect, ParsedCall
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.reply.parser import (
    ParsedReasoning,
    ParsedReply,
    ParsedText,
    Part,
    ReplyParser,
    parse,
)
from tests.chat.dialects.cases import ARGUMENTS, CASES, JSON, NAME, SCHEMAS, Case
from tests.support.dialects import dialect_of

HERMES = dialect_of("<tool_call>")
HARMONY = dialect_of("<|channel|><|message|>")
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {JSON}}}</tool_call>'

WholePart = ParsedText | ParsedReasoning | ParsedCall

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def stream(
    dialect: Dialect,
    pieces: list[str],
    *,
    schemas: Schemas | None = SCHEMAS,
    begins_in_reasoning: bool = False,
) -> list[WholePart]:
    parser = ReplyParser(dialect, schemas, begins_in_reasoning=begins_in_reasoning)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return whole(parts + parser.finish())


def whole(parts: list[Part]) -> list[WholePart]:
    """Return the parts with each call in one piece."""
    found: list[WholePart] = []
    pieces: list[str] = []
    for part in parts:
        match part:
            case CallBegan():
                pieces = []
            case CallArguments(piece):
                pieces.append(piece)
            case CallEnded(call):
                assert "".join(pieces) == call.arguments_json
                found.append(call)
            case _:
                found.append(part)
    return found


def joined(parts: list[WholePart]) -> list[WholePart]:
    """Neighbours of one kind as one."""
    merged: list[WholePart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, ParsedText) and isinstance(last, ParsedText):
            merged[-1] = ParsedText(last.text + part.text)
        elif isinstance(part, ParsedReasoning) and isinstance(last, ParsedReasoning):
            merged[-1] = ParsedReasoning(last.text + part.text)
        else:
            merged.append(part)
    return merged


def said(text: str, *, dialect: Dialect = HERMES, begins_in_reasoning: bool = False) -> ParsedReply:
    return parse(dialect, SCHEMAS, text, begins_in_reasoning=begins_in_reasoning)


def test_reasoning_text_and_calls_come_apart_without_the_space_between() -> None:
    read = said(f"\n<think>\nhm\nhm\n</think>\n\nI will look.\n\n{CALL}\n{CALL}\n")
    assert read.reasoning == "hm\nhm"
    assert read.text == "I will look."
    assert read.calls == (ParsedCall(NAME, JSON),) * 2


def test_arguments_stay_as_they_were_written() -> None:
    written = '{ "days":3,\n "city" : "K\\u00f6ln" }'
    [call] = said(f'<tool_call>{{"arguments": {written}, "name": "get_weather"}}</tool_call>').calls
    assert call.arguments_json == written


def test_text_streams_up_to_what_may_be_a_mark() -> None:
    parser = ReplyParser(HERMES, SCHEMAS, begins_in_reasoning=False)
    assert parser.feed("a <b> and <tool") == [ParsedText("a <b> and")]
    assert parser.feed("box>") == [ParsedText(" <toolbox>")]
    assert parser.finish() == []


def test_reasoning_streams_and_its_last_space_waits() -> None:
    parser = ReplyParser(HERMES, SCHEMAS, begins_in_reasoning=True)
    assert parser.feed("\nfirst \n") == [ParsedReasoning("first")]
    assert parser.feed("second</thi") == [ParsedReasoning(" \nsecond")]
    assert parser.feed("nk>\n\n") == []
    assert parser.feed("Yes") == [ParsedText("Yes")]


def test_a_reply_that_ends_while_it_thinks_is_all_reasoning() -> None:
    assert said(f"<think>so {CALL} and").reasoning == f"so {CALL} and"
    assert said("so on\n", begins_in_reasoning=True).reasoning == "so on\n"


def test_an_opening_mark_that_repeats_the_prompt_is_no_thought() -> None:
    read = said("<think>\nhm</think>yes", begins_in_reasoning=True)
    assert (read.reasoning, read.text) == ("hm", "yes")


def test_marks_of_reasoning_within_text_are_text() -> None:
    for text in ("The tag <think> opens.", "Thus </think> it closes", "  spaced  "):
        assert said(text) == ParsedReply("", text, ())


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-1],
        CALL[:30],
        "<tool_call>{}</tool_call>",
        "<tool_call>{{{</tool_call> no",
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> and so on',
        "The <tool_call> tag comes before </tool_call>, as in XML.",
        "<tool_call>" * 3,
    ],
)
def test_what_is_no_call_is_text_and_whole(text: str) -> None:
    assert said(text) == ParsedReply("", text, ())
    assert joined(stream(HERMES, list(text))) == [ParsedText(text)]


def test_a_false_call_does_not_hide_the_true_one_behind_it() -> None:
    read = said(f"<tool_call>oops {CALL}")
    assert (read.text, read.calls) == ("<tool_call>oops", (ParsedCall(NAME, JSON),))


GRANITE = dialect_of("<|tool_call|><response></response>")
GRANITE_CALL = f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}]'
QWEN_XML = dialect_of("<function=<parameter=")
QWEN_CALL = "<function=get_weather>\n<parameter=city>\nK\u00f6ln\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("dialect", "text", "shown"),
    [
        (
            GRANITE,
            "<response>Use the tag <response> and </response> in XML.</response>\n",
            "Use the tag <response> and </response> in XML.\n",
        ),
        (GRANITE, "Say </response> <response>, then.", "Say </response> <response>, then."),
        (GRANITE, "Hello. </response>", "Hello. </response>"),
        (GRANITE, f"<response>Hello.</response>\n{GRANITE_CALL}", "Hello."),
        (GRANITE, f"Hello.</response>{GRANITE_CALL}\n</response>\n<response>A.", "Hello.\n\nA."),
        (
            QWEN_XML,
            f"{QWEN_CALL}\n</tool_call>\nThe tag </tool_call> ends it.",
            "\n\nThe tag </tool_call> ends it.",
        ),
    ],
)
def test_marks_at_the_edges_are_hidden_and_text_everywhere_else(
    dialect: Dialect, text: str, shown: str
) -> None:
    has_call = "get_weather" in text
    for schemas in [SCHEMAS] if has_call else [SCHEMAS, None]:
        for pieces in ([text], list(text)):
            parts = stream(dialect, pieces, schemas=schemas)
            assert "".join(each.text for each in parts if isinstance(each, ParsedText)) == shown
            assert any(isinstance(each, ParsedCall) for each in parts) == has_call


def test_a_mark_waits_until_text_follows() -> None:
    parser = ReplyParser(GRANITE, SCHEMAS, begins_in_reasoning=False)
    assert parser.feed("The tag </response>") == [ParsedText("The tag")]
    assert parser.feed(" ") == []
    assert parser.feed("ends") == [ParsedText(" </response> ends")]


def test_without_tools_calls_are_text() -> None:
    text = f"See: {CALL} "
    assert joined(stream(HERMES, list(text), schemas=None)) == [ParsedText(text)]


def test_harmony_speaks_in_channels() -> None:
    read = said(
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|> hm again<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather"
        f" <|constrain|>json<|message|>{JSON}<|call|>",
        dialect=HARMONY,
    )
    assert read == ParsedReply("hmhm again", "I will look.", (ParsedCall(NAME, JSON),))
    final = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    assert said(final, dialect=HARMONY) == ParsedReply("", "Done.", ())


def test_bare_json_is_a_call_only_where_the_reply_begins() -> None:
    llama = dialect_of("<|python_tag|>")
    call = f'{{"name": "get_weather", "parameters": {JSON}}}'
    assert said(f"\n{call}", dialect=llama).calls == (ParsedCall(NAME, JSON),)
    assert said(f"Such as {call}", dialect=llama) == ParsedReply("", f"Such as {call}", ())
    answer = '{"city": "Bonn"}'
    parser = ReplyParser(llama, SCHEMAS, begins_in_reasoning=False)
    assert parser.feed('{"ci') == [ParsedText('{"ci')]
    assert said(answer, dialect=llama) == ParsedReply("", answer, ())


def test_a_long_argument_in_small_pieces_takes_no_time() -> None:
    code = "if (a[0]) { b(); } // </tool_cal\n" * 1500
    arguments = json.dumps({"city": code, "days": 3})
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    start = time.thread_time()
    parts = stream(HERMES, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert time.thread_time() - start < 2  # it was six seconds when every piece was read
    assert parts == [ParsedCall(NAME, arguments)]


MARKS = sorted(
    {
        mark
        for case in CASES
        for mark in (
            *case.dialect.hidden,
            *(trigger.text for trigger in case.dialect.triggers_for(SCHEMAS)),
            case.text,
            case.call,
            case.opening,
            case.closing,
        )
    }
    | {"<think>", "</think>", "{", "}", '"', "\\", "[", "]", "(", ")", "\n", " ", ":", ",", "```"}
)


@st.composite
def replies(draw: st.DrawFn, case: Case) -> str:
    """Text that is full of the dialect's marks, whole and broken."""
    reasoning = case.dialect.reasoning
    assert reasoning is not None
    own = [
        case.call,
        case.text,
        case.opening,
        case.closing,
        reasoning.opening,
        reasoning.closing,
        *case.dialect.hidden,
        *(trigger.text for trigger in case.dialect.triggers_for(SCHEMAS)),
    ]
    whole = st.sampled_from(own)
    broken = st.builds(lambda text, n: text[: n % (len(text) + 1)], whole, st.integers(0, 200))
    noise = st.sampled_from(MARKS) | st.text(max_size=8)
    return "".join(draw(st.lists(st.one_of(whole, broken, noise), max_size=8)))


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    edges = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *edges], [*edges, len(text)], strict=True)]


@by_case
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_how_a_reply_is_cut_makes_no_difference(case: Case, data: st.DataObject) -> None:
    text = data.draw(replies(case))
    begins_in_reasoning = data.draw(st.booleans())
    schemas = data.draw(st.sampled_from([SCHEMAS, None]))
    dialect = case.dialect
    whole, cut, single = (
        joined(
            stream(
                dialect,
                pieces,
                schemas=schemas,
                begins_in_reasoning=begins_in_reasoning,
            )
        )
        for pieces in ([text], data.draw(cuts(text)), list(text))
    )
    assert whole == cut == single
    for part in whole:
        if isinstance(part, ParsedCall):
            assert schemas is not None
            assert part.name in schemas
            assert isinstance(json.loads(part.arguments_json), dict)


@by_case
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_but_marks_and_space(case: Case, data: st.DataObject) -> None:
    text = data.draw(replies(case))
    parts = stream(case.dialect, [text])
    if any(isinstance(part, ParsedCall) for part in parts):
        return
    reasoning = case.dialect.reasoning
    assert reasoning is not None
    edges = case.dialect.hidden_at_edges
    marks = (*case.dialect.hidden, *edges, reasoning.opening, reasoning.closing)
    rest = "".join(part.text for part in parts if not isinstance(part, ParsedCall))
    assert without(rest, marks) == without(text, marks)


def without(text: str, marks: tuple[str, ...]) -> str:
    """Return the text without white space and marks, removed until none is left."""
    text = "".join(text.split())
    marks = tuple("".join(mark.split()) for mark in marks)
    while any(mark in text for mark in marks):
        for mark in marks:
            text = text.replace(mark, "")
    return text


@by_case
def test_the_calls_of_every_dialect_come_out_of_a_stream(case: Case) -> None:
    reasoning = case.dialect.reasoning
    assert reasoning is not None
    text = f"{reasoning.opening}hm{reasoning.closing}\n\n{case.text}\n"
    parts = joined(stream(case.dialect, list(text)))
    assert parts[0] == ParsedReasoning("hm")
    [call] = parts[1:]
    assert isinstance(call, ParsedCall)
    assert (call.name, json.loads(call.arguments_json)) == (NAME, ARGUMENTS)
