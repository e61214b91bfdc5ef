"""Functionary 3.1, and Llama 3 in its custom format: JSON arguments in a tag with the name."""

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_text import arguments
from rekindle.chat.dialects.lark import Rules, closed, quote, repeated
from rekindle.generation.request import Trigger

OPENING, CLOSING = "<function=", "</function>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    name = cursor.name()
    cursor.expect(">")
    cursor.skip_space()
    written = arguments(cursor.json_value("{"))
    cursor.skip_space()
    cursor.expect(CLOSING)
    return [ReadCall(name, written)]


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    call = rules.one_of(
        "call",
        (
            f'{literal(OPENING)} {quote(name)} ">" {rules.json(f"arguments_{i}", schema)}'
            f" {literal(CLOSING)}"
            for i, (name, schema) in enumerate(closed(schemas).items())
        ),
    )
    return rules.source(repeated(call, parallel=parallel))


FUNCTIONARY = Dialect(
    name="functionary",
    triggers=(Trigger(OPENING),),
    endings=(CLOSING,),
    read=reader(_walk),
    grammar=_grammar,
)
