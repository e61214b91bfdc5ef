"""MiniMax M2: <invoke> tags with a <parameter> each, in a block of their own."""

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.lark import Rules, closed, quote, repeated
from rekindle.chat.dialects.parameters import arguments_json
from rekindle.chat.dialects.tagged import parameters
from rekindle.generation.request import Trigger

OPENING, CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    calls = []
    cursor.skip_space()
    while cursor.expect(INVOKE, CLOSING) == INVOKE:
        name = cursor.name()
        cursor.expect('">')
        calls.append(ReadCall(name, arguments_json(_found(cursor), schemas.get(name, {}))))
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


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    calls = []
    for i, (name, schema) in enumerate(closed(schemas).items()):
        written = parameters(
            rules,
            f"arguments_{i}",
            schema,
            opening=(literal(PARAMETER), literal('">')),
            closing=f"{PARAMETER_END}\n",
        )
        calls.append(f'{literal(INVOKE)} {quote(name)} "\\">\\n" {written} {literal(INVOKE_END)}')
    call = repeated(rules.one_of("call", calls), parallel=parallel, separator='"\\n"')
    return rules.source(f'{literal(OPENING)} "\\n" {call} "\\n" {literal(CLOSING)}')


MINIMAX = Dialect(
    name="minimax",
    triggers=(Trigger(OPENING),),
    endings=(CLOSING,),
    read=reader(_walk),
    grammar=_grammar,
)
