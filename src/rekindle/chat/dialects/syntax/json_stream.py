"""Reads JSON while it arrives. Text is passed on as it was written, and is valid JSON."""

import json
import math
import re
from collections.abc import Callable

from rekindle.chat.dialects.syntax.cursor import Cursor, Steps
from rekindle.chat.dialects.syntax.json_text import MAX_DEPTH, NotACall

Sink = Callable[[str], object]

MAX_DIGITS = 4000  # Python's parser takes 4300

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR = re.compile(rf"[-+.0-9a-zA-Z]{{1,{MAX_DIGITS + 1}}}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")

_INFINITE = (math.inf, -math.inf)  # numbers that are too large: JSON cannot write them again


def value(cursor: Cursor, sink: Sink) -> Steps[None]:
    """Pass on the value here, with line breaks inside strings escaped: models write them."""
    closing: list[str] = []
    while True:
        match (yield from _next(cursor, sink)):
            case "{" | "[" as bracket:
                if len(closing) == MAX_DEPTH:
                    raise NotACall("too deep")
                closing.append("}" if bracket == "{" else "]")
                sink(cursor.take(1))
                if (yield from _next(cursor, sink)) != closing[-1]:
                    if bracket == "{":
                        yield from _key(cursor, sink)
                    continue
            case '"':
                yield from string(cursor, sink)
            case _:
                sink((yield from scalar(cursor)))
        while closing:
            sign = yield from _next(cursor, sink)
            if sign != closing[-1]:
                break
            sink(cursor.take(1))
            closing.pop()
        if not closing:
            return
        if sign != ",":
            raise NotACall("no comma")
        sink(cursor.take(1))
        if closing[-1] == "}":
            yield from _next(cursor, sink)
            yield from _key(cursor, sink)


def string(cursor: Cursor, sink: Sink) -> Steps[None]:
    """Pass on the string here, quotes included."""
    if (yield from cursor.peek()) != '"':
        raise NotACall("no string")
    sink(cursor.take(1))
    while True:
        match (yield from cursor.peek()):
            case '"':
                sink(cursor.take(1))
                return
            case "\\":
                n_chars = 6 if (yield from cursor.at_least(2))[1] == "u" else 2
                if not _ESCAPE.fullmatch((yield from cursor.at_least(n_chars))):
                    raise NotACall("no such escape")
                sink(cursor.take(n_chars))
            case sign if sign < " " or "\ud800" <= sign <= "\udfff":
                sink(json.dumps(cursor.take(1))[1:-1])
            case _:
                sink(cursor.run(_PLAIN))


def scalar(cursor: Cursor) -> Steps[str]:
    text = yield from cursor.scan(_SCALAR)
    if not _NUMBER.fullmatch(text) or len(text) > MAX_DIGITS or json.loads(text) in _INFINITE:
        raise NotACall("no value")
    return text


def text_of(cursor: Cursor) -> Steps[str]:
    """Return the string here."""
    found: list[str] = []
    yield from string(cursor, found.append)
    decoded: str = json.loads("".join(found))
    return decoded


def _key(cursor: Cursor, sink: Sink) -> Steps[None]:
    yield from string(cursor, sink)
    if (yield from _next(cursor, sink)) != ":":
        raise NotACall("no colon")
    sink(cursor.take(1))


def _next(cursor: Cursor, sink: Sink) -> Steps[str]:
    """Pass on white space and return the character behind it."""
    while True:
        sign = yield from cursor.peek()
        if sign not in " \t\r\n":
            return sign
        sink(cursor.run(_SPACE))
