"""Bodies with more members or values than any client sends."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import json_size
from rekindle.errors import InvalidRequest
from rekindle.json_size import check_size

AWKWARD = st.text(alphabet='a"\\{}[]:,\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | AWKWARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(AWKWARD, inner, max_size=4),
    max_leaves=20,
)


def members_of(value: Any) -> int:
    """Count objects, arrays and keys."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(members_of, value.values()))
    return 1 + sum(map(members_of, value)) if isinstance(value, list) else 0


def commas_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(len(inner) - 1, 0) + sum(map(commas_of, inner))


def is_refused(data: bytes) -> bool:
    try:
        check_size(data)
    except InvalidRequest:
        return True
    return False


@given(
    value=VALUES, n_members=st.integers(0, 9), n_values=st.integers(0, 9), piece=st.integers(2, 9)
)
def test_only_what_stands_outside_strings_counts(
    value: Any, n_members: int, n_values: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_MEMBERS", n_members)
        patch.setattr(json_size, "MAX_VALUES", n_values)
        patch.setattr(json_size, "PIECE_BYTES", piece)
        data = json.dumps(value).encode()
        is_too_large = members_of(value) > n_members or commas_of(value) > n_values
        assert is_refused(data) == (is_too_large and len(data) > n_members)


@pytest.mark.parametrize("data", [b'"', b'"\\', b'{"a', b'"\\"', b'["a\\\\', b"\\", b'"' * 7])
def test_incomplete_json_is_left_to_the_parser(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "MAX_MEMBERS", 0)
        patch.setattr(json_size, "MAX_VALUES", 0)
        patch.setattr(json_size, "PIECE_BYTES", 2)
        assert is_refused(data) == data.startswith((b"{", b"["))


def test_long_texts_may_have_any_characters() -> None:
    check_size(json.dumps({"prompt": '{"a": [1, 2]},\n' * 200_000}).encode())


@pytest.mark.parametrize(
    "item", [b"[]", b"{}", b'{"a":0}', b'"\\"{",' * 5 + b"0"], ids=["[]", "{}", "object", "strings"]
)
def test_hundreds_of_thousands_of_values_are_refused(item: bytes) -> None:
    assert is_refused(b'{"x":[' + b",".join([item] * 250_000) + b"]}")


def test_quotes_without_values_end_the_count() -> None:
    # Text that is no JSON: the parser refuses it. Counting string by string took 40 s.
    check_size(b'{"a":"' + b"," * 1_100_000 + b'"' * 20_000_000)
