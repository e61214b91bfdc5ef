"""Estimates what compiling a grammar costs, before llguidance begins.

A native call cannot be interrupted, and llguidance has no limit for some of its work: 40 bytes,
`{"type": "integer", "multipleOf": 999999}`, take 16 s and 260 MB. The estimates are of one core of
a small server. Each was measured alone; they add up.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rekindle.generation.request import Grammar, GrammarKind

MICROSECONDS_PER_BYTE = 2.0  # of the source
PER_GBNF_BYTE = 20.0  # to translate it
PER_SCHEMA = 150.0  # microseconds for each object in it
PER_PROPERTY_PAIR = 0.7  # the members of one object are compared with each other
PER_CHOICE_PAIR = 0.7  # and so are the members of `anyOf` and `oneOf`
PER_PATTERN_PAIR = 250.0  # and the `patternProperties`
PER_PATTERN_CHARACTER = 35.0
PER_MULTIPLE = 20.0  # `multipleOf` makes so many states
PER_RANGE = 3_000.0  # `minimum` and `maximum` become a regular expression
PER_RANGE_DIGIT = 100.0
PER_FORMAT = 1_500.0
BEYOND_LIMITS = 10**12  # states
RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Keywords whose values are no schemas, unless a reference leads into them.
NOTES = {"default", "examples", "description", "title", "$comment"}
VALUES = {"enum", "const"}
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_PLAIN_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
LEAST_NUMBER = -(2**63) + 2**10  # some more than the doubles that round to -2^63
_LONG_NEGATIVE = re.compile(r"-\d{19}|-[\d.]+[eE]")

# Memory of a compiled grammar: 20 to 45 bytes for each byte of its source, and 20 to 42 bytes for
# each microsecond of the rest.
BASE_BYTES = 128 * 2**10
BYTES_PER_SOURCE_BYTE = 45
BYTES_PER_MICROSECOND = 42

MAX_SECONDS = 3.0  # estimated; picked: 10 times what 150 tools take
MAX_LIGHT_SECONDS = 0.1  # picked
MAX_LIGHT_BYTES = 32 * 2**10  # a source beyond it is not even parsed

_JSON = re.compile("%json ")  # in Lark, before a schema; a text may have it too
_DECODER = json.JSONDecoder(parse_float=Decimal)
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Weight:
    seconds: float  # to compile the grammar, about
    n_bytes: int  # of the compiled grammar, about
    heaviest: str  # the keyword that costs most


def is_light(grammar: Grammar) -> bool:
    """Return whether the grammar compiles, or is refused, in a moment."""
    if len(grammar.source) > MAX_LIGHT_BYTES:
        return False
    seconds = weigh(grammar).seconds
    return seconds <= MAX_LIGHT_SECONDS or seconds > MAX_SECONDS


def weigh(grammar: Grammar) -> Weight:
    costs = _Costs()
    for schema in _schemas(grammar):
        costs.add_schema(schema)
    n_source = len(grammar.source)
    microseconds = sum(costs.by_keyword.values())
    is_gbnf = grammar.kind is GrammarKind.GBNF
    for_size = n_source * (PER_GBNF_BYTE if is_gbnf else MICROSECONDS_PER_BYTE)
    by_keyword = {**costs.by_keyword, "its size": for_size}
    return Weight(
        seconds=(microseconds + for_size) / 1e6,
        n_bytes=BASE_BYTES
        + BYTES_PER_SOURCE_BYTE * n_source
        + int(BYTES_PER_MICROSECOND * microseconds),
        heaviest=max(by_keyword, key=by_keyword.__getitem__),
    )


def fatal_number(grammar: Grammar) -> int | Decimal | None:
    """Return a number that llguidance cannot count down from, or None.

    `{"const": -9223372036854775808}` ends the process: integer ranges at the end of 64 bits recurse
    for ever. llguidance rounds numbers to doubles and moves smaller ones up to that end.
    """
    if _LONG_NEGATIVE.search(grammar.source) is None:
        return None
    for schema in _schemas(grammar):
        for part in _parts(schema, skipped=NOTES):
            if isinstance(part, int | Decimal) and part < LEAST_NUMBER:
                return part
    return None


def _schemas(grammar: Grammar) -> Iterator[Any]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            yield _parsed(grammar.source, 0)
        case GrammarKind.LARK:
            for mark in _JSON.finditer(grammar.source):
                yield _parsed(grammar.source, mark.end())


def _parsed(source: str, start: int) -> Any:
    space = _SPACE.match(source, start)
    assert space is not None
    try:
        return _DECODER.raw_decode(source, space.end())[0]
    except (ValueError, ArithmeticError, RecursionError):  # llguidance says what is wrong
        return None


def _parts(schema: Any, *, skipped: set[str]) -> Iterator[Any]:
    """Yield the schema and every value in it, without those of the keywords to skip.

    A name in a map of schemas, such as a property `default`, is no keyword. A reference may lead
    anywhere, so a schema with an unusual one is read whole.
    """
    if skipped and any(map(_is_unusual, _parts(schema, skipped=set()))):
        skipped = set()
    waiting = [(schema, False)]
    while waiting:
        part, is_map = waiting.pop()
        yield part
        if isinstance(part, list):
            waiting += [(each, False) for each in part]
        elif isinstance(part, dict):
            waiting += [
                (value, key in MAPS and not is_map)
                for key, value in part.items()
                if is_map or key not in skipped
            ]


def _is_unusual(part: Any) -> bool:
    if not isinstance(part, dict) or "$ref" not in part:
        return False
    target = part["$ref"]
    return not isinstance(target, str) or _PLAIN_REFERENCE.fullmatch(target) is None


class _Costs:
    def __init__(self) -> None:
        self.by_keyword: dict[str, float] = {}

    def add_schema(self, schema: Any) -> None:
        sum_of_multiples, common_multiple = 0, 1
        is_merged = False  # parts of the schema apply to one value
        for part in _parts(schema, skipped=NOTES | VALUES):
            if not isinstance(part, dict):
                continue
            self._add_object(part)
            is_merged |= "allOf" in part or "$ref" in part
            if (multiple := _coefficient(part.get("multipleOf"))) > 1:
                sum_of_multiples += multiple
                common_multiple = min(math.lcm(common_multiple, multiple), BEYOND_LIMITS)
        n_states = max(sum_of_multiples, common_multiple if is_merged else 0)
        if n_states > 1:
            self._add("`multipleOf`", PER_MULTIPLE * n_states)

    def _add_object(self, part: dict[str, Any]) -> None:
        self._add("the number of its parts", PER_SCHEMA)
        n_members = _length(part.get("properties"))
        n_patterns = _length(part.get("patternProperties"))
        self._add("`properties`", PER_PROPERTY_PAIR * n_members * (n_members + n_patterns))
        self._add("`patternProperties`", PER_PATTERN_PAIR * n_patterns**2)
        for key in ("anyOf", "oneOf"):
            choices = part.get(key)
            n_choices = len(choices) if isinstance(choices, list) else 0
            self._add(f"`{key}`", PER_CHOICE_PAIR * n_choices**2)
        if isinstance(pattern := part.get("pattern"), str):
            self._add("`pattern`", PER_PATTERN_CHARACTER * len(pattern))
        ranges = [part[key] for key in RANGES if _is_number(part.get(key))]
        if ranges:
            n_digits = max(_n_digits(each) for each in ranges)
            self._add("`minimum` and `maximum`", PER_RANGE + PER_RANGE_DIGIT * n_digits)
        if "format" in part:
            self._add("`format`", PER_FORMAT)

    def _add(self, keyword: str, microseconds: float) -> None:
        if microseconds:
            self.by_keyword[keyword] = self.by_keyword.get(keyword, 0.0) + microseconds


def _length(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _n_digits(value: int | Decimal) -> int:
    return abs(Decimal(value).adjusted()) if value else 1


def _coefficient(value: Any) -> int:
    """Return the digits of a number as an integer: 2.50 has 25."""
    if not _is_number(value):
        return 0
    try:
        number = Decimal(value).normalize()
        _, digits, exponent = number.as_tuple()
        if not isinstance(exponent, int) or len(digits) + max(0, exponent) > 12:
            return BEYOND_LIMITS
    except InvalidOperation:
        return BEYOND_LIMITS
    return int("".join(map(str, digits))) * int(10 ** max(0, exponent))
