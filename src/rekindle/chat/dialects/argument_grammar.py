"""Writes the grammar of arguments that are written one by one, constrained by their schema.

llguidance matches lexemes greedily, without backtracking. A choice is therefore one lexeme
with the mark behind it, and text without quotes ends with a suffix.
"""

import json
from collections.abc import Iterable
from typing import Any

from rekindle.chat.dialects.call_format import Members, MemberSlot, Nested, Strings
from rekindle.chat.dialects.syntax.lark import (
    Rules,
    Schema,
    fixed,
    quote,
    whole_pattern,
    with_definitions,
)
from rekindle.chat.dialects.syntax.members import Item, Member, declared, separated
from rekindle.chat.dialects.syntax.parameters import resolved, types

MAX_DEPTH = 8  # of nested schemas: some refer to themselves
MAX_BOUND = 1000  # of a text's length; picked

_ANY_TEXT = "(?s:.*)"
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/"
_ESCAPE = r"\\([\"'\\nrtbf]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_ALL = ("string", "number", "boolean", "null", "array", "object")


class ArgumentGrammar:
    """Writes rules for the arguments of one tool."""

    def __init__(self, rules: Rules, members: Members, root: Schema) -> None:
        self._rules = rules
        self._members = members
        self._form = members.value
        self._root = root
        place = members.member.index(MemberSlot.VALUE)
        self._before, self._behind = members.member[:place], members.member[place + 1 :]
        self._separator = fixed(rules, members.separator)

    def write(self, name: str) -> str:
        """Add rules for the arguments. Return Lark, with what opens and closes them."""
        opening, closing = self._members.opening, self._members.closing
        written = self._object(name, self._root, 0)
        return f"{fixed(self._rules, opening)} {written} {fixed(self._rules, closing)}"

    def _object(self, name: str, schema: Schema, depth: int) -> str:
        """Return Lark for the members of an object as arguments are written."""
        members = declared(schema)
        if members is None:
            one = self._rules.add(f"{name}_one", self._any_member(name))
            more = f"({self._separator} {one})*" if self._separator else f"{one}*"
            return f"({one} {more})?"
        items = [
            Item(self._member(f"{name}_{i}", member, depth), member.required)
            for i, member in enumerate(self._in_order(members))
        ]
        return separated(self._rules, f"{name}_list", items, separator=self._separator)

    def _in_order(self, members: list[Member]) -> list[Member]:
        if not self._members.sorted_keys:
            return members
        return sorted(members, key=lambda member: member.key.lower())

    def _member(self, name: str, member: Member, depth: int) -> str:
        own = resolved(member.schema, self._root)
        closing = self._closing(member.key)
        if MemberSlot.TYPE not in self._before:
            value = self._value(name, member.schema, closing, depth)
            return f"{self._opening(quote(member.key))} {value}"
        kinds = types(own) or set(_ALL)
        texts: dict[str, set[str]] = {}
        for kind in sorted(kinds):
            texts.setdefault(self._type_name(kind), set()).add(kind)
        variants = []
        for i, (text, group) in enumerate(texts.items()):
            schema = member.schema if group == types(own) else {"type": sorted(group)}
            value = self._value(f"{name}_{i}", schema, closing, depth)
            variants.append(f"{self._opening(quote(member.key), text)} {value}")
        return self._rules.one_of(f"{name}_typed", variants)

    def _type_name(self, kind: str) -> str:
        names = self._members.type_names
        return names.get(kind) or names.get("number" if kind == "integer" else kind, kind)

    def _any_member(self, name: str) -> str:
        closing = self._closing(None)
        texts = dict.fromkeys(self._members.type_names.values()) or {"": None}
        return self._rules.one_of(
            f"{name}_any_member",
            (
                f"{self._opening(_ANY_KEY, text)} "
                + self._value(f"{name}_any_{i}", self._any_schema(text), closing, MAX_DEPTH)
                for i, text in enumerate(texts)
            ),
        )

    def _any_schema(self, type_name: str) -> Schema:
        kinds = [kind for kind, name in self._members.type_names.items() if name == type_name]
        return {"type": kinds} if kinds else {}

    def _opening(self, key: str, type_name: str = "") -> str:
        """Return Lark for the text before a value. White space right before it is exact."""
        found = []
        for i, piece in enumerate(self._before):
            if piece is MemberSlot.KEY:
                found.append(key)
            elif isinstance(piece, MemberSlot):
                found.append(self._rules.literal(type_name))
            elif i == len(self._before) - 1 and self._form.strings is Strings.RAW:
                found.append(fixed(self._rules, piece.rstrip()))
                found.append(self._rules.literal(piece[len(piece.rstrip()) :]))
            else:
                found.append(fixed(self._rules, piece))
        return " ".join(filter(None, found))

    def _closing(self, key: str | None) -> str:
        """Return the text behind a value; None: up to a key that is not known."""
        text = ""
        for piece in self._behind:
            if piece is MemberSlot.KEY and key is None:
                return text
            text += key if piece is MemberSlot.KEY and key else str(piece)
        return text

    def _value(self, name: str, schema: Schema, closing: str, depth: int) -> str:
        """Return Lark for a value and the text behind it."""
        if self._form.strings is Strings.RAW:
            return f"{self._raw_value(name, schema, closing, depth)}"
        return f"{self._quoted_value(name, schema, depth)} {fixed(self._rules, closing)}"

    # Values without quotes: they end where the text behind them begins.

    def _raw_value(self, name: str, schema: Schema, closing: str, depth: int) -> str:
        rules = self._rules
        own = resolved(schema, self._root)
        kinds = types(own)
        text, space = closing.rstrip(), "SPACE?" if closing != closing.rstrip() else ""
        choices = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(choices, list) and choices:
            texts = (rules.literal(each + text) for c in choices for each in self._raw_texts(c))
            return f"{rules.one_of(name, dict.fromkeys(texts))} {space}"
        if not kinds or "string" in kinds or not self._is_described(own, kinds, depth):
            return f"{self._raw_text(name, own, text)} {space}"
        value = rules.one_of(name, self._alternatives(name, schema, own, depth))
        return f"{value} {rules.literal(text)} {space}"

    def _is_described(self, schema: Schema, kinds: set[str], depth: int) -> bool:
        """Return whether a value in tags can be constrained."""
        if self._form.nested is not Nested.TAGS or not kinds & {"array", "object"}:
            return True
        is_list = isinstance(schema.get("items"), dict) or "array" not in kinds
        is_object = declared(schema) is not None or "object" not in kinds
        return "type" in schema and depth < MAX_DEPTH and is_list and is_object

    def _raw_text(self, name: str, schema: Schema, closing: str) -> str:
        pattern = text_pattern(schema)
        opening, end = self._form.string_marks
        if not opening:
            return self._rules.raw_until(name, closing, pattern)
        marked = self._rules.raw_until(f"{name}_marked", end + closing.lstrip(), pattern)
        unmarked = whole_pattern(schema) or rf"([^{opening[0]}]{_ANY_TEXT})?"
        bare = self._rules.raw_until(f"{name}_bare", closing, unmarked)
        literal = self._rules.literal(opening)
        return self._rules.one_of(name, (f"{literal} {marked}", bare))

    def _raw_texts(self, value: Any) -> Iterable[str]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, bool) or value is None:
            return self._constants(value)
        return (json.dumps(value, ensure_ascii=False),)

    # Values that show where they end.

    def _quoted_value(self, name: str, schema: Schema, depth: int) -> str:
        own = resolved(schema, self._root)
        choices = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(choices, list) and choices and not any(_is_nested(c) for c in choices):
            texts = (text for choice in choices for text in self._quoted_texts(choice))
            return self._rules.one_of(name, dict.fromkeys(texts))
        if types(own):
            return self._rules.one_of(name, self._alternatives(name, schema, own, depth))
        return self._anything()

    def _alternatives(self, name: str, schema: Schema, own: Schema, depth: int) -> list[str]:
        """Return Lark for each JSON type that the schema allows."""
        for key in ("anyOf", "oneOf"):
            if "type" not in own and isinstance(own.get(key), list):
                choices = [choice for choice in own[key] if isinstance(choice, dict)]
                return [
                    self._quoted_value(f"{name}_{i}", choice, depth + 1)
                    for i, choice in enumerate(choices)
                ]
        found = []
        for kind in sorted(types(own)):
            whole = own if own is not schema else schema
            found.append(self._of_kind(f"{name}_{kind}", kind, {**whole, "type": kind}, depth))
        return found

    def _of_kind(self, name: str, kind: str, schema: Schema, depth: int) -> str:
        rules = self._rules
        if kind == "boolean":
            return " | ".join(quote(text) for c in (True, False) for text in self._constants(c))
        if kind == "null":
            return " | ".join(map(quote, self._constants(None))) or '""'
        if kind == "string" and self._form.strings is not Strings.JSON:
            return self._string(name, schema)
        if kind in ("array", "object") and self._form.nested is not Nested.JSON:
            return self._nested(name, kind, schema, depth)
        return rules.json(name, with_definitions(schema, self._root))

    def _string(self, name: str, schema: Schema) -> str:
        rules = self._rules
        if self._form.strings is Strings.MARKED:
            opening, closing = self._form.string_marks
            text = rules.raw_until(f"{name}_text", closing, text_pattern(schema))
            return f"{rules.literal(opening)} {text}"
        double = rules.json(f"{name}_double", with_definitions(schema, self._root))
        if whole_pattern(schema) is not None:
            return double
        return f"{double} | {_single_quoted(schema)}"

    def _quoted_texts(self, value: Any) -> list[str]:
        if isinstance(value, bool) or value is None:
            return [quote(text) for text in self._constants(value)]
        if not isinstance(value, str):
            return [quote(json.dumps(value))]
        if self._form.strings is Strings.MARKED:
            opening, closing = self._form.string_marks
            return [f"{self._rules.literal(opening)} {self._rules.literal(value + closing)}"]
        texts = [json.dumps(value, ensure_ascii=False)]
        if Strings.PYTHON is self._form.strings or Nested.PYTHON is self._form.nested:
            texts.append(repr(value))
        return [quote(text) for text in texts]

    def _constants(self, value: object) -> list[str]:
        """Return the spellings of a constant. Models write JSON's as well."""
        own = [text for key, text in self._form.constants.items() if key is value]
        texts = dict.fromkeys(own)  # none: the template does not write it
        texts |= {text: None for text, each in _JSON_CONSTANTS.items() if each is value}
        return [text for text in texts if text]

    def _nested(self, name: str, kind: str, schema: Schema, depth: int) -> str:
        rules, comma = self._rules, self._comma
        if self._form.nested is Nested.TAGS:
            return self._in_tags(name, kind, schema, depth)
        if depth >= MAX_DEPTH:
            return self._any_nested(kind)
        if kind == "array":
            if not isinstance(schema.get("items"), dict):
                return self._any_nested(kind)
            item = self._quoted_value(f"{name}_item", schema["items"], depth + 1)
            return f'"[" {_repeated(item, comma, schema)} "]"'
        members = declared(schema)
        if members is None:
            return self._any_nested(kind)
        items = [
            Item(
                f"{self._key(f'{name}_{i}_key', member.key)} "
                + self._quoted_value(f"{name}_{i}_value", member.schema, depth + 1),
                member.required,
            )
            for i, member in enumerate(self._in_order(members))
        ]
        return f'"{{" {separated(rules, f"{name}_members", items, separator=comma)} "}}"'

    def _in_tags(self, name: str, kind: str, schema: Schema, depth: int) -> str:
        if kind == "object":
            return self._object(name, schema, depth + 1)
        element = Member(self._form.element_key, schema["items"], required=True)
        item = self._rules.add(f"{name}_item", self._member(f"{name}_element", element, depth + 1))
        return _repeated(item, self._separator, schema)

    @property
    def _comma(self) -> str:
        return '","' if self._form.nested is Nested.BARE else '", "'

    def _key(self, name: str, key: str) -> str:
        if self._form.nested is Nested.BARE:
            return quote(f"{key}:")
        texts = dict.fromkeys((f"{key!r}: ", f"{json.dumps(key, ensure_ascii=False)}: "))
        return self._rules.one_of(name, map(quote, texts))

    def _any_nested(self, kind: str) -> str:
        self._anything()
        return "any_object" if kind == "object" else "any_list"

    def _anything(self) -> str:
        """Return the rule for any value."""
        rules, form, comma = self._rules, self._form, self._comma
        if form.nested is Nested.JSON and form.strings is Strings.JSON:
            return rules.json("any_value", {})
        # No %json: its lexemes could not be distinguished from the text lexeme.
        if form.strings is Strings.MARKED:
            opening, closing = form.string_marks
            string = f"{rules.literal(opening)} {rules.raw_until('any_text', closing)}"
        else:
            string = f"{_double_quoted()} | {_single_quoted({})}"
        bare = form.nested is Nested.BARE
        key = '/[a-zA-Z_][a-zA-Z0-9_]{0,63}/ ":"' if bare else '(any_string) ": "'
        rules.add("any_string", string)
        rules.add("any_member", f"{key} any_value")
        rules.add("any_object", f'"{{" (any_member ({comma} any_member)*)? "}}"')
        rules.add("any_list", f'"[" (any_value ({comma} any_value)*)? "]"')
        words = [quote(text) for value in (True, False, None) for text in self._constants(value)]
        return rules.one_of("any_value", ("any_string", _NUMBER, *words, "any_object", "any_list"))


def text_pattern(schema: Schema) -> str:
    """Return a pattern with the schema's length bounds, if they are valid and short.

    Long bounds make the grammar slow. A pattern of the whole text wins.
    """
    if (pattern := whole_pattern(schema)) is not None:
        return pattern
    bounds = _length_bounds(schema)
    return f"(?s:.{bounds})" if bounds else _ANY_TEXT


def _length_bounds(schema: Schema) -> str:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", MAX_BOUND)
    if types(schema) != {"string"} or not 0 <= shortest <= longest < MAX_BOUND:
        return ""
    return f"{{{shortest},{longest}}}"


def _single_quoted(schema: Schema) -> str:
    return rf"/'([^'\\\x00-\x08\x0b-\x1f]|{_ESCAPE}){_length_bounds(schema) or '*'}'/"


def _double_quoted() -> str:
    return rf'/"([^"\\\x00-\x1f]|{_ESCAPE})*"/'


def _repeated(item: str, comma: str, schema: Schema) -> str:
    """Return Lark for the items of a list, with the schema's bounds if they are short."""
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    fewest = fewest if isinstance(fewest, int) and 0 <= fewest < MAX_BOUND else 0
    if isinstance(most, int) and max(fewest, 1) <= most < MAX_BOUND:
        more = f"({comma} {item}){{{max(fewest - 1, 0)},{most - 1}}}"
    else:
        more = f"({comma} {item})*" if fewest < 2 else f"({comma} {item}){{{fewest - 1},}}"
    return f"{item} {more}" if fewest else f"({item} {more})?"


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | dict)
