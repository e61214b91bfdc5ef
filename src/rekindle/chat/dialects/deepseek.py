"""DeepSeek: V3 and R1 put the arguments into a Markdown block, V3.1 writes them bare.

Its marks contain a fullwidth bar, and a block character instead of the underscore.
"""

from dataclasses import replace
from functools import partial

from rekindle.chat.dialects.base import Dialect, ParsedCall
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import arguments
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.generation.request import Trigger


def _mark(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS_BEGIN, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL_BEGIN, CALL_END = _mark("tool call begin"), _mark("tool call end")
SEPARATOR = _mark("tool sep")
FENCE = "```"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    if cursor.accept(CALLS_BEGIN):
        cursor.skip_space()
    cursor.expect(CALL_BEGIN)
    name = cursor.name()
    cursor.skip_space().expect(SEPARATOR)
    if cursor.skip_space().peek() != "{":  # V3: the type stood first, which is always "function"
        name = cursor.name()
    fenced = cursor.skip_space().accept(f"{FENCE}json", FENCE)
    written = arguments(cursor.skip_space().json_value("{"))
    if fenced:
        cursor.skip_space().accept(FENCE)
    cursor.skip_space().expect(CALL_END)
    return [ParsedCall(name, written)]


def _write(rules: Rules, schemas: Schemas, form: str) -> str:
    literal = rules.literal
    written = rules.calls(
        schemas,
        lambda name, arguments: form.format(
            name=quote(name), separator=literal(SEPARATOR), arguments=arguments
        ),
        name="written",
    )
    call = rules.add("call", f"{literal(CALL_BEGIN)} {written} {literal(CALL_END)}")
    return f"({literal(CALLS_BEGIN)})? {rules.repeated(call)} SPACE? {literal(CALLS_END)}"


_BARE = "{name} {separator} {arguments} SPACE?"
_FENCED = r'"function" {separator} {name} "\n```json\n" {arguments} "\n```"'


BARE = Dialect(
    name="deepseek",
    triggers=(Trigger(CALLS_BEGIN), Trigger(CALL_BEGIN)),
    endings=(CALL_END,),
    walk=_walk,
    write=partial(_write, form=_BARE),
    hidden=(CALLS_END,),
)
FENCED = replace(BARE, write=partial(_write, form=_FENCED))
