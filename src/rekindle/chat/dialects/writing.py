"""Writes calls as a template would, by a format."""

import json
from collections.abc import Sequence
from typing import Any

from rekindle.chat.conversation import ToolCall
from rekindle.chat.dialects.call_format import (
    CallFormat,
    Members,
    MemberSlot,
    Nested,
    Slot,
    Strings,
)
from rekindle.chat.dialects.syntax.parameters import type_of


def calls_text(call_format: CallFormat, calls: Sequence[ToolCall]) -> str:
    """Return the calls as the model would write them. Raises ValueError if they are not JSON."""
    texts = (_call(call_format, i, call) for i, call in enumerate(calls))
    return call_format.opening + call_format.separator.join(texts) + call_format.closing


def _call(call_format: CallFormat, i: int, call: ToolCall) -> str:
    slots = {
        Slot.NAME: call.name,
        Slot.ARGUMENTS: _arguments(call_format, call.arguments_json or "{}"),
        Slot.ID: call.id,
        Slot.INDEX: str(call_format.first_index + i),
    }
    return "".join(slots[p] if isinstance(p, Slot) else p for p in call_format.call)


def _arguments(call_format: CallFormat, source: str) -> str:
    arguments = json.loads(source)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    if call_format.members is not None:
        return _members(call_format.members, arguments)
    if call_format.indent:
        return json.dumps(arguments, ensure_ascii=False, indent=call_format.indent)
    return source  # writing it again would change tokens


def _members(members: Members, arguments: dict[str, Any]) -> str:
    keys = sorted(arguments, key=str.lower) if members.sorted_keys else list(arguments)
    texts = (_member(members, key, arguments[key]) for key in keys)
    return members.opening + members.separator.join(texts) + members.closing


def _member(members: Members, key: str, value: Any) -> str:
    slots = {
        MemberSlot.KEY: key,
        MemberSlot.VALUE: _value(members, value, is_nested=False),
        MemberSlot.TYPE: members.type_names.get(type_of(value), ""),
    }
    return "".join(slots[p] if isinstance(p, MemberSlot) else p for p in members.member)


def _value(members: Members, value: Any, *, is_nested: bool) -> str:
    form = members.value
    if form.nested is Nested.TAGS and isinstance(value, list):
        return "".join(_member(members, form.element_key, each) for each in value)
    if form.nested is Nested.TAGS and isinstance(value, dict):
        return "".join(_member(members, key, each) for key, each in value.items())
    if isinstance(value, list | dict) or (isinstance(value, str) and is_nested):
        if form.nested is Nested.PYTHON:
            return repr(value)
        if form.nested is Nested.JSON:
            return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ",".join(_value(members, each, is_nested=True) for each in value) + "]"
    if isinstance(value, dict):
        keys = sorted(value, key=str.lower)
        texts = (f"{key}:{_value(members, value[key], is_nested=True)}" for key in keys)
        return "{" + ",".join(texts) + "}"
    if isinstance(value, str):
        opening, closing = form.string_marks
        if form.strings is Strings.RAW:
            return opening + value + closing if "<" in value else value
        if form.strings is Strings.MARKED:
            return opening + value + closing
        return repr(value) if form.strings is Strings.PYTHON else json.dumps(value)
    if isinstance(value, bool) or value is None:
        return form.constants[value]
    return json.dumps(value)
