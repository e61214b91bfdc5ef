"""JSON inside a reply: where a value ends, and the members of an object as written."""

import json
import re
from typing import Any, NoReturn

# A string without an end matches all the rest, so that no bracket inside it counts.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """The text begins like a call but is none. It stays text."""


def value_end(text: str, start: int) -> int | None:
    """Return where the object or array that begins at `start` ends; None: it is not closed."""
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
    """Parse JSON. Line breaks inside strings are allowed: models write them. Raises NotACall."""
    try:
        return _LENIENT.decode(source)
    except (ValueError, RecursionError) as error:
        raise NotACall(str(error)) from None


def members(source: str) -> dict[str, str]:
    """Return the members of an object, each value as written. Raises NotACall."""
    found: dict[str, str] = {}
    position = _behind(source, 0, "{")
    if source.startswith("}", position):
        return found
    while True:
        key, position = _decode(source, position)
        if not isinstance(key, str):
            raise NotACall("a key is not a string")
        start = _behind(source, position, ":")
        _, position = _decode(source, start)
        found[key] = source[start:position]
        position = _skip(source, position)
        if source.startswith("}", position):
            return found
        position = _behind(source, position, ",")


def elements(source: str) -> list[str]:
    """Return the elements of an array, each as written. Raises NotACall."""
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
    """Return a valid JSON object, as written if that is valid. Raises NotACall."""
    value = load(source)
    if isinstance(value, str):  # some models quote the whole object
        source, value = value, load(value)
    if not isinstance(value, dict):
        raise NotACall("the arguments are not an object")
    try:
        json.loads(source)
    except ValueError:
        return dump(value)
    return source.strip()


def dump(value: dict[str, Any]) -> str:
    """Return the value as JSON. Raises NotACall for numbers that JSON cannot write."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for a lone surrogate, which must be escaped
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
