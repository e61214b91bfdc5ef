"""MiniMax M2: a block of <invoke> tags, each with <parameter> tags."""

from functools import partial

from rekindle.chat.dialects.base import ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.chat.dialects.syntax.parameters import arguments_json
from rekindle.chat.dialects.syntax.tagged import parameters

OPENING, CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    cursor.expect(OPENING)
    calls = []
    cursor.skip_space()
    while cursor.expect(INVOKE, CLOSING) == INVOKE:
        name = cursor.name()
        cursor.expect('">')
        calls.append(ParsedCall(name, arguments_json(_found(cursor), schemas.get(name, {}))))
        cursor.skip_space()
    return calls


def _found(cursor: Cursor) -> dict[str, str]:
    found: dict[str, str] = {}
    cursor.skip_space()
    while cursor.expect(PARAMETER, INVOKE_END) == PARAMETER:
        key = cursor.until('">')
        found[key] = cursor.until(PARAMETER_END)
        cursor.skip_space()
    return found


def _write(rules: Rules, schemas: Schemas) -> str:
    literal = rules.literal
    opening = (literal(PARAMETER), literal('">'))
    call = rules.calls(
        schemas,
        lambda name, arguments: (
            f'{literal(INVOKE)} {quote(name)} "\\">\\n" {arguments} {literal(INVOKE_END)}'
        ),
        partial(parameters, rules, opening=opening, closing=f"{PARAMETER_END}\n"),
    )
    calls = rules.repeated(call, separator='"\\n"')
    return f'{literal(OPENING)} "\\n" {calls} "\\n" {literal(CLOSING)}'


MINIMAX = dialect_between("minimax", OPENING, CLOSING, _walk, _write)
