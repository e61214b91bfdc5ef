"""Mistral: [TOOL_CALLS] and a JSON list, or, since 2025, a name and [ARGS] for each call."""

import re
from dataclasses import replace

from rekindle.chat.dialects.base import ParsedCall
from rekindle.chat.dialects.json_calls import calls_from, list_dialect
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import arguments, elements, load, members
from rekindle.chat.dialects.syntax.lark import Form, Rules, Schemas, quote

OPENING, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ID = r'("," SPACE? "\"id\"" SPACE? ":" SPACE? /"[a-zA-Z0-9]{9}"/)?'


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    cursor.expect(OPENING)
    if cursor.skip_space().peek() == "[":
        return _listed(cursor.json_value("["))
    name = cursor.name()
    call_id = cursor.name() if cursor.accept(CALL_ID) else ""
    cursor.accept(ARGS)
    written = arguments(cursor.skip_space().json_value("{"))
    return [ParsedCall(name, written, _checked(call_id))]


def _listed(source: str) -> list[ParsedCall]:
    ids = [load(found.get("id", '""')) for found in map(members, elements(source))]
    calls = zip(calls_from(source), ids, strict=True)
    return [replace(call, id=_checked(call_id)) for call, call_id in calls]


def _checked(call_id: object) -> str:
    return call_id if isinstance(call_id, str) and _SHORT_ID.fullmatch(call_id) else ""


def _write(rules: Rules, schemas: Schemas) -> str:
    literal = rules.literal
    call_id = f"({literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
    call = rules.calls(
        schemas,
        lambda name, arguments: (
            f"{literal(OPENING)} {quote(name)} {call_id} {literal(ARGS)} {arguments}"
        ),
    )
    return rules.repeated(call)


_LISTED = list_dialect(
    "mistral", opening=OPENING, closing=None, form=Form(tail=f'{_ID} SPACE? "}}"')
)
LISTED = replace(_LISTED, walk=_walk, endings=("]", "}"))
NAMED = replace(LISTED, write=_write)
