"""The grammars of derived dialects accept what the templates write, by llguidance."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.chat.dialects.choice import choose
from rekindle.chat.dialects.derive.verify import WrittenCalls
from rekindle.chat.reply.tool_use import ToolUses
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.model import GgufModel
from tests.api.fakes import ByteTokenizer
from tests.chat.dialects.derive.shapes import SHAPES
from tests.chat.dialects.test_grammars import Lab


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Iterator[Lab]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield Lab(model.vocabulary, GrammarCompiler(model.vocabulary), ())
    model.close()


@pytest.mark.parametrize("name", SHAPES)
def test_the_grammar_accepts_every_probe_that_the_template_writes(name: str, lab: Lab) -> None:
    choice = choose(SHAPES[name].template)
    uses = ToolUses(choice, lab.vocabulary, lab.compiler.check, finishes_calls=True)
    assert choice.written
    assert uses.prove().refused == ()


def refusing(*whats: str) -> tuple[ToolUses, list[WrittenCalls]]:
    """Return a plan of tools whose engine refuses some of what the template writes."""
    choice = choose(SHAPES["a list of objects"].template)
    refused = [each for each in choice.written if each.what in whats]

    def check(grammar: Grammar) -> None:
        texts = [tuple(each.text.encode()) for each in refused]
        if any(sample in texts for sample in grammar.samples):
            raise InvalidRequest("no")

    return ToolUses(choice, ByteTokenizer(), check, finishes_calls=True), refused


def test_without_a_proof_calls_are_not_constrained() -> None:
    uses, refused = refusing("a call")
    assert refused
    proof = uses.prove()
    assert "a call" in proof.refused
    assert not proof.constrains


def test_one_spelling_that_the_grammar_refuses_does_not_free_all_calls() -> None:
    uses, refused = refusing("a call with values of every type")
    assert refused
    proof = uses.prove()
    assert proof.refused == ("a call with values of every type",)
    assert proof.constrains
