"""Reads values that show where they end: quoted or marked strings, numbers, lists, objects.

JSON, Python and Gemma's spelling are read alike, because models mix them.
"""

import re
from collections.abc import Mapping
from typing import Any

from rekindle.chat.dialects.syntax.cursor import Cursor, Steps
from rekindle.chat.dialects.syntax.json_stream import MAX_DIGITS, Sink
from rekindle.chat.dialects.syntax.json_text import MAX_DEPTH, CutOff, NotACall, dump, escaped

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_NUMBER = re.compile(rf"[-+0-9.eE]{{1,{MAX_DIGITS}}}")
_KEY = re.compile(r"[^\s:={}\[\],<>|\"']{1,256}")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_N_DIGITS = {"u": 4, "x": 2, "U": 8}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class ValueReader:
    """Reads values at a cursor. Strings may also stand between `marks`."""

    def __init__(
        self, cursor: Cursor, marks: tuple[str, str] = ("", ""), words: Mapping[str, Any] = _WORDS
    ) -> None:
        self._cursor = cursor
        self._marks = marks
        self._words = {**_WORDS, **words}

    def write(self, sink: Sink) -> Steps[None]:
        """Pass on a value as JSON: a string while it arrives, another value once it is whole."""
        if (yield from self._is_string()):
            sink('"')
            yield from self._string(lambda text: sink(escaped(text)))
            sink('"')
        else:
            sink(dump((yield from self.value())))

    def value(self, depth: int = 0) -> Steps[Any]:
        """Return the value here."""
        if depth > MAX_DEPTH:
            raise NotACall("too deep")
        if (yield from self._is_string()):
            return (yield from self._text())
        sign = yield from self._cursor.peek()
        if sign == "[":
            return (yield from self._list(depth))
        if sign == "{":
            return (yield from self._object(depth))
        if sign.isdigit() or sign in "-+.":
            return _number((yield from self._cursor.scan(_NUMBER)))
        word = yield from self._cursor.scan(_WORD)
        if word not in self._words:
            raise NotACall("no value")
        return self._words[word]

    def key(self) -> Steps[str]:
        """Return the key of a member: a string, or a word without quotes."""
        if (yield from self._is_string()):
            return (yield from self._text())
        return (yield from self._cursor.scan(_KEY))

    def _list(self, depth: int) -> Steps[list[Any]]:
        found: list[Any] = []
        self._cursor.take(1)
        while not (yield from self._ends("]")):
            found.append((yield from self.value(depth + 1)))
            yield from self._comma("]")
        return found

    def _object(self, depth: int) -> Steps[dict[str, Any]]:
        found: dict[str, Any] = {}
        self._cursor.take(1)
        while not (yield from self._ends("}")):
            key = yield from self.key()
            if (yield from self._cursor.peek_behind_space()) != ":":
                raise NotACall("no colon")
            self._cursor.take(1)
            yield from self._cursor.peek_behind_space()
            found[key] = yield from self.value(depth + 1)
            yield from self._comma("}")
        return found

    def _ends(self, closing: str) -> Steps[bool]:
        if (yield from self._cursor.peek_behind_space()) != closing:
            return False
        self._cursor.take(1)
        return True

    def _comma(self, closing: str) -> Steps[None]:
        """Read a comma, unless the list ends. One before the end is allowed, as in Python."""
        sign = yield from self._cursor.peek_behind_space()
        if sign == ",":
            self._cursor.take(1)
        elif sign != closing:
            raise NotACall("no comma")

    def _is_string(self) -> Steps[bool]:
        if self._marks[0] and (yield from self._cursor.sees_text(self._marks[0])):
            return True
        return (yield from self._cursor.peek()) in "\"'"

    def _text(self) -> Steps[str]:
        found: list[str] = []
        yield from self._string(found.append)
        # Two escapes of a surrogate pair become one character.
        return "".join(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _string(self, sink: Sink) -> Steps[None]:
        """Pass on the text of the string here, in pieces."""
        opening, closing = self._marks
        if opening and (yield from self._cursor.sees_text(opening)):
            self._cursor.take(len(opening))
            yield from self._cursor.pass_until(closing, sink)
            self._cursor.take(len(closing))
            return
        quote = self._cursor.take(1)
        while (sign := (yield from self._cursor.peek())) != quote:
            sink((yield from self._escape()) if sign == "\\" else self._cursor.run(_PLAIN[quote]))
        self._cursor.take(1)

    def _escape(self) -> Steps[str]:
        sign = (yield from self._cursor.at_least(2))[1]
        n_digits = _N_DIGITS.get(sign, 0)
        digits = (yield from self._cursor.at_least(2 + n_digits))[2:]
        if n_digits and re.fullmatch(r"[0-9a-fA-F]+", digits) and int(digits, 16) < 0x110000:
            self._cursor.take(2 + n_digits)
            return chr(int(digits, 16))
        self._cursor.take(2)
        return _CONTROL.get(sign, sign)


def value_in(text: str, words: Mapping[str, Any]) -> Any:
    """Return the value that is the whole text. Raises NotACall."""
    cursor = Cursor(text.strip(), ended=True)
    steps = ValueReader(cursor, words=words).value()
    try:
        next(steps)
    except StopIteration as done:
        if not cursor.rest:
            return done.value
    except CutOff as error:
        raise NotACall(str(error)) from None
    raise NotACall("no value")


def _number(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise NotACall("too long a number")
    try:
        return int(text) if text.lstrip("-+").isdigit() else float(text)
    except ValueError:
        raise NotACall("no number") from None
