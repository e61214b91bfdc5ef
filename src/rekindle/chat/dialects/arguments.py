"""Reads arguments that are written one by one. They become JSON as each is closed.

A string without quotes streams while it arrives, if the schema or the format says it is one.
"""

import re
from typing import Any

from rekindle.chat.dialects.call_format import Members, MemberSlot, Nested, Strings
from rekindle.chat.dialects.syntax.cursor import Cursor, Mark, Steps, space_end
from rekindle.chat.dialects.syntax.json_stream import Sink
from rekindle.chat.dialects.syntax.json_text import NotACall, dump, escaped
from rekindle.chat.dialects.syntax.lark import Schema
from rekindle.chat.dialects.syntax.parameters import parameter, resolved, types, value_of
from rekindle.chat.dialects.syntax.values import ValueReader

MAX_KEY = 256  # characters; picked
MAX_TAGS = 32  # tags in each other: each is searched through for its own; picked


class ArgumentSyntax:
    """How arguments are read one by one. `ends` may follow the last one."""

    def __init__(self, members: Members, ends: tuple[str, ...]) -> None:
        self._members = members
        self._form = members.value
        self._words = {text: value for value, text in self._form.constants.items()}
        self._opening = Mark(members.opening)
        self._closing = Mark(members.closing)
        self._separator = Mark(members.separator)
        self._ends = (
            (self._closing,) if self._closing else tuple(map(Mark, filter(str.strip, ends)))
        )
        place = members.member.index(MemberSlot.VALUE)
        self._before, self._behind = members.member[:place], members.member[place + 1 :]
        first = self._before[0]
        self._first = Mark(members.separator + first if isinstance(first, str) else "")
        self._head = Mark(first if isinstance(first, str) else "")
        last = self._before[-1]
        text = last if isinstance(last, str) else ""
        self._space_before = text[len(text.rstrip()) :]

    def read(self, cursor: Cursor, schema: Schema, sink: Sink) -> Steps[None]:
        """Pass on the arguments as the text of a JSON object."""
        if self._opening:
            yield from cursor.expect(self._opening)
        keys: set[str] = set()
        while not (yield from self._is_end(cursor)):
            if keys and self._separator:
                yield from cursor.expect(self._separator)
                if (yield from self._is_end(cursor)):  # as in Python
                    break
            key, kinds = yield from self._read_before(cursor)
            own = {"type": sorted(kinds)} if kinds else parameter(schema, key)
            is_new = key not in keys
            if is_new:
                sink(f"{', ' if keys else '{'}{dump(key)}: ")
            keys.add(key)
            yield from self._value(cursor, key, own, sink if is_new else _drop)
        if self._closing:
            yield from cursor.expect(self._closing)
        sink("}" if keys else "{}")

    def _is_end(self, cursor: Cursor) -> Steps[bool]:
        """Return whether the arguments end here."""
        mark = yield from cursor.sees(*self._ends, self._head)
        return mark is not self._head if self._head else mark is not None

    def _read_before(self, cursor: Cursor) -> Steps[tuple[str, set[str]]]:
        """Read up to the value. Return the key and the types that the text tells."""
        key, kinds = "", set[str]()
        for i, piece in enumerate(self._before):
            if isinstance(piece, str):
                if piece.strip():
                    yield from cursor.expect(Mark(piece))
                continue
            text = yield from self._word(cursor, self._before[i + 1])
            if piece is MemberSlot.KEY:
                key = text
            else:
                kinds = {kind for kind, name in self._members.type_names.items() if name == text}
        if not key:
            raise NotACall("no key")
        return key, kinds

    def _word(self, cursor: Cursor, behind: str | MemberSlot) -> Steps[str]:
        """Return a key or a type, which ends where the text behind it begins."""
        assert isinstance(behind, str)
        yield from cursor.peek_behind_space()
        if self._form.strings is not Strings.RAW:
            return (yield from ValueReader(cursor, self._form.string_marks).key())
        found: list[str] = []
        length = 0

        def keep(text: str) -> None:
            nonlocal length
            found.append(text)
            length += len(text)
            if length > MAX_KEY:
                raise NotACall("too long a key")

        yield from cursor.pass_until(behind.strip().split()[0], keep)
        return "".join(found).strip()

    def _value(self, cursor: Cursor, key: str, schema: Schema, sink: Sink) -> Steps[None]:
        closing = "".join(key if piece is MemberSlot.KEY else str(piece) for piece in self._behind)
        if self._form.strings is not Strings.RAW:
            yield from cursor.peek_behind_space()
            yield from ValueReader(cursor, self._form.string_marks, self._words).write(sink)
            if closing.strip():
                yield from cursor.expect(Mark(closing))
            return
        if self._space_before and (yield from cursor.sees_text(self._space_before)):
            cursor.take(len(self._space_before))
        marks = self._form.string_marks
        is_marked = bool(marks[0]) and (yield from cursor.sees_text(marks[0]))
        if is_marked:
            cursor.take(len(marks[0]))
            closing = marks[1] + closing.lstrip()
        if is_marked or types(schema) == {"string"}:
            sink('"')
            yield from self._raw(cursor, closing, lambda text: sink(escaped(text)))
            sink('"')
        else:
            found: list[str] = []
            yield from self._raw(cursor, closing, found.append)
            sink(dump(self._value_of("".join(found), schema, schema, 0)))

    def _raw(self, cursor: Cursor, closing: str, sink: Sink) -> Steps[None]:
        """Pass on text up to a closing mark that another mark of the call follows."""
        space, mark = closing[: len(closing) - len(closing.lstrip())], closing.strip()
        followers = (self._first, *self._ends) if self._first else ()
        whole = tuple(Mark(mark + "\n" + each.text) for each in followers)
        while True:
            left = yield from cursor.pass_until(mark, sink, space)
            if not whole or (yield from cursor.sees(*whole)):
                cursor.take(len(mark))
                return
            sink(left + cursor.take(len(mark)))

    def _value_of(self, text: str, schema: Schema, root: Schema, depth: int) -> Any:
        """Return the value that the text means."""
        kinds = types(schema)
        if self._form.nested is not Nested.TAGS or kinds == {"string"}:
            return value_of(text, schema, self._words)
        inner = self._inner_members(text)
        if inner is None:
            return value_of(text, schema, self._words)
        if depth == MAX_TAGS:
            raise NotACall("too deep")
        if not inner:
            empty: dict[str, Any] = {"array": [], "object": {}, "null": None}
            return next((value for kind, value in empty.items() if kind in kinds), text)
        is_list = "object" not in kinds and all(key == self._form.element_key for key, _ in inner)
        if is_list:
            items = resolved(schema.get("items") or {}, root)
            return [self._value_of(own, items, root, depth + 1) for _, own in inner]
        return {
            key: self._value_of(own, parameter(schema, key), root, depth + 1) for key, own in inner
        }

    def _inner_members(self, text: str) -> list[tuple[str, str]] | None:
        """Return keys and texts if the text consists of members, or is empty."""
        opening = _pattern(self._before, None)
        found = []
        position = space_end(text, 0)
        while position < len(text):
            match = opening.match(text, position)
            if match is None:
                return None
            key = match["key"]
            own_opening, own_closing = _pattern(self._before, key), _pattern(self._behind, key)
            end = _matching_end(text, match.end(), own_opening, own_closing)
            if end is None:
                return None
            found.append((key, text[match.end() : end.start()]))
            position = space_end(text, end.end())
        return found


def _pattern(pieces: tuple[str | MemberSlot, ...], key: str | None) -> re.Pattern[str]:
    """Return a pattern of the text around a value, for one key or for any."""
    name = r"(?P<key>[^\s<>/]{1,256})" if key is None else re.escape(key)
    texts = (re.escape(piece.strip()) if isinstance(piece, str) else name for piece in pieces)
    return re.compile(r"\s*".join(texts))


def _matching_end(
    text: str, position: int, opening: re.Pattern[str], closing: re.Pattern[str]
) -> re.Match[str] | None:
    """Return the closing mark that belongs to a value. Values may contain others of the key."""
    depth = 1
    while end := closing.search(text, position):
        depth += len(opening.findall(text, position, end.start())) - 1
        if depth == 0:
            return end
        position = end.end()
    return None


def _drop(_: str) -> None:
    """Drop a value that was given twice: the first one counts."""
