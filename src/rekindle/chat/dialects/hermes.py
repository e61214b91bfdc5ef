"""Hermes, Qwen 2.5 and 3, and the many that copied them: a JSON object in <tool_call> tags.

`generic` is the same: it is what `toolless` tells models to write.
"""

from dataclasses import replace

from rekindle.chat.dialects.base import Dialect, Literal, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_calls import call_from
from rekindle.chat.dialects.lark import Rules, json_call, repeated
from rekindle.generation.request import Trigger

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    cursor.expect(OPENING)
    cursor.skip_space()
    call = cursor.json_value("{")
    cursor.skip_space()
    cursor.expect(CLOSING)
    return [call_from(call)]


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    call = json_call(rules, schemas)
    tagged = f"{literal(OPENING)} SPACE? {call} SPACE? {literal(CLOSING)}"
    return rules.source(repeated(rules.add("tagged", tagged), parallel=parallel))


HERMES = Dialect(
    name="hermes",
    triggers=(Trigger(OPENING),),
    endings=(CLOSING,),
    read=reader(_walk),
    grammar=_grammar,
)
GENERIC = replace(HERMES, name="generic")
