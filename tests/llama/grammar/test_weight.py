"""What compiling costs is known before it begins: a small schema may take minutes."""

import json
import random
import string
from typing import Any

import pytest

from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import MAX_CHECKED_BYTES, GrammarCompiler
from rekindle.llama.grammar.weight import MAX_SECONDS, is_light, weigh
from rekindle.llama.tokenizer.vocabulary import Vocabulary

RANDOM = random.Random(18)


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def word() -> str:
    return "".join(RANDOM.choices(string.ascii_lowercase, k=8))


def multiple(number: float) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": number}


def tools(count: int) -> Grammar:
    """Return a grammar of that many calls, as a dialect writes it."""
    lines = ["start: " + " | ".join(f"call_{n}" for n in range(count))]
    for n in range(count):
        members = {word(): {"type": "string", "description": word() * 8} for _ in range(8)}
        arguments = {"type": "object", "properties": members, "required": list(members)[:2]}
        lines.append(f'call_{n}: "{word()}" %json {json.dumps(arguments)}')
    return Grammar(GrammarKind.LARK, "\n".join(lines))


SLOW = {
    "`multipleOf`": schema(multiple(999_999)),
    "`multipleOf` of parts": schema({"allOf": [multiple(each) for each in (997, 991, 983)]}),
    "`multipleOf` beyond numbers": schema(multiple(10**300)),
    "`patternProperties`": schema(
        {"type": "object", "patternProperties": {f"^{word()}.*": {} for _ in range(200)}}
    ),
    "`properties`": schema({"type": "object", "properties": {word(): {} for _ in range(4_000)}}),
    "`anyOf`": schema({"anyOf": [{"const": n} for n in range(4_000)]}),
    "`pattern`": schema({"type": "string", "pattern": word() * 16_000}),
    "`minimum` and `maximum`": schema(
        {"type": "array", "prefixItems": [{"minimum": n / 7} for n in range(2_000)]}
    ),
    "`format`": schema({"type": "array", "prefixItems": [{"format": "uri"}] * 4_000}),
    "`multipleOf` of a property `title`": schema(
        {"type": "object", "properties": {"title": multiple(999_999)}}
    ),
    "`multipleOf` of a property `properties`": schema(
        {"properties": {"properties": {"properties": {"default": multiple(999_999)}}}}
    ),
    "`multipleOf` of a default": schema({"$ref": "#/default", "default": multiple(999_999)}),
    "`multipleOf` of a definition": schema(
        {"$ref": "#/$defs/enum/const", "$defs": {"enum": {"const": multiple(999_999)}}}
    ),
    "in Lark: `multipleOf` of a rule with the mark in a text": Grammar(
        GrammarKind.LARK,
        f'start: "%json 1e{"9" * 30}" a\na: "%json 1" %json {json.dumps(multiple(999_999))}',
    ),
    "`multipleOf` of a schema behind white space": Grammar(
        GrammarKind.JSON_SCHEMA, f" \n{json.dumps(multiple(999_999))}"
    ),
    "in Lark: `multipleOf`": Grammar(
        GrammarKind.LARK, f"start: a\na: %json {json.dumps(multiple(999_999))}"
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_grammar_that_would_take_long_is_refused_with_the_reason(
    name: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(InvalidRequest, match="compiling it would take about") as refusal:
        GrammarCompiler(vocabulary).check(SLOW[name])
    reason = name.removeprefix("in Lark: ").split(" of ")[0].split(" beyond ")[0]
    assert reason in refusal.value.message


@pytest.mark.parametrize(
    "value",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 1_000, "minimum": 0, "maximum": 10**9},
        {"type": "string", "pattern": "^[a-z]{1,100000}$"},
        {"type": "string", "maxLength": 10**7},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**5},
        {"type": "object", "properties": {"sort": {"enum": [word() for _ in range(500)]}}},
    ],
    ids=str,
)
def test_what_real_schemas_ask_for_is_light(value: Any, vocabulary: Vocabulary) -> None:
    assert is_light(schema(value))
    GrammarCompiler(vocabulary).check(schema(value))


def test_two_hundred_kilobytes_of_tools_compile(vocabulary: Vocabulary) -> None:
    grammar = tools(200)
    assert len(grammar.source) > 180_000
    assert weigh(grammar).seconds < MAX_SECONDS / 2
    GrammarCompiler(vocabulary).check(grammar)


def test_compiled_grammars_count_by_their_memory_not_by_their_source(
    vocabulary: Vocabulary,
) -> None:
    """`multipleOf` 20,000 has 39 bytes of source and takes 5 MB."""
    grammars = GrammarCompiler(vocabulary)
    heavy = [schema(multiple(20_000 + n)) for n in range(6)]
    assert all(weigh(each).n_bytes > 5_000_000 for each in heavy)
    for grammar in heavy:
        grammars.check(grammar)
    assert len(grammars._checked) < len(heavy)
    assert grammars._checked.n_bytes <= MAX_CHECKED_BYTES
