"""Grammars of calls with each parameter in a tag of its own, as unquoted text."""

import json
from typing import Any

from rekindle.chat.dialects.syntax.lark import Rules, Schema, quote, with_definitions
from rekindle.chat.dialects.syntax.members import declared
from rekindle.chat.dialects.syntax.parameters import resolved, types

MAX_BOUND = 1000  # picked

_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"


def parameters(
    rules: Rules, name: str, schema: Schema, *, opening: tuple[str, str], closing: str
) -> str:
    """Add rules for the parameters in the schema's order, or for any if none are declared.

    `opening` is Lark before and after the key; `closing` is the text after the value.
    """
    before, behind = opening
    members = declared(schema)
    if members is None:
        value = rules.raw_until(f"{name}_any", closing)
        any_one = rules.add(f"{name}_one", f"{before} {_ANY_KEY} {behind} {value}")
        return rules.add(name, f"{any_one}*")
    written = []
    for i, member in enumerate(members):
        value = _value(rules, f"{name}_{i}", member.schema, schema, closing)
        one = rules.add(f"{name}_{i}_one", f"{before} {quote(member.key)} {behind} {value}")
        written.append(one if member.required else f"{one}?")
    return rules.add(name, " ".join(written)) if written else ""


def _value(rules: Rules, name: str, schema: Schema, root: Schema, closing: str) -> str:
    own = resolved(schema, root)
    choices = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(choices, list) and choices:
        # One lexeme with the mark: llguidance matches lexemes greedily, without backtracking.
        return rules.one_of(name, (rules.literal(_text(c) + closing) for c in choices))
    kinds = types(own)
    if not kinds or "string" in kinds:
        return rules.raw_until(name, closing, text_pattern(own))
    value = rules.json(f"{name}_json", with_definitions(schema, root))
    return rules.add(name, f"{value} {rules.literal(closing)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_pattern(schema: Schema) -> str:
    """Return a pattern with the schema's length bounds, if they are valid and short.

    Long bounds make the grammar slow.
    """
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", MAX_BOUND)
    if types(schema) != {"string"} or not 0 <= shortest <= longest < MAX_BOUND:
        return "(?s:.*)"
    return f"(?s:.{{{shortest},{longest}}})"
