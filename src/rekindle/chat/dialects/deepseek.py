"""DeepSeek: V3 and R1 put the arguments into a Markdown block, V3.1 writes them bare.

Its marks contain a fullwidth bar, and a block character instead of the underscore.
"""

from dataclasses import replace

from rekindle.chat.dialects.base import Dialect, Literal, ParsedCall, Schemas
from rekindle.chat.dialects.syntax.cursor import Cursor, reader
from rekindle.chat.dialects.syntax.json_text import arguments
from rekindle.chat.dialects.syntax.lark import Rules, quote, repeated
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


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    form = "{name} {separator} {arguments} SPACE?"
    return _source(schemas, form, literal, parallel=parallel)


def _fenced_grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    form = r'"function" {separator} {name} "\n```json\n" {arguments} "\n```"'
    return _source(schemas, form, literal, parallel=parallel)


def _source(schemas: Schemas, form: str, literal: Literal, *, parallel: bool) -> str:
    rules = Rules(literal)
    written = rules.calls(
        schemas,
        lambda name, arguments: form.format(
            name=quote(name), separator=literal(SEPARATOR), arguments=arguments
        ),
        name="written",
    )
    call = rules.add("call", f"{literal(CALL_BEGIN)} {written} {literal(CALL_END)}")
    calls = repeated(call, parallel=parallel)
    return rules.source(f"({literal(CALLS_BEGIN)})? {calls} SPACE? {literal(CALLS_END)}")


BARE = Dialect(
    name="deepseek",
    triggers=(Trigger(CALLS_BEGIN), Trigger(CALL_BEGIN)),
    endings=(CALL_END,),
    read=reader(_walk),
    grammar=_grammar,
    hidden=(CALLS_END,),
)
FENCED = replace(BARE, grammar=_fenced_grammar)
