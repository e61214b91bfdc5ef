"""Functionary 3.1, and Llama 3 in its custom format: JSON arguments in a tag with the name."""

from rekindle.chat.dialects.base import ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import arguments
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote

OPENING, CLOSING = "<function=", "</function>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    cursor.expect(OPENING)
    name = cursor.name()
    cursor.expect(">")
    written = arguments(cursor.skip_space().json_value("{"))
    cursor.skip_space().expect(CLOSING)
    return [ParsedCall(name, written)]


def _write(rules: Rules, schemas: Schemas) -> str:
    call = rules.calls(
        schemas,
        lambda name, arguments: (
            f'{rules.literal(OPENING)} {quote(name)} ">" {arguments} {rules.literal(CLOSING)}'
        ),
    )
    return rules.repeated(call)


FUNCTIONARY = dialect_between("functionary", OPENING, CLOSING, _walk, _write)
