"""Gemma 4 and FunctionGemma: objects with bare keys, and strings between special marks."""

import re
from typing import Any

from rekindle.chat.dialects.base import Dialect, ParsedCall, dialect_between
from rekindle.chat.dialects.syntax.cursor import Cursor
from rekindle.chat.dialects.syntax.json_text import dump, load
from rekindle.chat.dialects.syntax.lark import Rules, Schema, Schemas, quote, with_definitions
from rekindle.chat.dialects.syntax.members import Item, declared, separated
from rekindle.chat.dialects.syntax.parameters import resolved, types
from rekindle.chat.dialects.syntax.tagged import text_pattern

_KEY = re.compile(r"[^\s:{}\[\],<>|]{1,256}")
MAX_DEPTH = 8  # of nested schemas: some refer to themselves

_SCALAR = re.compile(r"[-+.a-zA-Z0-9]+")


def _object(cursor: Cursor, mark: str) -> dict[str, Any]:
    cursor.expect("{")
    found: dict[str, Any] = {}
    for _ in cursor.items("}"):
        key = cursor.until(mark) if cursor.accept(mark) else cursor.scan(_KEY)
        cursor.skip_space().expect(":")
        cursor.skip_space()
        found[key] = _value(cursor, mark)
    return found


def _value(cursor: Cursor, mark: str) -> Any:
    if cursor.accept(mark):
        return cursor.until(mark)
    match cursor.peek():
        case "{":
            return _object(cursor, mark)
        case "[":
            cursor.expect("[")
            return [_value(cursor, mark) for _ in cursor.items("]")]
        case _:
            return load(cursor.scan(_SCALAR))


class _ArgumentWriter:
    """Writes the grammar rules for values of one schema."""

    def __init__(self, rules: Rules, mark: str, root: Schema) -> None:
        self._rules = rules
        self._mark = mark
        self._root = root

    def value(self, name: str, schema: Schema, depth: int = 0) -> str:
        own = resolved(schema, self._root)
        choices = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return self._one_of(name, choices)
        kinds = types(own)
        if kinds == {"string"}:
            pattern = text_pattern(own)
            text = self._rules.raw_until(f"{name}_text", self._mark, pattern)
            return self._rules.add(name, f"{self._rules.literal(self._mark)} {text}")
        if kinds and not kinds & {"string", "object", "array"}:
            return self._rules.json(name, with_definitions(schema, self._root))
        if kinds == {"object"} and depth < MAX_DEPTH:
            return self._rules.add(name, self.object(f"{name}_object", own, depth + 1))
        if kinds == {"array"} and isinstance(own.get("items"), dict) and depth < MAX_DEPTH:
            item = self.value(f"{name}_item", own["items"], depth + 1)
            return self._rules.add(name, f'"[" ({item} ("," {item})*)? "]"')
        return self._anything()

    def object(self, name: str, schema: Schema, depth: int = 0) -> str:
        """Return an object with its keys sorted, as the template sorts them."""
        members = declared(schema)
        if members is None:
            self._anything()
            return "any_object"
        members.sort(key=lambda member: member.key.lower())
        items = [
            Item(
                f'{quote(member.key)} ":" ' + self.value(f"{name}_{i}_value", member.schema, depth),
                member.required,
            )
            for i, member in enumerate(members)
        ]
        written = separated(self._rules, name, items, separator='","')
        return f'"{{" {written} "}}"'

    def _one_of(self, name: str, choices: list[str]) -> str:
        mark = self._rules.literal(self._mark)
        # One lexeme with the mark: llguidance matches lexemes greedily, without backtracking.
        texts = (f"{mark} {self._rules.literal(choice + self._mark)}" for choice in choices)
        return self._rules.one_of(name, texts)

    def _anything(self) -> str:
        rules = self._rules
        text = rules.raw_until("any_text", self._mark)
        # No %json: its lexemes could not be distinguished from the text lexeme.
        scalar = r'/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/ | "true" | "false" | "null"'
        rules.add("any_member", '/[a-zA-Z_][a-zA-Z0-9_]{0,63}/ ":" any_value')
        rules.add("any_object", '"{" (any_member ("," any_member)*)? "}"')
        rules.add("any_list", '"[" (any_value ("," any_value)*)? "]"')
        string = f"{rules.literal(self._mark)} {text}"
        return rules.one_of("any_value", (string, scalar, "any_object", "any_list"))


def _dialect(opening: str, closing: str, mark: str) -> Dialect:
    def walk(cursor: Cursor, schemas: Schemas) -> list[ParsedCall]:
        cursor.expect(opening)
        cursor.skip_space().expect("call:")
        name = cursor.name()
        found = _object(cursor, mark)
        cursor.skip_space().expect(closing)
        return [ParsedCall(name, dump(found))]

    def write(rules: Rules, schemas: Schemas) -> str:
        literal = rules.literal
        call = rules.calls(
            schemas,
            lambda name, arguments: (
                f"{literal(opening)} {quote(f'call:{name}')} {arguments} {literal(closing)}"
            ),
            lambda rule, schema: _ArgumentWriter(rules, mark, schema).object(rule, schema),
        )
        return rules.repeated(call)

    return dialect_between("gemma", opening, closing, walk, write)


GEMMA4 = _dialect("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _dialect("<start_function_call>", "<end_function_call>", "<escape>")
