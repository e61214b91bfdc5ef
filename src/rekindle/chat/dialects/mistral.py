"""Mistral: behind [TOOL_CALLS] a JSON list, or, since 2025, a name and [ARGS] for each call."""

from dataclasses import replace

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_calls import calls_from, list_dialect
from rekindle.chat.dialects.json_text import arguments
from rekindle.chat.dialects.lark import Form, Rules, closed, quote, repeated

OPENING, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID = r'("," SPACE? "\"id\"" SPACE? ":" SPACE? /"[a-zA-Z0-9]{9}"/)?'


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    cursor.skip_space()
    if cursor.peek() == "[":
        return calls_from(cursor.json_value("["))
    name = cursor.name()
    if cursor.accept(CALL_ID):
        cursor.name()
    cursor.accept(ARGS)
    cursor.skip_space()
    return [ReadCall(name, arguments(cursor.json_value("{")))]


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    call_id = f"({literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
    call = rules.one_of(
        "call",
        (
            f"{literal(OPENING)} {quote(name)} {call_id} {literal(ARGS)} "
            + rules.json(f"arguments_{i}", schema)
            for i, (name, schema) in enumerate(closed(schemas).items())
        ),
    )
    return rules.source(repeated(call, parallel=parallel))


_LISTED = list_dialect(
    "mistral", opening=OPENING, closing=None, form=Form(tail=f'{_ID} SPACE? "}}"')
)
LISTED = replace(_LISTED, read=reader(_walk), endings=("]", "}"))
NAMED = replace(LISTED, grammar=_grammar)


def mistral(template_source: str) -> Dialect:
    return NAMED if ARGS in template_source else LISTED
