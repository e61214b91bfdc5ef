"""The room that the end of a call needs: a call streams only if the engine can end it."""

from typing import Any

import pytest

from rekindle.chat.reply.end_size import MAX_SIZE, end_size
from rekindle.chat.reply.pattern_size import PatternSize

STRING = {"type": "string"}


def requiring(n_members: int, schema: object) -> dict[str, Any]:
    names = [f"member_{i}" for i in range(n_members)]
    return {"type": "object", "properties": dict.fromkeys(names, schema), "required": names}


@pytest.mark.parametrize(
    ("schema", "smallest"),
    [
        ({}, "1"),
        (True, "1"),
        ({"type": "object"}, "{}"),
        ({"const": 'a"b'}, '"a\\"b"'),
        ({"enum": ["long", "no"]}, '"no"'),
        ({"type": "string", "minLength": 400}, f'"{"a" * 400}"'),
        ({"type": "array", "minItems": 3, "items": {"type": "boolean"}}, "[true, true, true]"),
        ({"anyOf": [{"type": "string", "minLength": 9}, {"type": "null"}]}, '"aaaaaaaaa"'),
        ({"allOf": [{"type": "string", "minLength": 9}]}, '"aaaaaaaaa"'),
        ({"type": "string", "pattern": "^[a-f0-9]{400}$"}, f'"{"0" * 400}"'),
        ({"type": "object", "required": ["path", "x"]}, '{"path": "", "x": 1}'),
        (
            {"$ref": "#/$defs/many", "$defs": {"many": requiring(3, STRING)}},
            '{"member_0": "", "member_1": "", "member_2": ""}',
        ),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"const": "x" * 90}}}, "x" * 92),
    ],
)
def test_the_end_of_a_schema_is_not_underestimated(schema: object, smallest: str) -> None:
    size = end_size(schema)
    assert size is not None
    assert len(smallest) <= size <= 4 * len(smallest) + 100


def test_an_optional_value_that_the_model_may_have_begun_needs_room() -> None:
    optional = {"type": "object", "properties": {"long": {"type": "string", "minLength": 400}}}
    size = end_size(optional)
    assert size is not None
    assert size > 400


@pytest.mark.parametrize(
    "schema",
    [
        requiring(300, STRING),
        requiring(60, {"enum": [f"{i}value" for i in range(27)]}),
        requiring(40, {"type": "string", "pattern": "^[a-f0-9]{60}$"}),
        requiring(20, {"type": "array", "minItems": 60, "items": {"type": "integer"}}),
        requiring(2, {"type": "string", "pattern": "^[a-f0-9]{400}$"}),
        {"type": "object", "properties": {"x": {"pattern": "^[a-z]{9000}$"}}},
        {"type": "string", "pattern": "^(unclosed"},
        {"type": "string", "minLength": MAX_SIZE},
        {"$ref": "#/$defs/all", "$defs": {"all": requiring(300, STRING)}},
        {"$ref": "#/$defs/node", "$defs": {"node": requiring(1, {"$ref": "#/$defs/node"})}},
        {"$ref": "#/$defs/absent"},
    ],
)
def test_a_call_that_the_engine_may_not_end_in_time_has_no_size(schema: object) -> None:
    assert end_size(schema) is None


@pytest.mark.parametrize(
    "node",
    [
        {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}},
        {"type": "array", "items": {"$ref": "#/$defs/node"}},
        requiring(1, {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}),
    ],
)
def test_a_schema_that_may_contain_itself_ends(node: dict[str, Any]) -> None:
    assert end_size({"$ref": "#/$defs/node", "$defs": {"node": node}}) is not None


def test_references_that_double_each_time_are_given_up() -> None:
    levels: dict[str, Any] = {
        f"d{i}": requiring(2, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(30)
    }
    assert end_size({"$ref": "#/$defs/d0", "$defs": {**levels, "d30": STRING}}) is None


@pytest.mark.parametrize(
    ("pattern", "n_characters"),
    [
        ("^[0-9]{4}-[0-9]{2}$", 7),
        (r"^\d{3,5}\.\w+$", 5),
        ("^(ab|abcd)$", 4),
        ("^(?:[a-z]{2}-){3}x$", 10),
        (r"^[\]a]{7}\[$", 8),
        ("^(long)?$", 4),
        ("", 0),
    ],
)
def test_the_length_of_a_pattern_is_the_sum_of_its_least_counts(
    pattern: str, n_characters: int
) -> None:
    found = PatternSize(pattern).find()
    assert found is not None
    assert found[0] == n_characters
