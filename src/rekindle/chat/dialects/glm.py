"""GLM 4.5 and later: the name, then keys and values in tags that take turns."""

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.lark import Rules, closed, quote, repeated
from rekindle.chat.dialects.parameters import arguments_json
from rekindle.chat.dialects.tagged import parameters
from rekindle.generation.request import Trigger

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    cursor.skip_space()
    name = cursor.name()
    cursor.skip_space()
    found: dict[str, str] = {}
    while cursor.expect(KEY, CLOSING) == KEY:
        key = cursor.until(KEY_END).strip()
        cursor.skip_space()
        cursor.expect(VALUE)
        found[key] = cursor.until(VALUE_END)
        cursor.skip_space()
    return [ReadCall(name, arguments_json(found, schemas.get(name, {})))]


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    calls = []
    for i, (name, schema) in enumerate(closed(schemas).items()):
        written = parameters(
            rules,
            f"arguments_{i}",
            schema,
            opening=(f"SPACE? {literal(KEY)}", f"{literal(KEY_END)} SPACE? {literal(VALUE)}"),
            closing=VALUE_END,
        )
        calls.append(f"{literal(OPENING)} {quote(name)} {written} SPACE? {literal(CLOSING)}")
    return rules.source(repeated(rules.one_of("call", calls), parallel=parallel))


GLM = Dialect(
    name="glm",
    triggers=(Trigger(OPENING),),
    endings=(CLOSING,),
    read=reader(_walk),
    grammar=_grammar,
)
