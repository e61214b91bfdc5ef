"""Calls that are JSON objects, and the dialects that put them between two marks.

Hermes, Qwen 2.5 and 3, and the many that copied them write one object; others write a list.
`generic` is the form that `toolless` asks models for.
"""

from dataclasses import replace

from rekindle.chat.dialects.base import Dialect, ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import NotACall, arguments, elements, load, members
from rekindle.chat.dialects.syntax.lark import PLAIN, Form, Rules, Schemas, json_call

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")


def call_from(source: str) -> ParsedCall:
    """Return the call in a JSON object. Raises NotACall."""
    found = members(source)
    if "name" not in found and "function" in found:  # the form of OpenAI's API
        found = members(found["function"])
    name = next((load(found[key]) for key in _NAME_KEYS if key in found), None)
    if not isinstance(name, str):
        raise NotACall("no name")
    written = next((found[key] for key in _ARGUMENTS_KEYS if key in found), "{}")
    return ParsedCall(name, arguments(written))


def calls_from(source: str) -> list[ParsedCall]:
    """Return the calls in a JSON array. Raises NotACall."""
    return [call_from(element) for element in elements(source)]


def object_dialect(name: str, *, opening: str, closing: str) -> Dialect:
    """Return a dialect with a JSON object between marks for each call."""

    def walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
        cursor.expect(opening)
        call = cursor.skip_space().json_value("{")
        cursor.skip_space().expect(closing)
        return [call_from(call)]

    def write(rules: Rules, schemas: Schemas) -> str:
        call = json_call(rules, schemas)
        tagged = f"{rules.literal(opening)} SPACE? {call} SPACE? {rules.literal(closing)}"
        return rules.repeated(rules.add("tagged", tagged))

    return dialect_between(name, opening, closing, walk, write)


def list_dialect(name: str, *, opening: str, closing: str | None, form: Form = PLAIN) -> Dialect:
    """Return a dialect with a JSON list of calls. `closing` None: the list ends the turn."""

    def walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
        cursor.expect(opening)
        calls = cursor.skip_space().json_value("[")
        if closing is not None:
            cursor.skip_space().expect(closing)
        return calls_from(calls)

    def write(rules: Rules, schemas: Schemas) -> str:
        calls = rules.repeated(json_call(rules, schemas, form), separator='"," SPACE?')
        end = f"SPACE? {rules.literal(closing)}" if closing is not None else ""
        return f'{rules.literal(opening)} SPACE? "[" SPACE? {calls} SPACE? "]" {end}'

    return dialect_between(name, opening, closing or "]", walk, write)


_CALL_ID = r'"\"tool_call_id\"" SPACE? ":" SPACE? /"[0-9]{1,3}"/ "," SPACE?'
_NUMBERED = Form(head=rf'"{{" SPACE? {_CALL_ID} "\"tool_name\""', arguments_key="parameters")

HERMES = object_dialect("hermes", opening="<tool_call>", closing="</tool_call>")
GENERIC = replace(HERMES, name="generic")
COMMAND_R = list_dialect(
    "command_r", opening="<|START_ACTION|>", closing="<|END_ACTION|>", form=_NUMBERED
)
NEMOTRON = list_dialect("nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>")
GRANITE = list_dialect("granite", opening="<|tool_call|>", closing=None)
PHI = list_dialect("granite", opening="<|tool_call|>", closing="<|/tool_call|>")
