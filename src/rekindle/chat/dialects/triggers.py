"""Finds the strings that begin a call of a format.

A distinctive mark is a trigger anywhere. JSON and Python begin a call only where the reply begins,
or behind another call: elsewhere they are examples. Weak marks need the name of a tool.
"""

import re
from collections.abc import Collection, Iterator

from rekindle.chat.dialects.call_format import CallFormat, Slot
from rekindle.chat.dialects.syntax.cursor import WORD_CHARACTER
from rekindle.generation.request import Trigger

_JSON_TAIL = re.compile(r'[\[{](?:[\s\[{:,]|"[^"\s]*"?)*\Z')
_FIRST_KEY = re.compile(r'\{\s*"[^"\s]+"')
_LAST_WORD = re.compile(WORD_CHARACTER + r"+\Z")
_SYMBOL = re.compile(r"[^\w\s\"'.,:;=!?(){}\[\]-]")
_SPACINGS = ("{", "{ ", "{\n", "{\n  ", "{\n    ")
_TYPED = ('{"type": "function"', '{"type":"function"')  # Llama 3 sometimes puts it first


def triggers_of(call_format: CallFormat, names: Collection[str]) -> tuple[Trigger, ...]:
    """Return the strings that begin a call of these tools."""
    opening = _mark_of(call_format.opening)
    found = []
    if is_distinctive(opening):
        found.append(Trigger(opening))
        if opening_is_optional(call_format):
            found += _call_triggers("", call_format, names)
    else:
        found += _call_triggers(call_format.opening, call_format, names)
    if continues_with_separator(call_format):
        found += _call_triggers(call_format.separator, call_format, names)
    return tuple(dict.fromkeys(found))


def opening_is_optional(call_format: CallFormat) -> bool:
    """Return whether a call can be told without the opening. Models forget it."""
    return call_format.at_start or is_distinctive(_head("", call_format))


def continues_with_separator(call_format: CallFormat) -> bool:
    """Return whether a call behind another one begins with the separator."""
    return not call_format.closing and bool(call_format.separator.strip())


def is_distinctive(text: str) -> bool:
    """Return whether answers do not contain the text by accident."""
    return bool(re.search(r"[^\W_]", text) and (_SYMBOL.search(text) or text.startswith("[")))


def begins_weakly(call_format: CallFormat) -> bool:
    """Return whether a call may begin without a distinctive mark."""
    if is_distinctive(_head("", call_format)):
        return False
    return call_format.at_start or not is_distinctive(_mark_of(call_format.opening))


def json_beginnings(text: str) -> tuple[list[str], list[str]]:
    """Return the usual spellings of an object's beginning: with its first key, with a type."""
    key = _FIRST_KEY.match(text)
    if key is None:
        return [], []
    keyed = [key[0], *(spacing + key[0][key[0].index('"') :] for spacing in _SPACINGS)]
    return list(dict.fromkeys(keyed)), [] if "type" in key[0] else list(_TYPED)


def _call_triggers(
    before: str, call_format: CallFormat, names: Collection[str]
) -> Iterator[Trigger]:
    mark = _head(before, call_format)
    # A separator may also stand between other parts of a reply.
    shown = _head("", call_format) if before == call_format.separator else mark
    if is_distinctive(shown):
        yield Trigger(mark)
        return
    before, first = before.lstrip(), _first(call_format)
    at_start = not _SYMBOL.search(before + first)
    keyed, typed = json_beginnings(first)
    if keyed:
        if mark.isalpha():  # a word and a bracket
            yield Trigger((before + first)[: len(mark) + 1])
        else:
            yield from (Trigger(before + each, at_start) for each in keyed + typed)
        return
    behind = _behind_name(call_format)
    yield from (Trigger(before + first + name + behind, at_start) for name in names)


def _head(before: str, call_format: CallFormat) -> str:
    """Return the text before a call's first slot, without JSON, and without half a word."""
    text = _mark_of(before + _first(call_format))
    word = _LAST_WORD.search(text)
    if word and is_distinctive(text[: word.start()].rstrip()):
        return text[: word.start()].rstrip()
    return text


def _first(call_format: CallFormat) -> str:
    first = call_format.call[0]
    return first if isinstance(first, str) else ""


def _mark_of(text: str) -> str:
    return _JSON_TAIL.sub("", text).strip()


def _behind_name(call_format: CallFormat) -> str:
    """Return the text that must follow a name."""
    behind = call_format.call[call_format.call.index(Slot.NAME) + 1]
    if isinstance(behind, str) and behind.strip():
        return behind.rstrip()
    space = behind if isinstance(behind, str) else ""
    return space + (call_format.members.opening if call_format.members else "{")
