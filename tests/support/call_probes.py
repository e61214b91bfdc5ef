"""Calls with every kind of argument, to write with a template and read back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rekindle.chat.conversation import Message, Role, Text, Tool, ToolCall

NAME, OTHER_NAME = "look_up", "send2"
QUESTION = Message(Role.USER, (Text("Wquestion"),))

# The arguments of the first tool, by type. Arguments that are not declared may be anything.
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
PROPERTIES: dict[str, dict[str, Any]] = {
    **{f"the_{name}": {"type": name, "description": f"W{name}"} for name in TYPES},
    "perhaps": {"type": ["string", "null"]},
    "flag": {"type": "boolean"},
}
OTHER_PROPERTIES = {"to": {"type": "string"}, "n": {"type": "integer"}}


@dataclass(frozen=True)
class Toolbox:
    """The tools, with some or all of their arguments declared."""

    declared: tuple[str, ...]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        properties = {name: PROPERTIES[name] for name in self.declared}
        return {
            NAME: {"type": "object", "properties": properties},
            OTHER_NAME: {"type": "object", "properties": OTHER_PROPERTIES},
        }

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(
            Tool(name, json.dumps({"type": "function", "function": _function(name, schema)}))
            for name, schema in self.schemas.items()
        )

    def declares(self, call: ToolCall) -> bool:
        """Return whether all arguments are declared."""
        declared: set[str] = set(self.schemas[call.name]["properties"])
        return declared.issuperset(json.loads(call.arguments_json))

    def allows(self, call: ToolCall) -> bool:
        """Return whether the arguments have the declared types."""
        properties = self.schemas[call.name]["properties"]
        arguments = json.loads(call.arguments_json)
        return all(
            type(value) in TYPES[declared]
            for key, value in arguments.items()
            if isinstance(declared := properties.get(key, {}).get("type"), str)
        )


def _function(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": "Wdescription", "parameters": schema}


# Some templates refuse tools that take objects or null.
TOOLBOXES = (Toolbox(tuple(PROPERTIES)), Toolbox(("the_string", "the_integer", "the_boolean")))


@dataclass(frozen=True)
class Probe:
    kind: str
    arguments: dict[str, Any]
    parts: tuple["Probe", ...] = ()  # tried one by one if the whole fails

    @property
    def call(self) -> ToolCall:
        return ToolCall("call00001", NAME, json.dumps(self.arguments, ensure_ascii=False))


OTHER_CALL = ToolCall("call00002", OTHER_NAME, json.dumps({"to": "Ada", "n": 2}))


def _typed(kind: str, json_type: str, *values: object) -> Iterator[Probe]:
    return (Probe(kind, {f"the_{json_type}": value}) for value in values)


# Closing marks of many formats: as text in an argument they must not end the call. In formats
# that write strings without quotes, their own closing mark does.
CLOSING_MARKS = (
    *("</tool_call>", "</parameter>", "</function>", "</arg_value>", "</invoke>", "</param>"),
    *("<|tool_call_end|>", "<tool_call|>", "[/TOOL_CALLS]", "]", "}", ")", "```", "]]>", '"}}]'),
    *(
        "<|im_end|>",
        "<|close|>",
        "</tool_calls>",
        '<|"|>',
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
)

SIMPLE = Probe("calls", {"the_string": "Ada", "the_integer": 7})
NESTED = Probe(
    "nested objects",
    {"the_object": {"list": [1, -2.5, "a", True, [], {}], "map": {"k": {"b": 'c\n"d"'}}}},
)
EVERYTHING = Probe(
    "calls with many arguments",
    {
        "the_string": 'Caf\u00e9 \u4f60\u597d, "quoted" it\'s <b>C:\\new</b>\nline two',
        "the_integer": -7,
        "the_number": 0.25,
        "the_boolean": True,
        "the_array": [1, "a", [True]],
        "the_object": {"key": {"inner": "value"}},
        "flag": False,
    },
)
NO_ARGUMENTS = Probe("calls without arguments", {})
CODE = Probe("line breaks", {"the_string": "def f(a):\n    return {'b': [a]}\n"})
MARKUP = Probe("markup", {"the_string": "<a href='x'>\n</a> &amp; <br/>"})
[BACKSLASHES] = _typed("backslashes", "string", "back\\slash \\n")
PROBES = (
    SIMPLE,
    EVERYTHING,
    NO_ARGUMENTS,
    CODE,
    MARKUP,
    BACKSLASHES,
    NESTED,
    *_typed("strings", "string", "Ada", "two words", "caf\u00e9 \u4f60\u597d \U0001f600"),
    *_typed("quotes", "string", 'say "hi"', "it's", "`tick`"),
    *_typed("line breaks", "string", "one\ntwo\n\nthree", "tab\there"),
    *_typed("markup", "string", "<b>bold</b>", "a < b > c"),
    *_typed("strings like JSON", "string", "42", "true", "null", '{"a": 1}', "[1]", '"x"'),
    *_typed("empty strings", "string", ""),
    *_typed("white space around strings", "string", "  x  ", "\nx\n", " "),
    *_typed("integers", "integer", 0, -7, 10**15),
    *_typed("fractions", "number", 0.5, -2.25, 1e21, 1.5e-7),
    *_typed("booleans", "boolean", *(True, False)),
    *_typed("null", "null", None),
    Probe("null for an optional string", {"perhaps": None}),
    *_typed("arrays", "array", [], [1, 2], ["a", "b c"], [[1], []], [{"a": 1}]),
    *_typed("null in arrays", "array", [None], [1, None]),
    *_typed("objects", "object", {}, {"a": 1}, {"a": {"b": ["c"]}}),
    Probe("undeclared arguments", {"first": "Ada", "second": 7, "third": [True]}),
    Probe("undeclared strings like JSON", {"first": "42"}),
    Probe("undeclared strings like JSON", {"first": "[1]"}),
    Probe(
        "closing marks",
        {"the_string": " ".join(CLOSING_MARKS)},
        tuple(_typed("closing marks", "string", *(f"a{mark}b" for mark in CLOSING_MARKS))),
    ),
)

# One of each JSON type.
FEW_PROBES = (SIMPLE, EVERYTHING, NO_ARGUMENTS, CODE, MARKUP, NESTED, *_typed("null", "null", None))
