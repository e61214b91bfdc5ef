"""Kimi K2: a section of calls, each with an id that tells the name, and JSON arguments."""

import re

from rekindle.chat.dialects.base import Dialect, Literal, NotACall, ReadCall, Schemas
from rekindle.chat.dialects.cursor import Cursor, reader
from rekindle.chat.dialects.json_text import arguments
from rekindle.chat.dialects.lark import Rules, closed, quote, repeated
from rekindle.generation.request import Trigger

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _walk(cursor: Cursor, schemas: Schemas) -> list[ReadCall]:
    if cursor.accept(SECTION_BEGIN):
        cursor.skip_space()
    cursor.expect(CALL_BEGIN)
    cursor.skip_space()
    call_id = _ID.fullmatch(cursor.name())
    cursor.skip_space()
    cursor.expect(ARGUMENTS)
    cursor.skip_space()
    written = arguments(cursor.json_value("{"))
    cursor.skip_space()
    cursor.expect(CALL_END)
    if call_id is None:
        raise NotACall("no name in the id")
    return [ReadCall(call_id[1], written)]


def _grammar(schemas: Schemas, *, parallel: bool, literal: Literal) -> str:
    rules = Rules(literal)
    call = rules.one_of(
        "call",
        (
            f"{literal(CALL_BEGIN)} {quote(f'functions.{name}:')} /[0-9]{{1,3}}/"
            f" {literal(ARGUMENTS)} {rules.json(f'arguments_{i}', schema)} {literal(CALL_END)}"
            for i, (name, schema) in enumerate(closed(schemas).items())
        ),
    )
    calls = repeated(call, parallel=parallel)
    return rules.source(f"({literal(SECTION_BEGIN)})? {calls} {literal(SECTION_END)}")


KIMI = Dialect(
    name="kimi",
    triggers=(Trigger(SECTION_BEGIN), Trigger(CALL_BEGIN)),
    endings=(CALL_END,),
    read=reader(_walk),
    grammar=_grammar,
    hidden=(SECTION_END,),
)
