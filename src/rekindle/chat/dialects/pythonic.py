"""LFM2 and others: calls in Python syntax, with keyword arguments only."""

import re
from functools import partial
from typing import Any

from rekindle.chat.dialects.base import Dialect, ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import NotACall, dump
from rekindle.chat.dialects.syntax.lark import Rules, Schema, Schemas, quote, with_definitions
from rekindle.chat.dialects.syntax.members import Item, declared, separated
from rekindle.chat.dialects.syntax.parameters import PYTHON_CONSTANTS, resolved, types

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"[-+0-9.eE]+")
_STRING = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.DOTALL) for quote in "\"'"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CONSTANTS = {**PYTHON_CONSTANTS, "true": True, "false": False, "null": None}


def _calls(cursor: Cursor) -> list[ParsedCall]:
    if cursor.peek() != "[":
        return [_call(cursor)]
    cursor.expect("[")
    return [_call(cursor) for _ in cursor.items("]")]


def _call(cursor: Cursor) -> ParsedCall:
    name = cursor.scan(_WORD)
    cursor.expect("(")
    found: dict[str, Any] = {}
    for _ in cursor.items(")"):
        key = cursor.scan(_WORD)
        cursor.skip_space().expect("=")
        found[key] = _value(cursor.skip_space())
    return ParsedCall(name, dump(found))


def _value(cursor: Cursor) -> Any:
    match cursor.peek():
        case "[":
            cursor.expect("[")
            return [_value(cursor) for _ in cursor.items("]")]
        case "{":
            return _dict(cursor)
        case '"' | "'" as mark:
            cursor.expect(mark)
            text = "" if cursor.sees(mark) else cursor.scan(_STRING[mark])
            cursor.expect(mark)
            return _unescaped(text)
        case sign if sign.isdigit() or sign in "-+.":
            return _number(cursor.scan(_NUMBER))
    word = cursor.scan(_WORD)
    if word not in _CONSTANTS:
        raise NotACall("no value")
    return _CONSTANTS[word]


def _dict(cursor: Cursor) -> dict[str, Any]:
    cursor.expect("{")
    found = {}
    for _ in cursor.items("}"):
        key = _value(cursor)
        cursor.skip_space().expect(":")
        if not isinstance(key, str):
            raise NotACall("a key is not a string")
        found[key] = _value(cursor.skip_space())
    return found


def _number(text: str) -> int | float:
    try:
        return int(text) if text.lstrip("-+").isdigit() else float(text)
    except ValueError:
        raise NotACall("no number") from None


def _unescaped(text: str) -> str:
    text = _ESCAPE.sub(lambda match: _character(match[1]), text)
    # Two \u escapes of a surrogate pair become one character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: str) -> str:
    return chr(int(escape[1:], 16)) if len(escape) > 1 else _CONTROL.get(escape, escape)


def _write_value(rules: Rules, name: str, schema: Schema, root: Schema) -> str:
    """Add a rule for a value: JSON, with Python's constants."""
    kinds = types(resolved(schema, root))
    constants = {"boolean": '"True" | "False"', "null": '"None"'}
    texts = [text for kind, text in constants.items() if kind in kinds]
    if texts and kinds <= constants.keys() and "enum" not in schema and "const" not in schema:
        return rules.one_of(name, texts)
    return rules.json(name, with_definitions(schema, root))


def _arguments(rules: Rules, name: str, schema: Schema) -> str:
    members = declared(schema)
    if members is None:
        value = rules.json(f"{name}_any", {})
        one = rules.add(f"{name}_one", f'/[a-z_][a-z0-9_]{{0,31}}/ "=" {value}')
        return f'({one} (", " {one})*)?'
    items = [
        Item(
            f'{quote(member.key)} "=" ' + _write_value(rules, f"{name}_{i}", member.schema, schema),
            member.required,
        )
        for i, member in enumerate(members)
    ]
    return separated(rules, f"{name}_list", items, separator='", "')


def _dialect(name: str, opening: str, closing: str, *, listed: bool) -> Dialect:
    def walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
        cursor.expect(opening)
        calls = _calls(cursor.skip_space())
        cursor.skip_space().expect(closing)
        return calls

    def write(rules: Rules, schemas: Schemas) -> str:
        calls = rules.calls(
            schemas,
            lambda name, arguments: f'{quote(name)} "(" {arguments} ")"',
            partial(_arguments, rules),
        )
        if listed:
            calls = rules.repeated(calls, separator='", "')
            calls = f'"[" {calls} "]"'
        return f"{rules.literal(opening)} SPACE? {calls} SPACE? {rules.literal(closing)}"

    return dialect_between(name, opening, closing, walk, write)


LFM2 = _dialect("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", listed=True)
# Gemma 3 has no format of its own, but some templates ask for Python in such a block.
TOOL_CODE = _dialect("gemma", "```tool_code", "```", listed=False)
