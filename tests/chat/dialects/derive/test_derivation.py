"""Dialects derived from templates of every shape, and templates that cannot be derived."""

import json

import pytest

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
)
from rekindle.chat.dialects.base import ReasoningMarks
from rekindle.chat.dialects.call_format import Slot
from rekindle.chat.dialects.derive.derivation import Derivations, derive
from rekindle.chat.reply.parser import parse
from tests.chat.dialects.derive.shapes import (
    CHAT,
    JSON_OBJECT,
    RAW,
    SHAPES,
    Shape,
    each,
    loaded,
    members,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array"},
        "place": {"type": "object"},
    },
}
TOOLS = tuple(
    Tool(
        name,
        json.dumps(
            {
                "type": "function",
                "function": {"name": name, "description": "Tells.", "parameters": SCHEMA},
            }
        ),
    )
    for name in ("weather", "tides")
)
SCHEMAS = {tool.name: SCHEMA for tool in TOOLS}
ARGUMENTS = {
    "city": 'Saint-"Malo"\n<b>{x}</b>',
    "days": 3,
    "share": -0.5,
    "sure": True,
    "tags": ["a b", 2, False, ["c"]],
    "place": {"name": "d, e", "at": [1, 2.5]},
}
CALLS = (
    ToolCall("abcdefgh1", "weather", json.dumps(ARGUMENTS)),
    ToolCall("abcdefgh2", "tides", "{}"),
)
USER = Message(Role.USER, (Text("Hello."),))


def reply_to(shape: Shape, *parts: Part) -> str:
    """Return what the template writes for this reply, up to the end of the turn."""
    template = shape.template
    reply = Message(Role.ASSISTANT, parts)
    texts = [
        "".join(piece.text for piece in template.render(conversation, add_generation_prompt=last))
        for conversation, last in (
            (Conversation((USER,), TOOLS), True),
            (Conversation((USER, reply), TOOLS), False),
        )
    ]
    prompt = texts[0].removesuffix(shape.prompt)
    assert texts[1].startswith(prompt)
    return texts[1].removeprefix(prompt).removesuffix(shape.end)


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_of_every_shape_reads_back(name: str) -> None:
    found = derive(SHAPES[name].template)
    assert found.dialect is not None, found.reason
    assert found.format is not None
    calls = CALLS if found.is_parallel else CALLS[:1]
    said = "" if found.format.at_start else "Well."
    parts = (Reasoning("Hm."), *([Text(said)] if said else []), *calls)
    text = reply_to(SHAPES[name], *parts)
    reply = parse(found.dialect, SCHEMAS, text, begins_in_reasoning=False)
    assert [call.name for call in reply.calls] == [call.name for call in calls]
    for read, call in zip(reply.calls, calls, strict=True):
        assert json.loads(read.arguments_json) == json.loads(call.arguments_json)
    assert (reply.reasoning.strip(), reply.text.strip()) == ("Hm.", said)


def test_every_mark_is_found_where_it_stands() -> None:
    form = derive(SHAPES["a list with ids"].template).format
    assert form is not None
    assert (form.opening, form.separator, form.closing) == ("[ACTS][", ", ", "]")
    assert form.call == (
        '{"with": ',
        Slot.ARGUMENTS,
        ', "ref": "',
        Slot.ID,
        '", "does": "',
        Slot.NAME,
        '"}',
    )


@pytest.mark.parametrize("first", [0, 1])
def test_calls_are_numbered_from_the_first_number_of_the_template(first: int) -> None:
    body = f"{{{{- '<act ' ~ (index + {first}) ~ ' ' ~ name ~ '>' ~ arguments | tojson }}}}"
    form = derive(Shape(each(body)).template).format
    assert form is not None
    assert (form.first_index, Slot.INDEX in form.call) == (first, True)


def test_headers_around_text_are_hidden() -> None:
    found = derive(SHAPES["headers around text and calls"].template)
    headers = ("<|begin|>words<|go|>", "<|end|>words<|go|>")
    # The last mark of the turn's end is what the model stops at.
    assert found.surroundings.hidden == (*headers, "<|end|>turn")


def test_reasoning_that_the_prompt_opens_has_both_marks() -> None:
    found = derive(SHAPES["a prompt that opens reasoning"].template)
    assert found.surroundings.reasoning == ReasoningMarks("<muse>", "</muse>")


def test_reasoning_that_earlier_turns_drop_is_found_by_what_the_template_cuts() -> None:
    turn = "{{- message.content.split('</muse>')[-1] }}"
    source = CHAT.format(turn=turn, prompt="<muse>\\n", end="<~over~>")
    assert derive(loaded(source)).surroundings.reasoning == ReasoningMarks("<muse>", "</muse>")


def test_reasoning_without_a_mark_behind_it_is_a_loss() -> None:
    body = each("{{- '<act>' }}" + JSON_OBJECT + "{{- '</act>' }}")
    found = derive(loaded(Shape(body).source.replace("</muse>", "")))
    assert found.dialect is not None, found.reason
    assert found.losses == ("reasoning cannot be told from text",)


def test_a_header_before_reasoning_may_stand_behind_text() -> None:
    source = SHAPES["a list of objects"].source.replace("<muse>", "<|begin|>muse<|go|>")
    marks = derive(loaded(source)).surroundings.reasoning
    assert marks == ReasoningMarks("<|begin|>muse<|go|>", "</muse>", anywhere=True)


@pytest.mark.parametrize(("on", "off"), [("<muse>", ""), ("", "<muse></muse>")])
def test_reasoning_that_the_client_switches_is_found(on: str, off: str) -> None:
    shown = "{{- '<muse>' + message.reasoning_content + '</muse>' }}" if on else ""
    asked = "enable_thinking and message.reasoning_content"
    turn = f"{{%- if {asked} %}}{shown}{{%- endif %}}{{{{- message.content }}}}"
    prompt = f"' + ('{on}' if enable_thinking else '{off}') + '"
    source = CHAT.format(turn=turn, prompt=prompt, end="<~over~>")
    assert derive(loaded(source)).surroundings.reasoning == ReasoningMarks("<muse>", "</muse>")


def test_an_indented_list_is_told_from_one_on_a_line() -> None:
    body = "{{- '<act>' ~ {'does': name, 'with': arguments} | tojson(indent=4) ~ '</act>' }}"
    found = derive(Shape(each(body)).template)
    assert found.dialect is not None, found.reason
    assert found.format is not None
    assert found.format.indent == 4


def test_what_the_template_cannot_write_is_a_loss() -> None:
    found = derive(SHAPES["only the first call"].template)
    assert found.losses == ("a turn has only one call",)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[-1].content }}", "the template writes no calls"),
        ("", "the template writes no calls"),
        ("{{ raise_exception('no') }}", "the template writes no calls"),
        (
            Shape(each("{{- '<act>' + name + arguments | tojson | tojson + '</act>' }}")).source,
            "it writes the arguments as JSON inside a string",
        ),
        (
            Shape(each("{{- '<act>' + name + '</act>' + arguments | length | string }}")).source,
            "the template writes no calls",
        ),
        (
            Shape(each("{{- arguments | tojson }}")).source,
            "it does not write the name of a call, or refuses the call",
        ),
        (
            Shape(
                "{{- '<acts>' }}{%- for call in message.tool_calls %}{{- call.function.name }}"
                "{%- endfor %}{%- for call in message.tool_calls %}"
                "{{- call.function.arguments | tojson }}{%- endfor %}"
            ).source,
            "it mixes the calls of a turn",
        ),
        (
            Shape(each("{{- '<act>' + name }}" + members("{{- ' ' + key + '=' }}" + RAW))).source,
            "nothing tells where a key or a value ends",
        ),
        (
            Shape(each("{{- '<act>' ~ name ~ index ~ arguments | tojson }}")).source,
            "nothing stands between the name of a call and its number or id",
        ),
        (
            Shape(each("{{- '<act>' + name | title + '<with>' + arguments | tojson }}")).source,
            "a call of a tool with another kind of name is refused by the template",
        ),
        (
            Shape(each("{{- '<act ' ~ name | length ~ '>' ~ name ~ arguments | tojson }}")).source,
            "a call of a tool with another kind of name does not read back",
        ),
        (
            Shape(
                "{%- set tag = '<act>' if message.tool_calls | length < 3 else '<many>' %}"
                + each("{{- tag + name + arguments | tojson }}")
            ).source,
            "three calls does not read back",
        ),
        (
            Shape(
                each("{{- '<pad> ' * 50000 + '<act>' + name + '<with>' + arguments | tojson }}")
            ).source,
            "it does not write the name of a call, or refuses the call",
        ),
    ],
)
def test_a_template_that_cannot_be_derived_says_why(source: str, reason: str) -> None:
    found = derive(loaded(source))
    assert found.dialect is None
    assert found.reason == f"cannot be derived: {reason}"


def test_a_template_is_derived_once() -> None:
    derivations = Derivations()
    source = Shape(each(JSON_OBJECT, separator="; ")).source
    assert derivations.of(loaded(source)) is derivations.of(loaded(source))


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_template_gives_the_same_derivation(name: str) -> None:
    one, other = derive(SHAPES[name].template), derive(SHAPES[name].template)
    assert (one.format, one.surroundings, one.losses) == (
        other.format,
        other.surroundings,
        other.losses,
    )


def test_tags_that_lie_deep_in_each_other_are_no_call() -> None:
    dialect = derive(SHAPES["nested tags"].template).dialect
    assert dialect is not None
    deep = "<@at>" * 2000 + "<@/at>" * 2000
    text = f"<@act><@does weather><@place>{deep}<@/place><@/does><@/act>"
    assert parse(dialect, SCHEMAS, text, begins_in_reasoning=False).text == text
