"""A client that writes its JSON keys in another order has the same tools."""

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.prompt.canonical_tools import canonical_definition

NAMES = st.sampled_from(["type", "properties", "required", "items", "b", "a", "\u00e9", "default"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
)


def schemas_around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(NAMES, inner, max_size=4)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "string"]) | VALUES,
            "description": st.text(),
            "properties": named | VALUES,
            "required": st.lists(NAMES) | VALUES,
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "enum": st.lists(VALUES, max_size=3),
            "default": VALUES,
            "$defs": named,
            "additionalProperties": inner,
            "x-extra": VALUES,
        },
    )


SCHEMAS = st.recursive(VALUES, schemas_around, max_leaves=20)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.text()},
    optional={
        "description": st.text(),
        "parameters": SCHEMAS,
        "x": VALUES,
        "a": VALUES,
    },
)


def shuffled(value: Any, chance: random.Random) -> Any:
    match value:
        case dict():
            keys = list(value)
            chance.shuffle(keys)
            return {key: shuffled(value[key], chance) for key in keys}
        case list():
            return [shuffled(item, chance) for item in value]
        case _:
            return value


@given(FUNCTIONS, st.randoms(use_true_random=False))
def test_any_order_of_keys_gives_the_same_text(
    function: dict[str, Any], chance: random.Random
) -> None:
    assert canonical_definition(shuffled(function, chance)) == canonical_definition(function)


@given(FUNCTIONS)
def test_no_value_is_changed_and_no_array_reordered(function: dict[str, Any]) -> None:
    written = json.loads(canonical_definition(function))
    assert written == {"type": "function", "function": function}


def test_keys_stand_where_models_have_seen_them() -> None:
    city = {"enum": ["b", "a"], "minLength": 1, "description": "Where.", "type": "string"}
    place = {"z": {"default": {"b": 1, "a": 2}}, "a": {}, "city": city, "when": {}}
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "additionalProperties": False,
        "required": ["when", "city"],
        "properties": place,
        "type": "object",
    }
    function = {"x": 1, "parameters": parameters, "description": "d", "name": "f"}
    assert canonical_definition(function) == (
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": '
        '{"type": "object", "properties": {"when": {}, '
        '"city": {"type": "string", "description": "Where.", "enum": ["b", "a"], "minLength": 1}, '
        '"a": {}, "z": {"default": {"a": 2, "b": 1}}}, "required": ["when", "city"], '
        '"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": false}, '
        '"x": 1}}'
    )


def test_strict_is_no_part_of_the_prompt() -> None:
    function = {"name": "f", "parameters": {"properties": {"strict": {}}}}
    assert canonical_definition(function | {"strict": True}) == canonical_definition(function)
    assert "strict" in canonical_definition(function)


def test_a_parameter_may_be_called_like_a_keyword() -> None:
    properties = {"type": {"type": "string"}, "items": {}, "b": {}, "required": {"items": {}}}
    function = {"name": "f", "parameters": {"properties": properties}}
    written = json.loads(canonical_definition(function))["function"]["parameters"]["properties"]
    assert list(written) == ["b", "items", "required", "type"]
