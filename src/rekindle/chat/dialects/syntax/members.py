"""The declared members of an object, and grammars that list them in order."""

from collections.abc import Iterable
from typing import NamedTuple

from rekindle.chat.dialects.syntax.lark import Rules, Schema, declares_all


class Member(NamedTuple):
    key: str
    schema: Schema
    required: bool


def declared(schema: Schema) -> list[Member] | None:
    """Return the declared members; None: any members are allowed."""
    if not declares_all(schema):
        return None
    required = schema.get("required", ())
    return [
        Member(key, own if isinstance(own, dict) else {}, key in required)
        for key, own in schema.get("properties", {}).items()
    ]


class Item(NamedTuple):
    text: str  # Lark
    required: bool


def separated(rules: Rules, name: str, items: Iterable[Item], *, separator: str) -> str:
    """Add rules for the items in order, with separators. Optional items may be missing."""
    head, tail = '""', '""'
    for i, item in reversed(list(enumerate(items))):
        one = rules.add(f"{name}_{i}", item.text)
        head = f"{one} {tail}" if item.required else f"({one} {tail} | {head})"
        tail = f"{separator} {one} {tail}" if item.required else f"({separator} {one})? {tail}"
        head = rules.add(f"{name}_{i}_first", head)
        tail = rules.add(f"{name}_{i}_next", tail)
    return head
