"""JSON as the wire formats write it."""

import json
import re
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar, cast

from fastapi import Response
from pydantic_core import to_json

B = TypeVar("B")
PIECE_CHARACTERS = 1024  # picked
# The characters of a JSON string, without an escape that is still incomplete.
WHOLE_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"""
)


def body_from(kind: type[B], source: object, **others: Any) -> B:
    """Make a body of type `kind`, a TypedDict, from the attributes of `source` of the same names.

    `others` has the keys that `source` lacks or names differently.
    """
    keys = kind.__annotations__
    return cast(B, {key: others[key] if key in others else getattr(source, key) for key in keys})


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)


def string_in(source: str | bytes, key: str) -> str | None:
    """Return a string of a JSON object, or None if there is none. Never raise."""
    try:
        value = json.loads(source)
    except (ValueError, RecursionError):
        return None
    text = value.get(key) if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


class GrowingString:
    """Decodes the first member of a JSON object, a string, while the object's text grows."""

    def __init__(self, key: str) -> None:
        self._opening = re.compile(rf'\s*\{{\s*"{re.escape(key)}"\s*:\s*"')
        self._is_open = False
        self._is_ended = False
        self._source = ""  # not decoded yet

    def feed(self, piece: str) -> str:
        """Return the part of the string that this piece completes."""
        if self._is_ended:
            return ""
        self._source += piece
        if not self._is_open:
            opening = self._opening.match(self._source)
            if opening is None:
                self._is_ended = len(self._source) > PIECE_CHARACTERS  # it has another shape
                return ""
            self._is_open = True
            self._source = self._source[opening.end() :]
        match = WHOLE_CHARACTERS.match(self._source)
        assert match is not None
        self._source = self._source[match.end() :]
        self._is_ended = self._source.startswith('"')
        text = json.loads(f'"{match[0]}"', strict=False)
        assert isinstance(text, str)
        return text


def pieces(text: str) -> Iterator[str]:
    """Split the arguments of a call, so that a long one is not one huge line of a stream."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def quoted(text: str) -> bytes:
    """Encode a string as an ASCII JSON string, for use inside a server-sent event.

    Some clients split lines as `str.splitlines` does, and would cut at a raw U+2028.
    """
    return encode_basestring_ascii(text).encode("ascii")
