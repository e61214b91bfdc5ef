"""Writes the grammar of a format's calls."""

import re
from functools import partial

from rekindle.chat.dialects.argument_grammar import ArgumentGrammar
from rekindle.chat.dialects.call_format import CallFormat, Slot
from rekindle.chat.dialects.object_calls import ObjectShape
from rekindle.chat.dialects.syntax.lark import Rules, Schema, Schemas, fixed, quote
from rekindle.chat.dialects.triggers import (
    begins_weakly,
    continues_with_separator,
    json_beginnings,
    opening_is_optional,
)

MAX_INDENT = 12  # levels where JSON is spread over lines; picked


def write_calls(rules: Rules, schemas: Schemas, call_format: CallFormat) -> str:
    """Return Lark for the calls of a reply."""
    rules.allow_spaces(_longest_space(call_format), in_json=call_format.indent * MAX_INDENT)
    is_object = ObjectShape.of(call_format) is not None
    is_weak = begins_weakly(call_format)

    def arguments(rule: str, schema: Schema) -> str:
        if call_format.members is None:
            return rules.json(rule, schema)
        return ArgumentGrammar(rules, call_format.members, schema).write(rule)

    def write(name: str, arguments: str) -> str:
        slots = {
            Slot.NAME: quote(quote(name)[1:-1] if is_object else name),
            Slot.ARGUMENTS: arguments,
            Slot.ID: f"/{call_format.id_pattern}/",
            Slot.INDEX: "/[0-9]{1,3}/",
        }
        found = []
        for i, piece in enumerate(call_format.call):
            if isinstance(piece, Slot):
                found.append(slots[piece])
            elif i == 0 and is_weak:
                found.append(_weak_beginning(rules, piece))
            else:
                found.append(fixed(rules, piece))
        if is_object and _ends_with_id(call_format):
            *found, before, call_id, _ = found
            found += [f'({before} {call_id} "\\"")?', fixed(rules, str(call_format.call[-1])[1:])]
        return " ".join(found)

    call = rules.calls(schemas, write, arguments)
    around = rules.literal if is_weak else partial(fixed, rules)
    opening, separator = around(call_format.opening), around(call_format.separator)
    closing = fixed(rules, call_format.closing)
    if call_format.separator.isspace():
        separator = "SPACE?"
        closing = f"SPACE? {fixed(rules, call_format.closing.lstrip())}" if closing else ""
    calls = rules.repeated(call, separator=separator)
    beginnings = [opening] if opening else []
    if continues_with_separator(call_format):
        beginnings.append(separator)
    if not beginnings:
        return f"{calls} {closing}"
    optional = "?" if not opening or opening_is_optional(call_format) else ""
    return f"({' | '.join(beginnings)}){optional} {calls} {closing}"


def _ends_with_id(call_format: CallFormat) -> bool:
    """Return whether an id follows the arguments. Models leave it out."""
    return call_format.call[-4::2] == (Slot.ARGUMENTS, Slot.ID)


def _weak_beginning(rules: Rules, text: str) -> str:
    """Return Lark for the text that begins a call, in the spellings that are triggers."""
    keyed, typed = json_beginnings(text)
    if not keyed:
        return rules.literal(text)
    key = quote(keyed[0][keyed[0].index('"') :])
    alternatives = [*map(quote, keyed), *(f'{quote(each)} "," SPACE? {key}' for each in typed)]
    rules.one_of("beginning", alternatives)
    return f"beginning SPACE? {fixed(rules, text[len(keyed[0]) :])}"


def _longest_space(call_format: CallFormat) -> int:
    texts = (call_format.opening, call_format.separator, call_format.closing, *call_format.call)
    spaces = (s for t in texts if isinstance(t, str) for s in re.findall(r"\s+", t))
    return max(map(len, spaces), default=0)
