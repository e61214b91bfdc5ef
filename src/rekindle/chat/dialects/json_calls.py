"""Calls that are JSON objects, and the dialects that put a list of them between two marks."""

from rekindle.chat.dialects.base import Dialect, Literal, NotACall, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_text import arguments, elements, load, members
from rekindle.chat.dialects.lark import PLAIN, Form, Rules, json_call, repeated
from rekindle.generation.request import Trigger

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")


def call_from(source: str) -> ReadCall:
    """Raises NotACall."""
    found = members(source)
    if "name" not in found and "function" in found:  # the form of OpenAI's API
        found = members(found["function"])
    name = next((load(found[key]) for key in _NAME_KEYS if key in found), None)
    if not isinstance(name, str):
        raise NotACall("no name")
    written = next((found[key] for key in _ARGUMENTS_KEYS if key in found), "{}")
    return ReadCall(name, arguments(written))


def calls_from(source: str) -> list[ReadCall]:
    """Raises NotACall."""
    return [call_from(element) for element in elements(source)]


def list_dialect(name: str, *, opening: str, closing: str | None, form: Form = PLAIN) -> Dialect:
    def walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
        cursor.expect(opening)
        cursor.skip_space()
        calls = cursor.json_value("[")
        if closing is not None:
            cursor.skip_space()
            cursor.expect(closing)
        return calls_from(calls)

    def grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
        rules = Rules(literal)
        call = json_call(rules, schemas, form)
        calls = repeated(call, parallel=parallel, separator='"," SPACE?')
        end = f"SPACE? {literal(closing)}" if closing is not None else ""
        return rules.source(f'{literal(opening)} SPACE? "[" SPACE? {calls} SPACE? "]" {end}')

    return Dialect(
        name=name,
        triggers=(Trigger(opening),),
        endings=(closing or "]",),
        read=reader(walk),
        grammar=grammar,
    )
