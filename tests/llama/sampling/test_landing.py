"""Calls that are ended in time: made-up models against the real grammars and a real vocabulary.

No made-up model ends a call by itself if it can go on.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.families import HERMES
from rekindle.chat.dialects.formatted import formatted
from rekindle.chat.dialects.syntax.lark import literals
from rekindle.chat.reply.end_size import end_size
from rekindle.generation.request import (
    LANDING_TOKENS,
    Grammar,
    GrammarKind,
    GrammarStart,
    Landing,
    Sampling,
    Trigger,
)
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.grammar.shortest_end import completes
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.sampler import LlamaSampler
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.chat.dialects.cases import CASES, Case
from tests.chat.dialects.formats import FORMATS

Logits = NDArray[np.float32]
Model = Callable[[int], Logits]  # logits by position

STRING = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "two strings": {
        "properties": {"mode": STRING, "path": STRING, "content": STRING},
        "required": ["path", "content"],
    },
    "nothing required": {"properties": {"path": STRING, "deep": {"type": "array"}}},
    "anything": {},
    "nested": {
        "properties": {
            "optional": {
                "type": "object",
                "properties": {f"long_name_{i}": STRING for i in range(4)},
                "required": [f"long_name_{i}" for i in range(4)],
            },
            "edits": {
                "type": "array",
                "minItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"old": STRING, "new": STRING, "all": {"type": "boolean"}},
                    "required": ["old", "new"],
                },
            },
        },
        "required": ["edits"],
    },
    "closed choices": {
        "properties": {
            "kind": {"enum": ["a long first choice of words", "no", "nothing at all"]},
            "of": {"anyOf": [{"type": "object", "required": ["x"]}, {"type": "null"}, STRING]},
            "n": {"type": "integer", "minimum": 12},
            "ratio": {"type": "number", "exclusiveMaximum": 0},
            "yes": {"type": "boolean"},
            "fixed": {"const": "always"},
        },
        "required": ["kind", "of", "n", "ratio", "yes", "fixed"],
    },
    "a list without end": {
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "required": ["node"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": STRING,
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "left", "next"],
                "additionalProperties": False,
            }
        },
    },
    "strings of a form": {
        "properties": {
            "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            "word": {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$"},
            "long": {"type": "string", "minLength": 40},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["day", "word", "long", "when"],
    },
}


@dataclass
class Lab:
    vocabulary: Vocabulary
    compiler: GrammarCompiler
    controls: tuple[int, ...]  # control tokens that may stand for marks

    def grammar(
        self, dialect: Dialect, schema: dict[str, Any], *, with_controls: bool = False
    ) -> Grammar:
        whole = {"type": "object", "additionalProperties": False, **schema}
        literal = literals(self._control_marks(dialect) if with_controls else {})
        source = dialect.grammar({"call": whole}, parallel=True, literal=literal)
        names = tuple(schema.get("required", ()))
        return Grammar(GrammarKind.LARK, source, landing=Landing(names))

    def _control_marks(self, dialect: Dialect) -> dict[str, int]:
        """Return the dialect's marks as control tokens, as far as the vocabulary has some."""
        marks: list[str] = []

        def note(text: str) -> str:
            marks.extend(re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", text))
            return '""'

        dialect.grammar({"call": {"type": "object"}}, parallel=True, literal=note)
        return dict(zip(dict.fromkeys(marks), self.controls, strict=False))

    def shortest(self, grammar: Grammar) -> list[int]:
        end = self.compiler.end_finder(grammar).find(self.compiler.matcher(grammar).copy())
        assert end is not None, grammar.source
        return end

    def sampler(
        self, grammar: Grammar, n_left: int, reply: list[int], *, is_landing: bool = False
    ) -> LlamaSampler:
        matcher = self.compiler.matcher(grammar)
        is_lazy = bool(grammar.start.triggers)
        return LlamaSampler(
            Sampling(temperature=0),
            self.vocabulary,
            DrySamplers(self.vocabulary),
            grammar=LazyGrammar(matcher, grammar.start, self.vocabulary) if is_lazy else matcher,
            finder=self.compiler.end_finder(grammar) if grammar.landing else None,
            n_top_logprobs=None,
            tokens=reply,
            n_reply=len(reply),
            n_left=n_left,
            is_landing=is_landing,
        )

    def reply(self, grammar: Grammar, max_tokens: int, model: Model) -> tuple[list[int], bool]:
        """Return the tokens, and whether the end was forced."""
        sampler = self.sampler(grammar, max_tokens, [])
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            token, _ = sampler.sample(model(len(tokens)))
            if token in self.vocabulary.eog_tokens:
                break
            tokens.append(token)
        return tokens, sampler.is_landing

    def rambling(self) -> Model:
        """Return a model that writes text wherever it may."""
        logits = self._unending()
        [token] = self.vocabulary.tokenize("Z", parse_special=False)
        logits[token] = 9.0
        return lambda _: logits.copy()

    def random(self, seed: int) -> Model:
        unending = self._unending()

        def model(position: int) -> Logits:
            noise = np.random.default_rng((seed, position)).random(len(unending), dtype=np.float32)
            return unending + noise

        return model

    def greedy_for_more(self) -> Model:
        """Return a model that opens lists and members and writes one more of each."""
        logits = self._unending()
        for text, value in ((",", 9.0), (", ", 9.0), ('",', 8.0), ("[", 7.0), ("{", 7.0)):
            for token in self.vocabulary.tokenize(text, parse_special=False)[:1]:
                logits[token] = value
        return lambda _: logits.copy()

    def _unending(self) -> Logits:
        logits = np.zeros(self.vocabulary.n_vocab, dtype=np.float32)
        logits[list(self.vocabulary.eog_tokens)] = -9.0
        return logits

    def text(self, tokens: list[int]) -> str:
        return self.vocabulary.detokenize(tokens, render_special=True).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Iterator[Lab]:
    model = GgufModel(embedded_model, gpu_layers=0)
    vocabulary = model.vocabulary
    strings = [vocabulary.tokenize(s, parse_special=True)[0] for s in vocabulary.special_strings]
    free = [token for token in strings if token not in vocabulary.eog_tokens]
    yield Lab(vocabulary, GrammarCompiler(vocabulary), tuple(free))
    model.close()


def check(lab: Lab, grammar: Grammar, n_tokens: int, model: Model) -> None:
    tokens, is_forced = lab.reply(grammar, n_tokens, model)
    assert completes(lab.compiler.matcher(grammar).copy(), tokens), lab.text(tokens)
    free, _ = lab.reply(replace(grammar, landing=None), n_tokens, model)
    assert is_forced == (tokens != free)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_any_call_ends_within_any_limit_that_its_shortest_form_fits(
    lab: Lab, case: Case, schema: dict[str, Any]
) -> None:
    grammar = lab.grammar(case.dialect, schema)
    shortest = len(lab.shortest(grammar))
    models = [lab.rambling(), lab.random(shortest), lab.greedy_for_more()]
    for n_more in (0, 1, 5, 30):
        check(lab, grammar, shortest + n_more, models[n_more % 3])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_any_published_format_end_within_the_limit(lab: Lab, name: str) -> None:
    dialect = formatted(name, FORMATS[name])
    for schema in (SCHEMAS["two strings"], SCHEMAS["nested"], SCHEMAS["closed choices"]):
        for with_controls in (False, True):
            grammar = lab.grammar(dialect, schema, with_controls=with_controls)
            shortest = len(lab.shortest(grammar))
            check(lab, grammar, shortest, lab.rambling())
            check(lab, grammar, shortest + 9, lab.random(shortest))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_marks_that_are_control_tokens_end_calls_too(lab: Lab, case: Case) -> None:
    grammar = lab.grammar(case.dialect, SCHEMAS["two strings"], with_controls=True)
    shortest = len(lab.shortest(grammar))
    for n_more in (0, 9):
        check(lab, grammar, shortest + n_more, lab.rambling())


def test_a_call_that_begins_after_text_ends_in_time(lab: Lab) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS["two strings"])
    lazy = replace(grammar, start=GrammarStart(triggers=(Trigger("<tool_call>"),)))
    said = lab.vocabulary.tokenize("Let me see. <tool_call>", parse_special=False)
    rambling = lab.rambling()

    def model(position: int) -> Logits:
        logits = rambling(position)
        if position < len(said):
            logits[said[position]] = 99.0
        return logits

    tokens, is_forced = lab.reply(lazy, 60, model)
    assert lab.text(tokens).startswith("Let me see. <tool_call>")
    assert len(tokens) == 60
    assert is_forced
    call = lab.text(tokens).removeprefix("Let me see. ")
    written = lab.vocabulary.tokenize(call, parse_special=False)
    assert completes(lab.compiler.matcher(grammar).copy(), written), call


@pytest.mark.parametrize(
    ("n_members", "member"),
    [
        (1, {"type": "string", "pattern": "^[a-f0-9]{400}$"}),
        (1, {"type": "string", "pattern": "^([A-Z][0-9]){6}$"}),
        (1, {"type": "string", "pattern": "^[a-z]{9,}Q$"}),
        (1, {"type": "string", "format": "uuid"}),
        (2, {"type": "string", "format": "date-time"}),
        (2, {"type": "string", "minLength": 400}),
        (30, STRING),
        (20, {"type": "integer"}),
        (12, {"type": "number", "exclusiveMaximum": 0}),
        (20, {"enum": [f"{chr(97 + i)}value" for i in range(26)]}),
        (2, {"type": "array", "minItems": 10, "items": {"type": "integer"}}),
        (1, {"$ref": "#/$defs/many"}),
    ],
)
def test_the_end_of_a_call_that_streams_is_found_and_has_room_in_every_format(
    lab: Lab, n_members: int, member: dict[str, Any]
) -> None:
    names = [f"member_{i}" for i in range(n_members)]
    many = [f"{chr(97 + i % 26)}_{i}" for i in range(40)]
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, member),
        "required": names,
        "$defs": {
            "many": {
                "type": "object",
                "properties": dict.fromkeys(many, STRING),
                "required": many,
                "additionalProperties": False,
            }
        },
    }
    size = end_size(schema)
    assert size is not None
    for name, each in FORMATS.items():
        grammar = lab.grammar(formatted(name, each), schema)
        grammar = replace(grammar, landing=Landing((*names, *many)))
        assert len(lab.shortest(grammar)) <= LANDING_TOKENS + size, name


def test_where_no_end_fits_the_model_writes_on(lab: Lab) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS["two strings"])
    n_tokens = len(lab.shortest(grammar)) - 1
    tokens, is_forced = lab.reply(grammar, n_tokens, lab.rambling())
    cut, _ = lab.reply(replace(grammar, landing=Landing()), 400, lab.rambling())
    assert not is_forced
    assert tokens == cut[:n_tokens]


def test_another_call_is_not_begun_where_it_would_be_cut_off(lab: Lab) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS["nothing required"])
    shortest = lab.shortest(grammar)
    space, *_ = lab.vocabulary.tokenize("\n", parse_special=False)

    def model(position: int) -> Logits:
        logits = lab.rambling()(position)
        logits[shortest[position] if position < len(shortest) else space] = 99.0
        return logits

    one, is_forced = lab.reply(grammar, 2 * len(shortest), model)
    assert one == shortest
    assert is_forced
    two, _ = lab.reply(grammar, 2 * len(shortest) + 4, model)
    assert lab.text(two).count("</tool_call>") == 2


@pytest.mark.parametrize("n_spare", [0, 1, 9])
def test_a_call_that_the_model_ends_itself_is_not_forced(lab: Lab, n_spare: int) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS["two strings"])
    shortest = lab.shortest(grammar)

    def model(position: int) -> Logits:
        logits = np.zeros(lab.vocabulary.n_vocab, dtype=np.float32)
        ends = list(lab.vocabulary.eog_tokens)
        logits[shortest[position] if position < len(shortest) else ends] = 99.0
        return logits

    assert lab.reply(grammar, len(shortest) + n_spare, model) == (shortest, False)


@pytest.mark.parametrize("n_own", [1, 3])
def test_a_call_is_forced_from_the_first_token_that_the_model_would_not_have_written(
    lab: Lab, n_own: int
) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS["two strings"])
    shortest = lab.shortest(grammar)
    text = lab.vocabulary.tokenize("Z", parse_special=False)[0]
    first = next(i for i, token in enumerate(shortest) if '"' in lab.text([token])) + n_own

    def model(position: int) -> Logits:
        logits = lab.rambling()(position)
        logits[shortest[position] if position < first else text] = 99.0
        return logits

    sampler = lab.sampler(grammar, len(shortest), [])
    landing = []
    for position, token in enumerate(shortest):
        assert sampler.sample(model(position))[0] == token
        landing.append(sampler.is_landing)
    assert not any(landing[:first])
    assert landing[-1]
    assert landing == sorted(landing)


@pytest.mark.parametrize("name", ["nested", "strings of a form"])
def test_a_reply_that_is_resumed_at_any_token_ends_in_the_same_way(lab: Lab, name: str) -> None:
    grammar = lab.grammar(HERMES, SCHEMAS[name])
    n_tokens = len(lab.shortest(grammar)) + 20
    model = lab.random(7)
    sampler = lab.sampler(grammar, n_tokens, [])
    tokens: list[int] = []
    landed: list[bool] = []
    for position in range(n_tokens):
        token, _ = sampler.sample(model(position))
        tokens.append(token)
        landed.append(sampler.is_landing)
    assert landed[-1]
    for n_before in (*range(1, n_tokens - 8, 4), *range(n_tokens - 8, n_tokens)):
        resumed = lab.sampler(
            grammar, n_tokens - n_before, tokens[:n_before], is_landing=landed[n_before - 1]
        )
        token, _ = resumed.sample(model(n_before))
        assert (token, resumed.is_landing) == (tokens[n_before], landed[n_before]), n_before
