"""Google's schemas, a subset of OpenAPI's, as JSON Schema.

A schema that is JSON Schema already stays as it is. Tools of a Gemini client then read like those
of any other client, so their prompts share a prefix.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic.alias_generators import to_camel

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
INNER = frozenset(
    {"items", "additionalProperties", "not", "anyOf", "oneOf", "allOf", "prefixItems"}
)
# Protobuf's JSON writes 64-bit integers as strings.
COUNTS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
SPELLINGS = {
    name: to_camel(name)
    for name in (
        *("any_of", "min_items", "max_items", "min_length", "max_length"),
        *("min_properties", "max_properties", "property_ordering"),
    )
}
TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
# `format` of OpenAPI: no formats of text, so a grammar has no use for them.
NUMBER_FORMATS = frozenset({"int32", "int64", "float", "double", "enum"})
DROPPED = frozenset({"nullable", "propertyOrdering", "example"})


def json_schema_of(schema: Mapping[str, Any], *, is_closed: bool = False) -> dict[str, Any]:
    """Convert a schema. `is_closed`: objects have the listed properties alone, as Gemini's do."""
    given = {SPELLINGS.get(key, key): value for key, value in schema.items()}
    converted = {
        key: _keyword(key, value, is_closed=is_closed)
        for key, value in given.items()
        if key not in DROPPED and not _says_nothing(key, value)
    }
    if isinstance(order := given.get("propertyOrdering"), list):
        _order(converted, order)
    if given.get("nullable") is True:
        _allow_null(converted)
    if is_closed and "properties" in converted:
        converted.setdefault("additionalProperties", False)
    return converted


def _keyword(key: str, value: Any, *, is_closed: bool) -> Any:
    inner = partial(_inner, is_closed=is_closed)
    if key == "type" and isinstance(value, str):
        return value.lower() if value in TYPES else value
    if key in NAMED and isinstance(value, dict):
        return {name: inner(each) for name, each in value.items()}
    if key in INNER:
        return [inner(each) for each in value] if isinstance(value, list) else inner(value)
    if key in COUNTS and isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    return value


def _inner(value: Any, *, is_closed: bool) -> Any:
    return json_schema_of(value, is_closed=is_closed) if isinstance(value, dict) else value


def _says_nothing(key: str, value: Any) -> bool:
    if key == "type":
        return bool(value == "TYPE_UNSPECIFIED")
    return key == "format" and isinstance(value, str) and value in NUMBER_FORMATS


def _order(schema: dict[str, Any], order: list[Any]) -> None:
    properties = schema.get("properties")
    if isinstance(properties, dict):
        named = [name for name in order if isinstance(name, str) and name in properties]
        schema["properties"] = {name: properties[name] for name in (*named, *properties)}


def _allow_null(schema: dict[str, Any]) -> None:
    if isinstance(kind := schema.get("type"), str) and kind != "null":
        schema["type"] = [kind, "null"]
    if isinstance(values := schema.get("enum"), list) and None not in values:
        schema["enum"] = [*values, None]
    if isinstance(options := schema.get("anyOf"), list):
        schema["anyOf"] = [*options, {"type": "null"}]
