"""Calls that are JSON objects: one member has the name, another the arguments.

Models put the members in another order, use other common keys, and quote the arguments.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rekindle.chat.dialects.base import CallDraft
from rekindle.chat.dialects.call_format import CallFormat, Slot
from rekindle.chat.dialects.syntax import json_stream
from rekindle.chat.dialects.syntax.cursor import Cursor, Steps
from rekindle.chat.dialects.syntax.json_text import CutOff, NotACall

_NAME_KEYS = frozenset({"name", "tool_name"})
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_WRAPPING_KEYS = frozenset({"function"})  # the form of OpenAI's API
MAX_WRAPPING = 8  # objects around the one with the name; picked

_NAME, _ARGUMENTS, _ID = "\ue000name", "\ue000arguments", "\ue000id"
_EXAMPLES = {Slot.NAME: _NAME, Slot.ARGUMENTS: f'"{_ARGUMENTS}"', Slot.ID: _ID, Slot.INDEX: "1"}


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Where a format has an object, and what its keys mean."""

    before: str
    behind: str
    name_keys: frozenset[str]  # none: the key of the arguments is the name
    arguments_keys: frozenset[str]
    wrapping_keys: frozenset[str]  # of an object with the name in it
    id_key: str | None
    needs_arguments: bool  # without them, the object could be anything

    @classmethod
    def of(cls, call_format: CallFormat) -> "ObjectShape | None":
        """Return the shape of the calls; None: they are no objects."""
        if call_format.members is not None:
            return None
        text = "".join(p if isinstance(p, str) else _EXAMPLES[p] for p in call_format.call)
        for start in (i for i, sign in enumerate(text) if sign == "{"):
            try:
                found, end = json.JSONDecoder().raw_decode(text, start)
            except ValueError:
                continue
            places = dict(_places(found, ()))
            if "\ue000" in text[:start] + text[end:] or _ARGUMENTS not in places:
                continue
            (*_, arguments_key), name = places[_ARGUMENTS], places.get(_NAME)
            return cls(
                before=text[:start],
                behind=text[end:],
                name_keys=_NAME_KEYS | {name[-1]} if name else frozenset(),
                arguments_keys=_ARGUMENTS_KEYS | {arguments_key} if name else frozenset(),
                wrapping_keys=_WRAPPING_KEYS | set(name[:-1]) if name else frozenset(),
                id_key=places[_ID][-1] if _ID in places else None,
                needs_arguments=call_format.at_start,
            )
        return None


def _places(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(value, str):
        yield value, path
    elif isinstance(value, dict):
        for key, own in value.items():
            yield from _places(own, (*path, key))


class ObjectCall:
    """Reads one object."""

    def __init__(self, shape: ObjectShape, id_pattern: str, cursor: Cursor, draft: CallDraft):
        self._shape = shape
        self._id_pattern = id_pattern
        self._cursor = cursor
        self._draft = draft
        self._name: str | None = None
        self._id: str | None = "" if shape.id_key is None else None
        self._held: list[str] = []  # arguments that came before the name or the id
        self._has_arguments = False

    def read(self) -> Steps[None]:
        yield from self._members()
        if self._name is None:
            raise NotACall("no name")
        if not self._has_arguments and self._shape.needs_arguments:
            raise NotACall("no arguments")
        self._begin()
        self._draft.write("".join(self._held) if self._has_arguments else "{}")

    def _members(self, depth: int = 0) -> Steps[None]:
        cursor = self._cursor
        if depth > MAX_WRAPPING:
            raise NotACall("too deep")
        if (yield from cursor.peek_behind_space()) != "{":
            raise NotACall("no object")
        cursor.take(1)
        if (yield from cursor.peek_behind_space()) == "}":
            cursor.take(1)
            return
        while True:
            yield from cursor.peek_behind_space()
            key = yield from json_stream.text_of(cursor)
            if (yield from cursor.peek_behind_space()) != ":":
                raise NotACall("no colon")
            cursor.take(1)
            yield from self._member(key, (yield from cursor.peek_behind_space()), depth)
            sign = yield from cursor.peek_behind_space()
            cursor.take(1)
            if sign == "}":
                return
            if sign != ",":
                raise NotACall("no comma")

    def _member(self, key: str, first: str, depth: int) -> Steps[None]:
        """Read the value of a member, which begins with `first`."""
        shape = self._shape
        if not shape.name_keys and self._name is None:
            self._name = key
            yield from self._arguments(first)
        elif key in shape.name_keys and first == '"':
            if self._name is not None:
                raise NotACall("two names")
            self._name = yield from json_stream.text_of(self._cursor)
        elif key == shape.id_key and first == '"':
            self._id = checked_id((yield from json_stream.text_of(self._cursor)), self._id_pattern)
        elif key in shape.arguments_keys:
            yield from self._arguments(first)
        elif key in shape.wrapping_keys and self._name is None and first == "{":
            yield from self._members(depth + 1)
        else:
            yield from json_stream.value(self._cursor, lambda _: None)
        if self._is_known and not shape.needs_arguments:
            self._begin()

    @property
    def _is_known(self) -> bool:
        return self._name is not None and self._id is not None

    def _begin(self) -> None:
        if not self._draft.has_begun:
            assert self._name is not None
            self._draft.begin(self._name, self._id or "")

    def _arguments(self, first: str) -> Steps[None]:
        if self._has_arguments:
            raise NotACall("two sets of arguments")
        self._has_arguments = True
        if self._is_known:
            self._begin()
        sink = self._draft.write if self._draft.has_begun else self._held.append
        if first == '"':  # some models quote the whole object
            quoted = yield from json_stream.text_of(self._cursor)
            yield from json_object_in(quoted, sink)
        else:
            yield from json_object(self._cursor, sink)


def json_object(cursor: Cursor, sink: json_stream.Sink) -> Steps[None]:
    """Pass on the object here as it is written."""
    if (yield from cursor.peek_behind_space()) != "{":
        raise NotACall("the arguments are not an object")
    yield from json_stream.value(cursor, sink)


def json_object_in(text: str, sink: json_stream.Sink) -> Steps[None]:
    """Pass on the object that is the whole text."""
    cursor = Cursor(text.strip(), ended=True)
    try:
        yield from json_object(cursor, sink)
    except CutOff as error:
        raise NotACall(str(error)) from None
    if cursor.rest:
        raise NotACall("more than arguments")


def checked_id(found: str, pattern: str) -> str:
    """Return the id; an empty one if models of this family do not write such ids."""
    return found if re.fullmatch(pattern, found) else ""
