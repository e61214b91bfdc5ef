"""Formats of calls as published templates have them, and tools to call with them."""

from typing import Any

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.call_format import (
    CallFormat,
    Members,
    MemberSlot,
    Nested,
    Slot,
    Strings,
    ValueForm,
)
from rekindle.chat.dialects.formatted import FormatSyntax
from tests.support import dialects

NAME, ARGUMENTS, ID, INDEX = Slot.NAME, Slot.ARGUMENTS, Slot.ID, Slot.INDEX
KEY, VALUE, TYPE = MemberSlot.KEY, MemberSlot.VALUE, MemberSlot.TYPE

PYTHON_WORDS: dict[object, str] = {True: "True", False: "False", None: "None"}
DSML = "\uff5cDSML\uff5c"
M3 = "]<]minimax[>["

# As llama.cpp's collection of templates has them.
FORMATS = {
    "apertus": CallFormat(
        opening="<|tools_prefix|>[",
        call=('{"', NAME, '": ', ARGUMENTS, "}"),
        separator=", ",
        closing="]<|tools_suffix|>",
    ),
    "apriel": CallFormat(
        opening="<tool_calls>[",
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, ', "id": "', ID, '"}'),
        separator=", ",
        closing="]</tool_calls>",
    ),
    "command-r-plus": CallFormat(
        opening="Action:\n```json\n[\n    ",
        call=(
            '{\n        "tool_name": "',
            NAME,
            '",\n        "parameters": ',
            ARGUMENTS,
            "\n    }",
        ),
        separator=",\n    ",
        closing="\n]```",
        indent=4,
    ),
    "deepseek-v3.2": CallFormat(
        opening=f"<{DSML}function_calls>\n",
        call=(f'<{DSML}invoke name="', NAME, '">\n', ARGUMENTS, f"</{DSML}invoke>\n"),
        closing=f"</{DSML}function_calls>",
        members=Members(
            member=(
                f'<{DSML}parameter name="',
                KEY,
                '" string="',
                TYPE,
                '">',
                VALUE,
                f"</{DSML}parameter>\n",
            ),
            type_names={
                "string": "true",
                **dict.fromkeys(("integer", "number", "boolean", "null"), "false"),
                **dict.fromkeys(("array", "object"), "false"),
            },
        ),
    ),
    "firefunction": CallFormat(
        opening=" functools[",
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        separator=", ",
        closing="]",
    ),
    "functionary-3.2": CallFormat(call=(">>>", NAME, "\n", ARGUMENTS)),
    "gigachat": CallFormat(
        call=(
            '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "',
            NAME,
            '", "arguments": ',
            ARGUMENTS,
            "}",
        )
    ),
    "kimi-k3": CallFormat(
        opening="<|open|>tools<|sep|>",
        call=(
            '<|open|>call tool="',
            NAME,
            '" index="',
            INDEX,
            '"<|sep|>',
            ARGUMENTS,
            "<|close|>call<|sep|>",
        ),
        closing="<|close|>tools<|sep|>",
        first_index=1,
        members=Members(
            member=(
                '<|open|>argument key="',
                KEY,
                '" type="',
                TYPE,
                '"<|sep|>',
                VALUE,
                "<|close|>argument<|sep|>",
            ),
            type_names={
                "string": "string",
                "integer": "number",
                "number": "number",
                "boolean": "boolean",
                "null": "null",
                "array": "array",
                "object": "object",
            },
        ),
    ),
    "llama-4": CallFormat(
        opening="[",
        call=(NAME, ARGUMENTS),
        separator=", ",
        closing="]",
        at_start=True,
        members=Members(
            opening="(",
            member=(KEY, "=", VALUE),
            separator=", ",
            closing=")",
            value=ValueForm(strings=Strings.PYTHON, constants=PYTHON_WORDS, nested=Nested.PYTHON),
        ),
    ),
    "minicpm5": CallFormat(
        call=('<function name="', NAME, '">', ARGUMENTS, "</function>"),
        separator="\n",
        members=Members(
            member=('<param name="', KEY, '">', VALUE, "</param>"),
            value=ValueForm(
                string_marks=("<![CDATA[", "]]>"), constants=PYTHON_WORDS, nested=Nested.PYTHON
            ),
        ),
    ),
    "minimax-m1": CallFormat(
        opening="<tool_calls>\n",
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        separator="\n",
        closing="\n</tool_calls>",
    ),
    "minimax-m3": CallFormat(
        opening=f"{M3}<tool_call>\n",
        call=(f'{M3}<invoke name="', NAME, '">', ARGUMENTS, f"{M3}</invoke>\n"),
        closing=f"{M3}</tool_call>",
        members=Members(
            member=(f"{M3}<", KEY, ">", VALUE, f"{M3}</", KEY, ">"),
            value=ValueForm(nested=Nested.TAGS, element_key="item"),
        ),
    ),
    "seed": CallFormat(
        call=(
            "<seed:tool_call>\n<function=",
            NAME,
            ">\n",
            ARGUMENTS,
            "</function>\n</seed:tool_call>",
        ),
        separator="\n",
        members=Members(
            member=("<parameter=", KEY, ">", VALUE, "</parameter>\n"),
            value=ValueForm(constants=PYTHON_WORDS, nested=Nested.PYTHON),
        ),
    ),
    "solar": CallFormat(
        opening="<|tool_calls|>",
        call=(
            "<|tool_call:begin|>",
            ID,
            "<|tool_call:name|>",
            NAME,
            "<|tool_call:args|>",
            ARGUMENTS,
            "<|tool_call:end|>",
        ),
    ),
}
FAMILIES = {
    name.lower(): dialect.syntax.format
    for name, dialect in vars(dialects).items()
    if isinstance(dialect, Dialect) and isinstance(dialect.syntax, FormatSyntax)
}
ALL = {**FAMILIES, **FORMATS}

SCHEMAS: dict[str, dict[str, Any]] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "ratio": {"type": "number"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "values": {"type": "array"}},
            },
            "mode": {"enum": ["all", "any"]},
        },
        "required": ["query"],
    },
    "ping": {"type": "object", "properties": {}},
}
