"""JSON inside a reply: where a value ends, and the members of an object as they were written."""

import json
import re
from typing import Any, NoReturn

from rekindle.chat.dialects.base import NotACall

# A string that does not end takes all the rest, so that no bracket inside it counts.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")


def value_end(text: str, start: int) -> int | None:
    """Where the object or array that begins at `start` is closed, or None if it is not."""
    depth = 0
    for piece in _PIECE.finditer(text, start):
        if piece[0] in "{[":
            depth += 1
        elif piece[0] in "}]":
            depth -= 1
            if depth == 0:
                return piece.end()
    return None


def load(source: str) -> Any:
    """Line breaks within strings are let pass: models write them. Raises NotACall."""
    try:
        return _LENIENT.decode(source)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def members(source: str) -> dict[str, str]:
    """The members of an object, each value as it was written. Raises NotACall."""
    found: dict[str, str] = {}
    position = _behind(source, 0, "{")
    if source.startswith("}", position):
        return found
    while True:
        key, position = _decode(source, position)
        if not isinstance(key, str):
            raise NotACall("a key is no string")
        start = _behind(source, position, ":")
        _, position = _decode(source, start)
        found[key] = source[start:position]
        position = _skip(source, position)
        if source.startswith("}", position):
            return found
        position = _behind(source, position, ",")


def elements(source: str) -> list[str]:
    """The elements of an array, each as it was written. Raises NotACall."""
    found: list[str] = []
    position = _behind(source, 0, "[")
    if source.startswith("]", position):
        return found
    while True:
        start = position
        _, position = _decode(source, start)
        found.append(source[start:position])
        position = _skip(source, position)
        if source.startswith("]", position):
            return found
        position = _behind(source, position, ",")


def arguments(source: str) -> str:
    """A valid JSON object, as it was written where that is one. Raises NotACall."""
    value = load(source)
    if isinstance(value, str):  # some models quote the whole object
        source, value = value, load(value)
    if not isinstance(value, dict):
        raise NotACall("the arguments are no object")
    try:
        json.loads(source)
    except ValueError:
        return dump(value)
    return source.strip()


def dump(value: dict[str, Any]) -> str:
    """Raises NotACall for numbers that JSON has no way to write."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate can be escaped, and has no bytes
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise NotACall(str(error)) from None


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_LENIENT = json.JSONDecoder(strict=False, parse_constant=no_constant)


def _decode(source: str, position: int) -> tuple[Any, int]:
    try:
        return _LENIENT.raw_decode(source, position)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _skip(source: str, position: int) -> int:
    space = _SPACE.match(source, position)
    assert space is not None
    return space.end()


def _behind(source: str, position: int, mark: str) -> int:
    position = _skip(source, position)
    if not source.startswith(mark, position):
        raise NotACall(f"no {mark}")
    return _skip(source, position + 1)
