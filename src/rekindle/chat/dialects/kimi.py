"""Kimi K2: a section of calls, each with an id that contains the name, and JSON arguments."""

import re

from rekindle.chat.dialects.base import Dialect, ParsedCall
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import NotACall, arguments
from rekindle.chat.dialects.syntax.lark import Rules, Schemas, quote
from rekindle.generation.request import Trigger

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    if cursor.accept(SECTION_BEGIN):
        cursor.skip_space()
    cursor.expect(CALL_BEGIN)
    call_id = _ID.fullmatch(cursor.skip_space().name())
    cursor.skip_space().expect(ARGUMENTS)
    written = arguments(cursor.skip_space().json_value("{"))
    cursor.skip_space().expect(CALL_END)
    if call_id is None:
        raise NotACall("no name in the id")
    return [ParsedCall(call_id[1], written)]


def _write(rules: Rules, schemas: Schemas) -> str:
    literal = rules.literal
    call = rules.calls(
        schemas,
        lambda name, arguments: (
            f"{literal(CALL_BEGIN)} {quote(f'functions.{name}:')} /[0-9]{{1,3}}/"
            f" {literal(ARGUMENTS)} {arguments} {literal(CALL_END)}"
        ),
    )
    return f"({literal(SECTION_BEGIN)})? {rules.repeated(call)} {literal(SECTION_END)}"


KIMI = Dialect(
    name="kimi",
    triggers=(Trigger(SECTION_BEGIN), Trigger(CALL_BEGIN)),
    endings=(CALL_END,),
    walk=_walk,
    write=_write,
    hidden=(SECTION_END,),
)
