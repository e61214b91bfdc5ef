"""Estimates the room that the end of a call needs, and whether the engine finds that end.

Wherever the model stands in a call, all required members may be left to write, and the rest of
one optional value. The engine's search for an end is limited (decision 0033): a call streams only
if the estimated search is well within that limit.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from rekindle.chat.reply.pattern_size import PatternSize

MAX_DEPTH = 32  # of a schema; picked
MAX_VISITS = 10_000  # of schemas; picked
# The engine looks for an end with at least 2,048 tokens left.
MAX_SIZE = 1_920
# Of the 10,000 questions of the engine's search. The counts below are measured, rounded up.
MAX_QUESTIONS = 8_000

_TAGS = 28  # tokens around a member or an item in formats with tags
_LETTER = 320  # questions for a letter or digit that is not fixed
_VALUES = {"object": (2, 40), "array": (2, 40), "string": (2, 60), "boolean": (5, 120)}
_NUMBER = (1, 240)
_FORMATS = {"date-time": (20, 2_400), "date": (10, 1_200), "time": (9, 1_200)}
_FORMATS |= {"uuid": (36, 6_800), "ipv4": (7, 2_100), "ipv6": (39, 6_800)}
_OTHER_FORMAT = (16, 2_400)


@dataclass(frozen=True, slots=True)
class EndSize:
    characters: int = 0
    questions: int = 0  # of the engine's search

    def plus(self, other: "EndSize", times: int = 1) -> "EndSize":
        return EndSize(
            self.characters + times * other.characters, self.questions + times * other.questions
        )


_TOO_LARGE = EndSize(10**9, 10**9)


def end_size(schema: Any) -> int | None:
    """Return about how many characters may be left to write; None: do not count on an end."""
    size = _Estimate(schema).of(schema)
    if size is None or size.characters > MAX_SIZE or size.questions > MAX_QUESTIONS:
        return None
    return size.characters


class _Estimate:
    """The end of one schema. None: it has no end, because it requires itself."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: list[str] = []  # references that are being followed
        self._n_visits = 0

    def of(self, schema: Any, depth: int = 0) -> EndSize | None:
        self._n_visits += 1
        if depth > MAX_DEPTH or self._n_visits > MAX_VISITS:
            return _TOO_LARGE
        if not isinstance(schema, dict):
            return EndSize(*_VALUES["string"])
        if "const" in schema:
            return EndSize(len(json.dumps(schema["const"])))
        if isinstance(choices := schema.get("enum"), list) and choices:
            return EndSize(max(len(json.dumps(each)) for each in choices), 130 + 6 * len(choices))
        parts = [self._own(schema, depth)]
        for key in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(key), list) and choices:
                parts.append(_largest([self.of(each, depth + 1) for each in choices]))
        if isinstance(every := schema.get("allOf"), list):
            parts += [self.of(each, depth + 1) for each in every]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._referenced(reference, depth))
        return _sum(parts)

    def _own(self, schema: dict[str, Any], depth: int) -> EndSize | None:
        kind = schema.get("type")
        size = EndSize(*_VALUES.get(str(kind), _VALUES["string"]))
        if kind in ("integer", "number"):
            size = _number(schema)
        parts = [size, self._members(schema, depth), self._items(schema, depth)]
        if n_least := _count(schema.get("minLength")):
            parts.append(EndSize(n_least, 120 + n_least // 3))
        if isinstance(pattern := schema.get("pattern"), str):
            parts.append(_pattern(pattern))
        if isinstance(name := schema.get("format"), str):
            parts.append(EndSize(*_FORMATS.get(name, _OTHER_FORMAT)))
        return _sum(parts)

    def _members(self, schema: dict[str, Any], depth: int) -> EndSize | None:
        found = schema.get("properties")
        properties = found if isinstance(found, dict) else {}
        required = dict.fromkeys(_strings(schema.get("required")))
        parts = [self._member(name, properties.get(name), depth) for name in required]
        others = [name for name in properties if name not in required]
        optional = [self._member(name, properties[name], depth) for name in others]
        if isinstance(schema.get("additionalProperties"), dict):
            optional.append(self._member("", schema["additionalProperties"], depth))
        # A value that only repeats an open reference ends like the others.
        if any(optional):
            parts.append(_largest(optional))
        return _sum(parts)

    def _member(self, name: str, schema: Any, depth: int) -> EndSize | None:
        value = self.of(schema, depth + 1)
        around = EndSize(len(json.dumps(name)) + len(": , ") + _TAGS, 100)
        return value and value.plus(around)

    def _items(self, schema: dict[str, Any], depth: int) -> EndSize | None:
        n_least = _count(schema.get("minItems"))
        item = self.of(schema.get("items"), depth + 1) if "items" in schema or n_least else None
        firsts = schema.get("prefixItems")
        some = [self.of(each, depth + 1) for each in firsts] if isinstance(firsts, list) else []
        largest = _largest([item, *some])
        if largest is None:
            return None if n_least else EndSize()
        return EndSize().plus(largest.plus(EndSize(2 + _TAGS, 20)), n_least + 1)

    def _referenced(self, reference: str, depth: int) -> EndSize | None:
        if reference in self._open:
            return None
        found = _resolved(self._root, reference)
        if found is None:
            return _TOO_LARGE
        self._open.append(reference)
        size = self.of(found, depth + 1)
        self._open.pop()
        return size


def _resolved(root: Any, reference: str) -> Any | None:
    """Return the schema at this JSON pointer of the root; None: there is none."""
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        if not isinstance(root, dict):
            return None
        root = root.get(step.replace("~1", "/").replace("~0", "~"))
    return root


def _pattern(pattern: str) -> EndSize:
    found = PatternSize(pattern).find()
    return EndSize(found[0], _LETTER * found[1]) if found is not None else _TOO_LARGE


def _number(schema: dict[str, Any]) -> EndSize:
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    sizes = [len(json.dumps(schema[key])) + 1 for key in bounds if key in schema]
    n_characters, n_questions = _NUMBER
    n_digits = max(sizes, default=1)
    return EndSize(n_digits * n_characters, n_digits * n_questions)


def _largest(sizes: list[EndSize | None]) -> EndSize | None:
    """Return a size that each of the alternatives stays within. Those without an end are left."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return EndSize(max(size.characters for size in known), max(size.questions for size in known))


def _sum(sizes: list[EndSize | None]) -> EndSize | None:
    total = EndSize()
    for size in sizes:
        if size is None:
            return None
        total = total.plus(size)
    return total


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _count(value: Any) -> int:
    return math.ceil(value) if isinstance(value, int | float) and 0 < value < math.inf else 0
