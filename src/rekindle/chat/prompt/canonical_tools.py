"""Tool definitions with their JSON keys in a fixed order, and their schemas.

The definitions stand near the head of a prompt: another order of keys would miss the whole
cached prefix. Values and the order of arrays are never changed. `strict` is left out: it tells a
server how to decode, and the templates of models do not know it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.chat.conversation import Tool
from rekindle.chat.dialects.syntax.lark import Schemas, anchored
from rekindle.chat.template.json_text import Json

# The order that authors use and models know; the remaining keys follow, sorted.
FUNCTION_KEYS = ("name", "description", "parameters")
SCHEMA_KEYS = ("type", "description", "properties", "required", "items", "enum")

NAMED_SCHEMAS = frozenset({"patternProperties", "$defs", "definitions", "dependentSchemas"})
PLAIN_VALUES = frozenset({"enum", "const", "default", "examples", "example"})


def canonical_definition(function: Mapping[str, Json]) -> str:
    """Return the whole `{"type": "function", "function": ...}` for `Tool.definition_json`."""
    ordered = {
        key: _schema(function[key]) if key == "parameters" else _plain(function[key])
        for key in _leading(FUNCTION_KEYS, function)
        if key != "strict"
    }
    return json.dumps({"type": "function", "function": ordered}, ensure_ascii=False)


def schemas_of(tools: Iterable[Tool]) -> Schemas:
    """Return the schemas of the parameters by the name of the tool."""
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = json.loads(tool.definition_json)["function"]
        schema = function.get("parameters") or {"type": "object"}
        for name, pattern in tool.patterns:
            schema["properties"][name]["pattern"] = anchored(pattern)
        schemas[tool.name] = schema
    return schemas


def _schema(value: Json) -> Json:
    match value:
        case dict():
            return {key: _keyword(key, value) for key in _leading(SCHEMA_KEYS, value)}
        case list():
            return [_schema(item) for item in value]
        case _:
            return value


def _keyword(key: str, schema: dict[str, Json]) -> Json:
    value = schema[key]
    if key in PLAIN_VALUES:
        return _plain(value)
    if key == "properties" and isinstance(value, dict):
        return {name: _schema(value[name]) for name in _leading(_required(schema), value)}
    if key in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _schema(value[name]) for name in sorted(value)}
    return _schema(value)


def _required(schema: dict[str, Json]) -> list[str]:
    """Return the required names. An array keeps its order when clients shuffle keys."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _plain(value: Json) -> Json:
    """Return the value with the keys of all objects sorted."""
    return json.loads(json.dumps(value, sort_keys=True))


def _leading(first: Iterable[str], members: Mapping[str, Json]) -> list[str]:
    """Return the names of all members: those in `first` in its order, then the rest sorted."""
    leading = [name for name in dict.fromkeys(first) if name in members]
    return leading + sorted(members.keys() - leading)
