"""Arguments that are written one by one as text instead of JSON. The schema gives their types."""

import json
from typing import Any

from rekindle.chat.dialects.syntax.json_text import dump, no_constant
from rekindle.chat.dialects.syntax.lark import Schema


def value_of(text: str, schema: Schema) -> Any:
    """Return the value of a parameter. Text stays text if the schema allows a string."""
    kinds = types(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return PYTHON_CONSTANTS.get(text.strip(), text) if kinds and "string" not in kinds else text
    if "string" in kinds and not _fits(value, kinds):
        return text
    return value if kinds or not isinstance(value, str) else text


def arguments_json(found: dict[str, str], schema: Schema) -> str:
    values = {name: value_of(text, parameter(schema, name)) for name, text in found.items()}
    return dump(values)


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
        return {_type_of(value) for value in schema["enum"]}
    if "const" in schema:
        return {_type_of(schema["const"])}
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


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = _type_of(value)
    return kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
