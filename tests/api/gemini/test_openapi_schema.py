"""Google's schemas become JSON Schema, and JSON Schema stays as it is."""

from typing import Any

import pytest

from rekindle.api.gemini.openapi_schema import json_schema_of

JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"type": ["string", "null"], "enum": ["STRING", None]},
        "format": {"type": "string", "format": "date-time"},
        "nullable": {"anyOf": [{"type": "string"}, {"const": 1}]},
    },
    "required": ["type"],
    "$defs": {"a": {"items": {"type": "integer"}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": "TYPE_UNSPECIFIED", "description": "x"}, {"description": "x"}),
        ({"type": "INTEGER", "format": "int32"}, {"type": "integer"}),
        ({"type": "STRING", "format": "enum", "enum": ["A"]}, {"type": "string", "enum": ["A"]}),
        (
            {"type": "STRING", "nullable": True, "enum": ["a"]},
            {"type": ["string", "null"], "enum": ["a", None]},
        ),
        (
            {"any_of": [{"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        (
            {"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "1", "max_items": 3},
            {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        ),
        # Properties may have the names of keywords.
        (
            {"type": "OBJECT", "properties": {"nullable": {"type": "BOOLEAN"}}, "example": {}},
            {"type": "object", "properties": {"nullable": {"type": "boolean"}}},
        ),
        (JSON_SCHEMA, JSON_SCHEMA),
    ],
)
def test_schema(sent: dict[str, Any], meant: dict[str, Any]) -> None:
    assert json_schema_of(sent) == meant


def test_objects_of_a_reply_are_closed_at_every_depth() -> None:
    inner = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    schema = {
        "properties": {"list": {"items": inner}, "open": {**inner, "additionalProperties": True}}
    }
    closed = json_schema_of(schema, is_closed=True)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["list"]["items"]["additionalProperties"] is False
    assert closed["properties"]["open"]["additionalProperties"] is True
    assert "additionalProperties" not in json_schema_of(inner)


def test_properties_have_the_order_that_is_asked_for() -> None:
    schema = json_schema_of(
        {
            "properties": {"a": {}, "b": {}, "c": {}},
            "propertyOrdering": ["c", "unknown", "b"],
        }
    )
    assert list(schema) == ["properties"]
    assert list(schema["properties"]) == ["c", "b", "a"]
