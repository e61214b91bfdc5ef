"""The grammars of the dialects, run by llguidance over a real vocabulary."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.families import HERMES
from rekindle.chat.dialects.formatted import formatted
from rekindle.chat.dialects.syntax.lark import (
    Literal,
    Schemas,
    anchored,
    literals,
    usable_schemas,
)
from rekindle.chat.reply.parser import ParsedReply, parse
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.chat.dialects.cases import ARGUMENTS, CASES, NAME, SCHEMAS, Case
from tests.chat.dialects.formats import ALL
from tests.chat.dialects.formats import SCHEMAS as TOOLS
from tests.chat.dialects.writing import Calls, written

MAX_WALK = 400  # tokens; picked: a call of these tools has about fifty

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@dataclass
class Lab:
    """`controls` stand for marks, which this vocabulary has as plain text only."""

    vocabulary: Vocabulary
    compiler: GrammarCompiler
    controls: tuple[int, ...]

    def matcher(self, source: str) -> Matcher:
        return self.compiler.matcher(Grammar(GrammarKind.LARK, source))

    def compiles(self, schema: dict[str, Any]) -> bool:
        try:
            self.compiler.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        except InvalidRequest:
            return False
        return True

    def allowed(self, matcher: Matcher) -> Any:
        logits = np.zeros(self.vocabulary.n_vocab, dtype=np.float32)
        matcher.apply(logits)
        return np.flatnonzero(np.isfinite(logits))

    def may_end(self, matcher: Matcher) -> bool:
        return not self.vocabulary.eog_tokens.isdisjoint(self.allowed(matcher).tolist())

    def accepts(self, source: str, tokens: list[int]) -> bool:
        matcher = self.matcher(source)
        for token in tokens:
            if token not in self.allowed(matcher):
                return False
            matcher.accept(token)
        return self.may_end(matcher)

    def accepts_text(self, source: str, text: str) -> bool:
        return self.accepts(source, self.vocabulary.tokenize(text, parse_special=False))

    def walk(self, source: str, seed: int) -> list[int] | None:
        """Tokens taken at random until the grammar lets the turn end; None: it took too long."""
        random = np.random.default_rng(seed)
        matcher = self.matcher(source)
        tokens: list[int] = []
        while len(tokens) < MAX_WALK:
            allowed = self.allowed(matcher)
            assert len(allowed), self.vocabulary.detokenize(tokens, render_special=True)
            if not self.vocabulary.eog_tokens.isdisjoint(allowed.tolist()):
                return tokens
            tokens.append(int(random.choice(allowed)))
            matcher.accept(tokens[-1])
        return None


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Iterator[Lab]:
    model = GgufModel(embedded_model, gpu_layers=0)
    vocabulary = model.vocabulary
    controls = [vocabulary.tokenize(s, parse_special=True)[0] for s in vocabulary.special_strings]
    free = tuple(token for token in controls if token not in vocabulary.eog_tokens)
    yield Lab(vocabulary, GrammarCompiler(vocabulary), free)
    model.close()


def quoting(dialect: Dialect, *, parallel: bool = True, schemas: Schemas = SCHEMAS) -> str:
    return dialect.grammar(schemas, parallel=parallel, literal=literals({}))


def said(case: Case, text: str) -> ParsedReply:
    return parse(case.dialect, SCHEMAS, text, begins_in_reasoning=False)


def is_valid(name: str, arguments: dict[str, Any]) -> bool:
    if name == "ping":
        return arguments == {}
    return (
        name == NAME
        and {"city", "days"} <= arguments.keys() <= {"city", "days", "metric", "unit"}
        and isinstance(arguments["city"], str)
        and isinstance(arguments["days"], int)
        and 0 <= arguments["days"] <= 99
        and isinstance(arguments.get("metric", True), bool)
        and arguments.get("unit", "c") in ("c", "f")
    )


@by_case
def test_what_the_model_writes_is_accepted_and_read_back(case: Case, lab: Lab) -> None:
    for text, n_calls in ((case.text, 1), ("\n" + case.text, 1), (case.two, 2)):
        if n_calls == 2 and not case.parallel:
            continue
        assert lab.accepts_text(quoting(case.dialect), text), text
        read = said(case, text)
        assert [call.name for call in read.calls] == [NAME] * n_calls
        assert all(json.loads(call.arguments_json) == ARGUMENTS for call in read.calls)
        assert not read.text


@by_case
def test_two_calls_are_refused_where_one_was_asked_for(case: Case, lab: Lab) -> None:
    source = quoting(case.dialect, parallel=False)
    assert lab.accepts_text(source, case.text)
    assert not lab.accepts_text(source, case.two)


@by_case
def test_what_the_tools_do_not_take_is_refused(case: Case, lab: Lab) -> None:
    source = quoting(case.dialect)
    assert not lab.accepts_text(source, case.text.replace(NAME, "get_wealth"))
    assert not lab.accepts_text(source, re.sub(r"\b3\b", "300", case.text))
    assert not lab.accepts_text(source, re.sub(r"\b[tT]rue\b", "maybe", case.text))
    assert not lab.accepts_text(source, case.text.replace("city", "town"))
    assert not lab.accepts_text(source, case.text + "!")
    assert not lab.accepts_text(source, "Sure. " + case.text)
    assert not lab.accepts_text(source, case.text[: -len(case.text) // 3])


@by_case
def test_whatever_a_random_model_writes_is_a_valid_call(case: Case, lab: Lab) -> None:
    source = quoting(case.dialect)
    n_read = 0
    for seed in range(8):
        tokens = lab.walk(source, seed)
        if tokens is None:
            continue
        text = lab.vocabulary.detokenize(tokens, render_special=True).decode()
        read = said(case, text)
        assert read.calls, text
        assert not read.text, text
        for call in read.calls:
            assert is_valid(call.name, json.loads(call.arguments_json)), text
        n_read += 1
    assert n_read >= 4


@by_case
def test_marks_that_are_control_tokens_are_written_as_these(case: Case, lab: Lab) -> None:
    marks = control_marks(case.dialect, lab)
    if not marks:
        return  # this dialect is plain text
    source = case.dialect.grammar(SCHEMAS, parallel=True, literal=literals(marks))
    pieces = {token: mark.encode() for mark, token in marks.items()}
    n_read = 0
    for seed in range(4):
        tokens = lab.walk(source, seed)
        if tokens is None:
            continue
        text = b"".join(pieces.get(t, lab.vocabulary.piece(t)) for t in tokens).decode()
        read = said(case, text)
        assert read.calls, text
        assert not read.text, text
        n_read += 1
    assert n_read >= 2


def control_marks(dialect: Dialect, lab: Lab) -> dict[str, int]:
    """Every mark of the dialect that some vocabulary may have as a control token."""
    marks: dict[str, None] = {}

    def record(text: str) -> str:
        marks.update(dict.fromkeys(re.findall(r"<[^\s=>]+>|\[[A-Z_]+\]", text)))
        return '""'

    dialect.grammar(SCHEMAS, parallel=True, literal=record)
    assert len(marks) <= len(lab.controls)
    return dict(zip(marks, lab.controls, strict=False))


MADE: tuple[Calls, ...] = (
    [("ping", {})],
    [("search", {"query": "a \"b\" <c>\n'd' \\e \u00fc"})],
    [("search", {"query": "it's", "limit": -3, "ratio": 0.5, "exact": True, "mode": "any"})],
    [("search", {"query": "x", "exact": False, "tags": ["a", "b c"]})],
    [("search", {"query": "x", "tags": [], "filter": {"key": "k"}})],
    [("search", {"query": "x", "limit": 1}), ("ping", {}), ("search", {"query": "y"})],
)


@pytest.mark.parametrize("name", ALL)
def test_the_grammar_accepts_what_a_template_writes(name: str, lab: Lab) -> None:
    dialect = formatted(name, ALL[name])
    source = dialect.grammar(TOOLS, parallel=True, literal=literals({}))
    for made in MADE:
        text = written(ALL[name], made)
        assert lab.accepts_text(source, text), text
        assert not lab.accepts_text(source, text.replace("search", "seek").replace("ping", "pong"))


@pytest.mark.parametrize("name", ALL)
def test_the_grammar_refuses_arguments_that_the_schema_does_not_allow(name: str, lab: Lab) -> None:
    dialect = formatted(name, ALL[name])
    source = dialect.grammar(TOOLS, parallel=True, literal=literals({}))
    for wrong in ({}, {"query": "x", "mode": "none"}, {"query": "x", "nothing": "y"}):
        assert not lab.accepts_text(source, written(ALL[name], [("search", wrong)])), wrong


PATTERNED: dict[str, Any] = {
    "measure": {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": anchored(r"wave/[0-9]{2}\n\"x\"")}},
        "required": ["input"],
        "additionalProperties": False,
    }
}


@pytest.mark.parametrize("name", ALL)
def test_the_grammar_enforces_the_pattern_of_a_whole_text(name: str, lab: Lab) -> None:
    dialect = formatted(name, ALL[name])
    source = dialect.grammar(PATTERNED, parallel=True, literal=literals({}))
    for text, is_good in (('wave/12\n"x"', True), ("wave/12", False), ('a wave/12\n"x"', False)):
        call = written(ALL[name], [("measure", {"input": text})])
        call = call.replace(repr(text), json.dumps(text))  # with a pattern, only double quotes
        assert lab.accepts_text(source, call) is is_good, call


AWKWARD: dict[str, Any] = {
    "open": {"type": "object"},
    "nothing": {},
    "untyped": {"properties": {"a": {}}, "required": ["a"]},
    "referring": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a"],
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}},
        },
    },
    "optional": {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "b": {"type": ["integer", "null"]},
            "c": {"type": "array", "items": {"type": "string"}},
            "d": {"type": "string", "format": "no-such-format"},
            "e": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "f": {"enum": ["a\nb", "", 3, None]},
            "g": True,
            "h": {"type": "object", "additionalProperties": {"type": "integer"}},
            "i": {"type": "string", "minLength": 9, "maxLength": 3},
            "j": {"type": "string", "maxLength": 1_000_000},
        },
    },
    'names with "quotes" and \\': {"type": "object", "properties": {'a "b"': {"type": "null"}}},
}


@by_case
def test_awkward_schemas_make_a_grammar_all_the_same(case: Case, lab: Lab) -> None:
    for schemas in ({name: schema} for name, schema in AWKWARD.items()):
        source = quoting(case.dialect, schemas=usable_schemas(schemas, lab.compiles))
        assert len(lab.allowed(lab.matcher(source)))


def test_a_schema_that_does_not_compile_allows_any_object(lab: Lab) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    usable = usable_schemas({"broken": broken, **SCHEMAS}, lab.compiles)
    assert usable == {"broken": {"type": "object"}, **SCHEMAS}
    source = quoting(HERMES, schemas=usable)
    call = '<tool_call>{"name": "broken", "arguments": {"a": [1]}}</tool_call>'
    assert lab.accepts_text(source, call)


def test_white_space_in_arguments_is_bounded(lab: Lab) -> None:
    call = '<tool_call>{"name": "ping", "arguments": {%s}}</tool_call>'
    assert lab.accepts_text(quoting(HERMES), call % "\n  ")
    assert not lab.accepts_text(quoting(HERMES), call % ("\n" * 9))


def test_literal_text_keeps_control_strings_apart() -> None:
    literal: Literal = literals({"<a>": 7, "<a><b>": 8})
    assert literal('x<a>"<a><b>') == '"x" <[7]> "\\"" <[8]>'
