"""Llama 3.1 to 3.3: a bare JSON object where the reply begins, or after <|python_tag|>."""

from rekindle.chat.dialects.base import Dialect, ParsedCall
from rekindle.chat.dialects.json_calls import call_from
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import NotACall, members
from rekindle.chat.dialects.syntax.lark import Form, Rules, Schemas, json_call, quote
from rekindle.generation.request import Trigger

PYTHON_TAG = "<|python_tag|>"

# With a brace alone as trigger, every answer in JSON would be read as a call.
_NAMED = tuple(f'{brace}"name"' for brace in ("{", "{ ", "{\n", "{\n  ", "{\n    "))
_TYPED = ('{"type": "function"', '{"type":"function"')
_BEGINNINGS = _NAMED + _TYPED


def _walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
    if not cursor.accept(PYTHON_TAG):
        cursor.accept(";")
    source = cursor.skip_space().json_value("{")
    if not members(source).keys() & {"parameters", "arguments", "function"}:
        raise NotACall("no arguments")
    return [call_from(source)]


def _write(rules: Rules, schemas: Schemas) -> str:
    typed = (rf'{quote(each)} "," SPACE? "\"name\""' for each in _TYPED)
    head = rules.one_of("head", (*map(quote, _NAMED), *typed))
    call = json_call(rules, schemas, Form(head, arguments_key="parameters"))
    calls = rules.repeated(call, separator='"; "')
    return f"({rules.literal(PYTHON_TAG)})? {calls}"


LLAMA3 = Dialect(
    name="llama3",
    triggers=(
        Trigger(PYTHON_TAG),
        *(Trigger(beginning, at_start=True) for beginning in _BEGINNINGS),
        # Several calls are joined like this. The text after a call still counts as the start.
        *(Trigger(f"; {beginning}", at_start=True) for beginning in _BEGINNINGS),
    ),
    endings=("}",),
    walk=_walk,
    write=_write,
)
