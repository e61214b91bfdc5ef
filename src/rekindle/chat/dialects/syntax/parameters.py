"""Arguments that are written one by one as text instead of JSON. The schema gives their types."""

import json
from collections.abc import Mapping
from typing import Any

from rekindle.chat.dialects.syntax.json_text import NotACall, no_constant
from rekindle.chat.dialects.syntax.lark import Schema
from rekindle.chat.dialects.syntax.values import value_in

NO_WORDS: Mapping[str, Any] = {}


def value_of(text: str, schema: Schema, words: Mapping[str, Any] = NO_WORDS) -> Any:
    """Return the value of a parameter. Text stays text if the schema allows a string.

    `words` are the constants that the model writes unlike JSON. It then writes Python's lists too.
    """
    kinds = types(schema)
    if kinds == {"string"}:
        return text
    if text in words and (_fits(words[text], kinds) or (text and not kinds)):
        return words[text]
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return _python_value(text, kinds, words)
    if "string" in kinds and not _fits(value, kinds):
        return text
    return value if kinds or not isinstance(value, str) else text


def _python_value(text: str, kinds: set[str], words: Mapping[str, Any]) -> Any:
    if text.strip() in PYTHON_CONSTANTS:
        return PYTHON_CONSTANTS[text.strip()] if kinds and "string" not in kinds else text
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        value = value_in(text, words)
    except NotACall:
        return text
    return value if not kinds or _fits(value, kinds) else text


def parameter(schema: Schema, name: str) -> Schema:
    """Return the parameter's schema, or the one for undeclared parameters; {}: anything."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    if found is None:
        found = schema.get("additionalProperties")
    return resolved(found, schema) if isinstance(found, dict) else {}


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follow a `$ref` into the definitions of the root, once: one step is nearly always enough."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def types(schema: Schema) -> set[str]:
    """Return the JSON types that the schema allows; an empty set: unknown."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if isinstance(schema.get("enum"), list):
        return {type_of(value) for value in schema["enum"]}
    if "const" in schema:
        return {type_of(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            kinds = [types(choice) for choice in choices if isinstance(choice, dict)]
            return set().union(*kinds) if all(kinds) else set()
    return set()


PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # models write them instead of JSON

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = type_of(value)
    return kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
