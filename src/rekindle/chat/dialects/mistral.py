"""Mistral: behind [TOOL_CALLS] a JSON list, or, since 2025, a name and [ARGS] for each call."""

import re
from dataclasses import replace

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_calls import calls_from, list_dialect
from rekindle.chat.dialects.json_text import arguments, elements, load, members
from rekindle.chat.dialects.lark import Form, Rules, closed, quote, repeated

OPENING, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ID = r'("," SPACE? "\"id\"" SPACE? ":" SPACE? /"[a-zA-Z0-9]{9}"/)?'


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    cursor.skip_space()
    if cursor.peek() == "[":
        return _listed(cursor.json_value("["))
    name = cursor.name()
    call_id = cursor.name() if cursor.accept(CALL_ID) else ""
    cursor.accept(ARGS)
    cursor.skip_space()
    return [ReadCall(name, arguments(cursor.json_value("{")), _checked(call_id))]


def _listed(source: str) -> list[ReadCall]:
    ids = [load(found.get("id", '""')) for found in map(members, elements(source))]
    calls = zip(calls_from(source), ids, strict=True)
    return [replace(call, id=_checked(call_id)) for call, call_id in calls]


def _checked(call_id: object) -> str:
    return call_id if isinstance(call_id, str) and _SHORT_ID.fullmatch(call_id) else ""


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
