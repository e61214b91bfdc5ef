"""The grammar compiler: what it keeps, what it refuses, and that it compiles once."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import llguidance
import numpy as np
import pytest

from rekindle.errors import InvalidRequest
from rekindle.generation.request import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from rekindle.llama.grammar import compiler, weight
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.tokenizer.vocabulary import Vocabulary


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that were compiled."""
    grammars: list[Grammar] = []
    compile_grammar = GrammarCompiler._compile

    def noted(self: GrammarCompiler, grammar: Grammar) -> Any:
        grammars.append(grammar)
        return compile_grammar(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", noted)
    return grammars


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def tool(number: int) -> Grammar:
    arguments = {f"argument_{number}_{n}": {"type": "string"} for n in range(4)}
    return schema({"type": "object", "properties": arguments})


def test_a_thousand_checks_evict_no_grammar_in_use(
    vocabulary: Vocabulary, compiled: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_CHECKED_BYTES", 8 * weight.BASE_BYTES)
    grammars = GrammarCompiler(vocabulary)
    in_use = [schema({"const": n}) for n in range(3)]
    for grammar in in_use:
        grammars.matcher(grammar)
    for number in range(1_000):
        grammars.check(tool(number))
    assert len(compiled) == 1_003
    for grammar in in_use:
        grammars.matcher(grammar)
    for number in range(1_000):
        grammars.check(tool(number))
    assert len(compiled) == 1_003


def test_a_reply_after_a_check_does_not_compile_again(
    vocabulary: Vocabulary, compiled: list[Grammar]
) -> None:
    grammars = GrammarCompiler(vocabulary)
    grammars.check(tool(1))
    grammars.matcher(tool(1))
    grammars.matcher(tool(1))
    grammars.check(tool(1))
    assert len(compiled) == 1


def test_a_grammar_is_weighed_once_and_not_while_others_wait(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(vocabulary)
    weigh, others_wait = weight.weigh, []

    def noted(grammar: Grammar) -> weight.Weight:
        others_wait.append(grammars._lock.locked())
        return weigh(grammar)

    monkeypatch.setattr(compiler, "weigh", noted)
    grammars.check(tool(1))
    grammars.matcher(tool(1))
    assert others_wait == [False]


def test_grammars_are_kept_by_size(
    vocabulary: Vocabulary, compiled: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_USED_BYTES", 7 * weight.BASE_BYTES)
    grammars = GrammarCompiler(vocabulary)
    small, other = schema({"const": 1}), schema({"const": 2})
    large = schema({"enum": [f"value {n}" for n in range(1_000)]})
    grammars.matcher(small)
    grammars.matcher(other)
    grammars.matcher(small)
    assert len(compiled) == 2
    grammars.matcher(large)  # as large as five others
    grammars.matcher(small)
    assert len(compiled) == 3
    grammars.matcher(other)
    assert len(compiled) == 4


def test_threads_that_ask_for_one_grammar_compile_it_once(
    vocabulary: Vocabulary, compiled: list[Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(vocabulary)
    n_threads = 4
    barrier = threading.Barrier(n_threads)
    waiting = threading.Semaphore(0)
    compile_source = grammars._compile

    def compile_late(grammar: Grammar) -> Any:
        for _ in range(n_threads - 1):
            waiting.acquire()  # the others are about to ask
        return compile_source(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_late)

    def ask(index: int) -> None:
        barrier.wait()
        if index:
            while not grammars._compiling:
                threading.Event().wait(0.001)
            waiting.release()
        (grammars.check if index % 2 else grammars.matcher)(tool(7))

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(ask, range(n_threads)))
    assert len(compiled) == 1


def test_a_grammar_that_failed_is_refused_again_without_compiling(
    vocabulary: Vocabulary, compiled: list[Grammar]
) -> None:
    grammars = GrammarCompiler(vocabulary)
    for ask in (grammars.check, grammars.check, grammars.matcher):
        with pytest.raises(InvalidRequest, match="json_schema cannot be used as a grammar"):
            ask(schema({"type": "nonsense"}))
    assert len(compiled) == 1


def test_a_source_beyond_the_limit_is_refused(vocabulary: Vocabulary) -> None:
    long = Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1))
    with pytest.raises(InvalidRequest, match=r"has 1,048,577 bytes; at most 1,048,576 are"):
        GrammarCompiler(vocabulary).check(long)


def test_json_that_is_nested_too_deeply_is_refused(vocabulary: Vocabulary) -> None:
    deep = Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500)
    with pytest.raises(InvalidRequest, match="recursion limit"):
        GrammarCompiler(vocabulary).check(deep)


def chain(n_levels: int, body: Any, n_nested: int) -> Grammar:
    """A schema of definitions that each refer to the next, inside nested objects."""
    definitions: dict[str, Any] = {str(n_levels): {"type": "string"}}
    for level in range(n_levels):
        inner: Any = body({"$ref": f"#/$defs/{level + 1}"})
        for _ in range(n_nested):
            inner = {"properties": {"": inner}, "required": [""]}
        definitions[str(level)] = inner
    return schema({"$ref": "#/$defs/0", "$defs": definitions})


@pytest.mark.parametrize(
    "body",
    [
        lambda reference: reference,
        lambda reference: {"properties": {"x": reference}},
        lambda reference: {"items": reference},
        lambda reference: {"anyOf": [reference, {"type": "integer"}]},
        lambda reference: {"allOf": [reference, {"minLength": 1}]},
    ],
)
@pytest.mark.parametrize(("n_levels", "n_nested"), [(4_000, 0), (100, 25)])
def test_a_long_chain_of_references_does_not_overflow_the_stack(
    vocabulary: Vocabulary, body: Any, n_levels: int, n_nested: int
) -> None:
    """On a thread's usual stack, 1,000 references ended the process."""
    with suppress(InvalidRequest):  # "schema too large"
        GrammarCompiler(vocabulary).check(chain(n_levels, body, n_nested))


@pytest.mark.parametrize(
    "value",
    [
        {"const": -(2**63)},
        {"enum": [1, [-(2**63) + 400]]},
        {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18},
        {"type": "array", "items": {"type": "integer", "maximum": -(10**400)}},
        {"type": "object", "properties": {"title": {"const": -(2**63)}}},
        {"$defs": {"default": {"const": -(2**63)}}, "$ref": "#/$defs/default"},
        {"$ref": "#/examples/0", "examples": [{"const": -(2**63)}]},
    ],
)
def test_a_number_at_the_end_of_64_bits_is_refused(vocabulary: Vocabulary, value: Any) -> None:
    """llguidance ends the process there."""
    with pytest.raises(InvalidRequest, match="too small"):
        GrammarCompiler(vocabulary).check(schema(value))


def test_an_object_with_many_properties_can_be_written(vocabulary: Vocabulary) -> None:
    wide = schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(900)}}
    )
    sample = tuple(vocabulary.tokenize('{"p3": "a", "p800": "b"}', parse_special=True))
    GrammarCompiler(vocabulary).check(replace(wide, samples=(sample,)))


@pytest.mark.parametrize(
    "value",
    [
        {"const": -(10**18)},
        {"type": "integer", "minimum": -5, "maximum": 2**63 - 1},
        {"const": 1, "description": "-9223372036854775808"},
        {"const": "-9223372036854775808"},
        {"type": "integer", "default": -(2**63)},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "default": -(2**63)}}},
    ],
)
def test_other_long_numbers_are_accepted(vocabulary: Vocabulary, value: Any) -> None:
    GrammarCompiler(vocabulary).check(schema(value))


def test_a_check_fails_for_a_sample_that_the_grammar_refuses(vocabulary: Vocabulary) -> None:
    grammars = GrammarCompiler(vocabulary)
    grammar = schema({"type": "object", "properties": {"a": {"type": "integer"}}})

    def with_samples(*texts: str) -> Grammar:
        samples = (tuple(vocabulary.tokenize(text, parse_special=True)) for text in texts)
        return replace(grammar, samples=tuple(samples))

    grammars.check(grammar)
    grammars.check(with_samples('{"a": 1}', "{}"))
    for refused in ('{"a": "x"}', '{"a": 1'):  # wrong, and not whole
        with pytest.raises(InvalidRequest, match="refuses"):
            grammars.check(with_samples("{}", refused))


def test_a_grammar_that_grows_too_large_while_it_is_followed_is_the_clients_fault(
    vocabulary: Vocabulary,
) -> None:
    lengths = [{"type": "string", "maxLength": n} for n in range(1000)]
    matcher = GrammarCompiler(vocabulary).matcher(schema({"anyOf": lengths}))
    logits = np.zeros(vocabulary.n_vocab, dtype=np.float32)
    text = vocabulary.tokenize('"' + 300 * "a", parse_special=False)

    def follow() -> None:
        for token in text:
            matcher.apply(logits)
            matcher.accept(token)

    with pytest.raises(InvalidRequest, match="too complex"):
        follow()


def test_a_step_of_the_lexer_has_a_bound(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With llguidance's own, a hostile grammar takes 0.2 s for a token."""
    given: list[dict[str, Any]] = []
    limits = llguidance.LLParserLimits

    def noted(**arguments: Any) -> Any:
        given.append(arguments)
        return limits(**arguments)

    monkeypatch.setattr(llguidance, "LLParserLimits", noted)
    GrammarCompiler(vocabulary).matcher(schema({"type": "string"}))
    [arguments] = given
    assert arguments["step_lexer_fuel"] == compiler.STEP_FUEL < limits().step_lexer_fuel
