"""Every published template: calls are written with it and read back.

`python -m tests.campaigns.dialects` prints what these tests find.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rekindle.chat.dialects.choice import choose
from rekindle.chat.dialects.syntax.lark import literals
from rekindle.chat.reply.tool_use import ToolUses
from rekindle.config.choices import ReasoningHistory
from rekindle.errors import InvalidRequest
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.model import GgufModel
from tests.campaigns.dialects import DOCUMENT, table, verdict_on_renamed
from tests.campaigns.turns import STEPS, Chat, Way
from tests.chat.dialects.test_grammars import Lab
from tests.support.call_probes import (
    CODE,
    EVERYTHING,
    MARKUP,
    NESTED,
    NO_ARGUMENTS,
    OTHER_CALL,
    SIMPLE,
)
from tests.support.published_templates import MISSING, each_published, published
from tests.support.template_oracle import (
    SAID,
    THOUGHT,
    Origin,
    ReplyPart,
    Scribe,
    Verdict,
    chosen,
    loaded,
    random_pieces,
    verdict_on,
)

N_RANDOM = 3  # ways to cut a reply into pieces
N_STEPS = 3  # of a chat: a call, text and a call, an answer
N_SEEDS = 3
MIN_DERIVED = 0.95  # of the templates that write calls
# Before calls they write the string that also ends turns, so the end of such a turn is not found.
ENDS_WITHIN_CALLS = {"GigaChat3-10B-A1.8B"}
REPLIES: tuple[tuple[ReplyPart, ...], ...] = (
    (EVERYTHING.call,),
    (SAID, SIMPLE.call),
    (THOUGHT, SIMPLE.call, OTHER_CALL),
)
CALLS = (
    *([probe.call] for probe in (EVERYTHING, NO_ARGUMENTS, CODE, MARKUP, NESTED)),
    [SIMPLE.call, OTHER_CALL],
)


@cache
def scribe_of(name: str) -> Scribe:
    template = loaded(published()[name])
    return Scribe(template, chosen(template).dialect)


@cache
def verdict_of(name: str) -> Verdict:
    return verdict_on(published()[name])


@each_published()
def test_every_call_that_the_template_writes_is_read_back(name: str) -> None:
    verdict = verdict_of(name)
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.chosen.reason or verdict.chosen.origin is not Origin.GENERIC


@each_published()
def test_a_reply_in_pieces_is_read_like_the_whole(name: str) -> None:
    scribe = scribe_of(name)
    for parts in REPLIES:
        try:
            written = scribe.written(*parts)
        except InvalidRequest:
            continue  # this template refuses several calls, or an argument
        whole = scribe.read(written)
        if not whole.calls:
            continue  # a string that the template does not escape ends too early
        assert scribe.read_in_pieces(written, written.text) == whole
        for seed in range(N_RANDOM):
            pieces = random_pieces(written.text, seed)
            assert scribe.read_in_pieces(written, pieces) == whole, pieces


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Iterator[Lab]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield Lab(model.vocabulary, GrammarCompiler(model.vocabulary), ())
    model.close()


# The template escapes letters beyond ASCII, which llguidance's JSON strings refuse.
REFUSED = {"Reka-Edge": ("a call with values of every type",)}


@each_published()
def test_the_grammar_passes_the_proof_of_the_load(name: str, lab: Lab) -> None:
    choice = choose(loaded(published()[name]))
    uses = ToolUses(choice, lab.vocabulary, lab.compiler.check, finishes_calls=True)
    proof = uses.prove()
    assert proof.constrains
    assert proof.refused == REFUSED.get(name, ())


@each_published()
def test_the_grammar_accepts_what_the_template_writes(name: str, lab: Lab) -> None:
    scribe = scribe_of(name)
    source = scribe.dialect.grammar(scribe.box.schemas, parallel=True, literal=literals({}))
    n_read = 0
    for calls in CALLS:
        try:
            written = scribe.written(*calls)
        except InvalidRequest:
            continue
        if not scribe.read(written).calls_same(calls) or not all(map(scribe.box.declares, calls)):
            continue  # the template loses something, or refuses tools: see the first test
        # Letters that the template escapes: llguidance's JSON has the letters themselves.
        text = re.sub(
            r"\\u([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), scribe.calls_text(written)
        )
        matcher = lab.matcher(source)
        assert matcher.try_accept(lab.vocabulary.tokenize(text, parse_special=False)), text
        assert lab.may_end(matcher), text
        n_read += 1
    assert n_read > 1


@each_published()
def test_replies_that_come_back_keep_their_tokens(name: str, lab: Lab) -> None:
    for way in (Way.NONE,) if "reasoning" in verdict_of(name).lost else (Way.NONE, Way.SENT):
        notes: list[str] = []
        chat = Chat(published()[name], lab.vocabulary, ReasoningHistory.AUTO, notes)
        letters = chat.play(way, STEPS[:N_STEPS]).letters
        assert name in ENDS_WITHIN_CALLS or "M" not in letters, "\n".join(notes)


@cache
def verdict_of_renamed(name: str) -> Verdict:
    """Each template with one of the seeds. The campaign runs all of them."""
    seed = list(published()).index(name) % N_SEEDS
    return verdict_on_renamed(published()[name], seed)


@each_published()
def test_a_template_with_other_marks_is_derived_or_says_that_it_is_not(name: str) -> None:
    verdict = verdict_of_renamed(name)
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.chosen.reason or verdict.chosen.origin is Origin.DERIVED


def test_nearly_all_templates_with_other_marks_are_derived() -> None:
    if not published():
        pytest.skip(MISSING)
    names = [name for name in published() if scribe_of(name).writes_calls]
    origins = [verdict_of_renamed(name).chosen.origin for name in names]
    assert origins.count(Origin.DERIVED) >= MIN_DERIVED * len(names)


def test_the_table_in_the_docs_is_what_the_templates_show() -> None:
    if not published():
        pytest.skip(MISSING)
    assert table({name: verdict_of(name) for name in published()}) in DOCUMENT.read_text("utf-8")
