"""Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS: a tag per function and per parameter."""

from functools import partial

from rekindle.chat.dialects.base import Dialect, ParsedCall
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.chat.dialects.syntax.parameters import arguments_json
from rekindle.chat.dialects.syntax.tagged import parameters
from rekindle.generation.request import Trigger

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _call(cursor: Cursor, schemas: Schemas) -> ParsedCall:
    cursor.expect(FUNCTION)
    name = cursor.name()
    cursor.expect(">")
    found: dict[str, str] = {}
    cursor.skip_space()
    while cursor.expect(PARAMETER, FUNCTION_END) == PARAMETER:
        key = cursor.until(">")
        # The format puts a line break at each end.
        found[key] = _value(cursor).removeprefix("\n").removesuffix("\n")
        cursor.skip_space()
    return ParsedCall(name, arguments_json(found, schemas.get(name, {})))


def _value(cursor: Cursor) -> str:
    """Read a value up to another tag of the call. A closing tag alone may be part of it."""
    value = ""
    while True:
        value += cursor.until(PARAMETER_END)
        behind = cursor.position
        cursor.skip_space()
        if cursor.sees(PARAMETER, FUNCTION_END):
            return value
        cursor.position = behind
        value += PARAMETER_END


def _dialect(opening: str, closing: str, *, line_break: str) -> Dialect:
    def walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
        opened = cursor.accept(opening)
        call = _call(cursor.skip_space(), schemas)
        if opened:
            cursor.skip_space().expect(closing)
        return [call]

    def write(rules: Rules, schemas: Schemas) -> str:
        literal = rules.literal
        before_value = (literal(PARAMETER), literal(f">{line_break}"))
        behind_value = f"{line_break}{PARAMETER_END}\n"
        function = rules.calls(
            schemas,
            lambda name, arguments: f'{literal(FUNCTION)} {quote(name)} ">\\n" {arguments}',
            partial(parameters, rules, opening=before_value, closing=behind_value),
            name="function",
        )
        end = f'{literal(FUNCTION_END)} "\\n" {literal(closing)}'
        call = rules.add("call", f'({literal(opening)} "\\n")? {function} {end}')
        return rules.repeated(call)

    return Dialect(
        name="qwen_xml",
        triggers=(Trigger(opening), Trigger(FUNCTION)),
        endings=(closing, FUNCTION_END),
        walk=walk,
        write=write,
        # Qwen3-Coder sometimes leaves out the opening tag, but writes this one.
        hidden_at_edges=(closing,),
    )


QWEN_XML = _dialect("<tool_call>", "</tool_call>", line_break="\n")
SEED = _dialect("<seed:tool_call>", "</seed:tool_call>", line_break="")
