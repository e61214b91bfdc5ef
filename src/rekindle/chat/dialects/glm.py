"""GLM 4.5 and later: the name, then keys and values in alternating tags."""

from functools import partial

from rekindle.chat.dialects.base import ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.chat.dialects.syntax.parameters import arguments_json
from rekindle.chat.dialects.syntax.tagged import parameters

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    cursor.expect(OPENING)
    name = cursor.skip_space().name()
    cursor.skip_space()
    found: dict[str, str] = {}
    while cursor.expect(KEY, CLOSING) == KEY:
        key = cursor.until(KEY_END).strip()
        cursor.skip_space().expect(VALUE)
        found[key] = cursor.until(VALUE_END)
        cursor.skip_space()
    return [ParsedCall(name, arguments_json(found, schemas.get(name, {})))]


def _write(rules: Rules, schemas: Schemas) -> str:
    literal = rules.literal
    opening = (f"SPACE? {literal(KEY)}", f"{literal(KEY_END)} SPACE? {literal(VALUE)}")
    call = rules.calls(
        schemas,
        lambda name, arguments: (
            f"{literal(OPENING)} {quote(name)} {arguments} SPACE? {literal(CLOSING)}"
        ),
        partial(parameters, rules, opening=opening, closing=VALUE_END),
    )
    return rules.repeated(call)


GLM = dialect_between("glm", OPENING, CLOSING, _walk, _write)
