"""Grammars that begin at a trigger: the scanner alone, and under the embedded model's tokens."""

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rekindle.generation.events import TokenSampled
from rekindle.generation.request import Grammar, GrammarKind, GrammarStart, Sampling, Trigger
from rekindle.llama.context import LlamaBackend
from rekindle.llama.grammar.lazy import TriggerScanner
from rekindle.llama.model import GgufModel
from rekindle.llama.sampling.sampler import LlamaSampler
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.llama.driver import make_backend, prefill

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "start", "position"),
    [
        ("say <call>x", GrammarStart(triggers=(Trigger("<call>"),)), 4),
        ("say <cal", GrammarStart(triggers=(Trigger("<call>"),)), None),
        ("<<call>", GrammarStart(triggers=(Trigger("<call>"),)), 1),
        ("a [b] {c", GrammarStart(triggers=(Trigger("{"), Trigger("["))), 2),
        ("<tool_call>", GrammarStart(triggers=(Trigger("call>"), Trigger("<tool_call>"))), 0),
        ("é{", GrammarStart(triggers=(Trigger("{"),)), 2),
        # at_start
        ("{x", GrammarStart(triggers=(Trigger("{", at_start=True),)), 0),
        (" \n\t {x", GrammarStart(triggers=(Trigger("{", at_start=True),)), 4),
        ("a {x", GrammarStart(triggers=(Trigger("{", at_start=True),)), None),
        ("{{", GrammarStart(triggers=(Trigger("{{", at_start=True),)), 0),
        ("\n{", GrammarStart(triggers=(Trigger("\n{", at_start=True),)), 0),
        (" " * 99 + "{", GrammarStart(triggers=(Trigger("{", at_start=True),)), 99),
        ("x" + " " * 99 + "{", GrammarStart(triggers=(Trigger("{", at_start=True),)), None),
        ("a {<c>", GrammarStart(triggers=(Trigger("{", at_start=True), Trigger("<c>"))), 3),
        # quiet spans
        ("<think>{</think>\n{", GrammarStart(triggers=(Trigger("{"),), quiet=THINK), 17),
        ("<think>{", GrammarStart(triggers=(Trigger("{"),), quiet=THINK), None),
        ("<think>{</think>x<think>{", GrammarStart(triggers=(Trigger("{"),), quiet=THINK), None),
        (
            "\n<think>{</think>\n{",
            GrammarStart(triggers=(Trigger("{", at_start=True),), quiet=THINK),
            18,
        ),
        (
            "a<think>{</think>{",
            GrammarStart(triggers=(Trigger("{", at_start=True),), quiet=THINK),
            None,
        ),
        # A marker cannot begin in the one before it.
        ("<think></think>", GrammarStart(triggers=(Trigger(">"),), quiet=THINK), None),
        ("<think></think>>", GrammarStart(triggers=(Trigger(">"),), quiet=THINK), 15),
        # begins_quiet
        (
            "hm {</think> {",
            GrammarStart(triggers=(Trigger("{", at_start=True),), quiet=THINK, begins_quiet=True),
            13,
        ),
        ("hm </think>{", GrammarStart(quiet=THINK, begins_quiet=True), 11),
        ("hm </think>", GrammarStart(quiet=THINK, begins_quiet=True), 11),
        ("<think></think>{", GrammarStart(quiet=("", "</think>"), begins_quiet=True), 15),
    ],
)
def test_where_a_grammar_begins(text: str, start: GrammarStart, position: int | None) -> None:
    assert TriggerScanner(start).feed(text.encode()) == position


def specified(start: GrammarStart, text: bytes) -> int | None:
    """The same, from all of the text at once."""
    opening, closing = (each.encode() for each in start.quiet or ("", ""))
    here, before, is_quiet = 0, b"", start.begins_quiet
    while True:
        if is_quiet:
            at = text.find(closing, here)
            if at < 0:
                return None
            here, is_quiet = at + len(closing), False
            if not start.triggers:
                return here
        marks: list[tuple[int, int, bool]] = []  # end, start, begins the grammar
        for at in range(here, len(text)):
            if opening and text.startswith(opening, at):
                marks.append((at + len(opening), at, False))
            for trigger in start.triggers:
                mark = trigger.text.encode()
                is_blank = not (before + text[here:at]).strip()
                if text.startswith(mark, at) and (is_blank or not trigger.at_start):
                    marks.append((at + len(mark), at, True))
        if not marks:
            return None
        end, at, begins = min(marks)
        if begins:
            return at
        before, here, is_quiet = before + text[here:at], end, True


# Few letters, so that markers overlap, contain and interrupt each other.
words = st.text("<a> {", min_size=1, max_size=4)
starts = st.builds(
    GrammarStart,
    triggers=st.lists(st.builds(Trigger, words, st.booleans()), min_size=1, max_size=3).map(tuple),
    quiet=st.tuples(words, words),
    begins_quiet=st.booleans(),
) | st.builds(partial(GrammarStart, begins_quiet=True), quiet=st.tuples(words, words))


@settings(max_examples=500, deadline=None)
@given(start=starts, text=st.text("<a> {", max_size=40), data=st.data())
@example(start=GrammarStart(triggers=(Trigger("a"),), quiet=("<a", ">")), text="<a>a", data=None)
def test_any_cutting_into_pieces_finds_what_all_of_the_text_has(
    start: GrammarStart, text: str, data: st.DataObject | None
) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded))))) if data else []
    scanner = TriggerScanner(start)
    found = None
    for begin, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        if found is None:
            found = scanner.feed(encoded[begin:end])
    assert found == specified(start, encoded)


@pytest.fixture(scope="module")
def model(embedded_model: Path) -> Iterator[GgufModel]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def vocabulary(model: GgufModel) -> Vocabulary:
    return model.vocabulary


@pytest.fixture(scope="module")
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model, n_slots=2)
    yield backend
    backend.close()


class Writer:
    """A sampler with made-up logits: it writes a given text where the grammar allows it."""

    def __init__(self, backend: LlamaBackend, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._vocabulary = vocabulary
        self.sampler: LlamaSampler = backend.new_sampler(
            Sampling(temperature=0, grammar=grammar), (), 0, None
        )
        self.tokens: list[int] = []

    def write(self, *pieces: str) -> "Writer":
        """Each piece is a token; the grammar has to allow it."""
        for piece in pieces:
            [token] = [
                token
                for token in range(self._vocabulary.n_vocab)
                if self._vocabulary.detokenize([token], render_special=True) == piece.encode()
            ]
            assert self._sample(token) == token, f"{piece!r} is not allowed"
        return self

    def complete(self) -> str:
        """The reply when the model would end only where it has to."""
        [favourite] = self._vocabulary.tokenize("Z", parse_special=False)
        while len(self.tokens) < 40:
            if self._sample(favourite) in self._vocabulary.eog_tokens:
                break
        return self._vocabulary.detokenize(self.tokens, render_special=True).decode()

    def _sample(self, favourite: int) -> int:
        logits = np.zeros(self._vocabulary.n_vocab, dtype=np.float32)
        logits[list(self._vocabulary.eog_tokens)] = -1.0
        logits[favourite] = 1.0
        token, _ = self.sampler.sample(logits)
        self.tokens.append(token)
        return token


CALL = r"<call>[0-9]{3}</call>"
END = r"(<\|im_end\|>|<\|endoftext\|>|<reponame>)"
IS_OFF = "ZZZZZZZZ"


def calling(*triggers: Trigger, quiet: tuple[str, str] | None = None) -> Grammar:
    start = GrammarStart(triggers=triggers or (Trigger("<call>"),), quiet=quiet)
    return Grammar(GrammarKind.REGEX, CALL, start)


def test_a_trigger_in_several_tokens_begins_the_grammar(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    writer = Writer(backend, vocabulary, calling()).write("Well", ",", " ", "<", "call")
    assert writer.sampler.is_plain_greedy
    writer.write(">")
    assert not writer.sampler.is_plain_greedy
    assert re.fullmatch(r"Well, <call>[0-9]{3}</call>" + END, writer.complete())


def test_a_trigger_may_begin_in_the_middle_of_a_token(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    writer = Writer(backend, vocabulary, calling()).write("So", "><", "call", ">")
    assert re.fullmatch(r"So><call>[0-9]{3}</call>" + END, writer.complete())


def test_what_follows_a_trigger_in_its_token_counts(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    grammar = Grammar(GrammarKind.REGEX, r'\{"a[0-9]{2}"\}', GrammarStart(triggers=(Trigger("{"),)))
    writer = Writer(backend, vocabulary, grammar).write("It", ' {"')
    assert re.fullmatch(r'It \{"a[0-9]{2}"\}' + END, writer.complete())


def test_a_trigger_that_the_grammar_does_not_go_on_from_was_none(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    grammar = Grammar(GrammarKind.REGEX, r"\{[0-9]{2}", GrammarStart(triggers=(Trigger("{"),)))
    writer = Writer(backend, vocabulary, grammar).write("It", ' {"', " is")
    assert writer.sampler.is_plain_greedy
    writer.write("{")
    assert not writer.sampler.is_plain_greedy
    assert re.fullmatch(r'It \{" is\{[0-9]{2}' + END, writer.complete())


def test_quiet_spans_that_open_only_at_the_beginning_do_not_open_behind_text(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    start = GrammarStart(triggers=(Trigger("<call>"),), quiet=("[", "]"), quiet_anywhere=False)
    grammar = Grammar(GrammarKind.REGEX, CALL, start)
    writer = Writer(backend, vocabulary, grammar).write("So", "[", "<", "call", ">")
    assert not writer.sampler.is_plain_greedy
    writer = Writer(backend, vocabulary, grammar).write("[", "<", "call", ">")
    assert writer.sampler.is_plain_greedy


def test_without_its_trigger_the_reply_is_free(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    writer = Writer(backend, vocabulary, calling()).write("<", "call", " ", "{")
    assert IS_OFF in writer.complete()


def test_a_quiet_span_has_no_triggers(backend: LlamaBackend, vocabulary: Vocabulary) -> None:
    grammar = calling(quiet=("[", "]"))
    writer = Writer(backend, vocabulary, grammar)
    writer.write("[", "<", "call", ">", "x", "]", "\n", "<", "call", ">")
    reply = writer.complete()
    assert re.fullmatch(r"\[<call>x\]\n<call>[0-9]{3}</call>" + END, reply)


def test_the_first_of_several_triggers_begins_the_grammar(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    def grammar() -> Grammar:
        triggers = (Trigger("<call>"), Trigger("[", at_start=True))
        return Grammar(
            GrammarKind.REGEX, r"<call>[0-9]{2}|\[[a-c]{2}\]", GrammarStart(triggers=triggers)
        )

    at_start = Writer(backend, vocabulary, grammar()).write("\n", "[")
    assert re.fullmatch(r"\n\[[a-c]{2}\]" + END, at_start.complete())
    later = Writer(backend, vocabulary, grammar()).write("a", "[", "x", "<", "call", ">")
    assert re.fullmatch(r"a\[x<call>[0-9]{2}" + END, later.complete())


def test_control_tokens_count_as_their_text_and_are_matched_as_themselves(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    grammar = Grammar(
        GrammarKind.LARK,
        "start: <file_sep> /[0-9]{2}/",
        GrammarStart(triggers=(Trigger("<file_sep>"),)),
    )
    writer = Writer(backend, vocabulary, grammar).write("a", "<file_sep>")
    assert re.fullmatch(r"a<file_sep>[0-9]{2}" + END, writer.complete())


@pytest.mark.parametrize(
    ("last", "source", "rest"),
    [
        ("]", "[0-9]{3}", r"\]\d{3}"),
        ("][", r"\[[0-9]{3}", r"\]\[\d{3}"),
        ("][", "[0-9]{3}", r"\]\[\d{3}"),  # what came in one token with the end is let be
    ],
)
def test_a_reply_that_begins_quiet_is_bound_behind_the_span(
    backend: LlamaBackend, vocabulary: Vocabulary, last: str, source: str, rest: str
) -> None:
    start = GrammarStart(quiet=("[", "]"), begins_quiet=True)
    writer = Writer(backend, vocabulary, Grammar(GrammarKind.REGEX, source, start))
    writer.write("Well", "[", " ", last)
    assert re.fullmatch(rf"Well\[ {rest}({END})?", writer.complete())


@pytest.mark.parametrize("source", ["[0-9]{3}", r"\n[0-9]{3}"])
def test_white_space_behind_the_span_is_the_grammars_only_where_that_has_it(
    backend: LlamaBackend, vocabulary: Vocabulary, source: str
) -> None:
    start = GrammarStart(quiet=("<t>", "</t>\n"), begins_quiet=True)
    writer = Writer(backend, vocabulary, Grammar(GrammarKind.REGEX, source, start))
    writer.write("</", "t", ">", "\n\n")
    assert re.fullmatch(r"</t>\n\n[0-9]{3}" + END, writer.complete())


def test_a_grammar_that_has_a_part_of_the_white_space_begins_behind_all_of_it(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    start = GrammarStart(quiet=("<t>", "</t>\n"), begins_quiet=True)
    grammar = Grammar(GrammarKind.REGEX, r"\nX|[0-9]{3}", start)
    writer = Writer(backend, vocabulary, grammar).write("</", "t", ">", "\n\n\n")
    assert re.fullmatch(r"</t>\n\n\n(\nX|[0-9]{3})" + END, writer.complete())


def test_without_triggers_a_grammar_holds_from_the_first_token(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    start = GrammarStart(quiet=THINK)
    writer = Writer(backend, vocabulary, Grammar(GrammarKind.REGEX, "[0-9]{3}", start))
    assert not writer.sampler.is_plain_greedy
    assert re.fullmatch(r"[0-9]{3}" + END, writer.complete())


def test_a_grammar_is_compiled_once_however_it_begins(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "once [0-9]+"
    backend.check_grammar(Grammar(GrammarKind.REGEX, source))
    monkeypatch.setattr("llguidance.LLMatcher", None)  # compiling again fails
    start = GrammarStart(triggers=(Trigger("once"),))
    backend.check_grammar(Grammar(GrammarKind.REGEX, source, start))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_reply_is_unchanged_up_to_its_trigger_and_bound_from_there(
    backend: LlamaBackend, vocabulary: Vocabulary, temperature: float
) -> None:
    """Also in the fast path, where all rows are sampled by one argmax."""
    prompt = vocabulary.tokenize(
        "<|im_start|>user\nTell me about Paris.<|im_end|>\n<|im_start|>assistant\n",
        parse_special=True,
    )

    def replies(grammar: Grammar | None) -> list[str]:
        """Return the reply, and a greedy one beside it that has no grammar."""
        backend.clear_all()
        samplings = [
            Sampling(temperature=temperature, seed=5, grammar=grammar),
            Sampling(temperature=0),
        ]
        samplers = [backend.new_sampler(each, prompt, 0, None) for each in samplings]
        for slot in (0, 1):
            prefill(backend, slot, prompt[:-1])
        tokens: list[list[int]] = [[prompt[-1]], [prompt[-1]]]
        for position in range(len(prompt) - 1, len(prompt) + 60):
            backend.decode([each[-1] for each in tokens], [position] * 2, [0, 1], [0, 1])
            for reply, sampled in zip(tokens, backend.sample(samplers, [0, 1]), strict=True):
                assert isinstance(sampled, TokenSampled), sampled
                reply.append(sampled.token)
            if grammar and tokens[0][-1] in vocabulary.eog_tokens:
                break
        return [vocabulary.detokenize(each[1:], render_special=True).decode() for each in tokens]

    free, beside = replies(None)
    trigger = free[41:49]  # wherever its tokens may end
    at = free.index(trigger)
    grammar = Grammar(
        GrammarKind.LARK,
        f'start: "{trigger}" /[^0-9]{{0,20}}/ " [" /[0-9]{{3}}/ "]"',
        GrammarStart(triggers=(Trigger(trigger),)),
    )
    bound, still_beside = replies(grammar)
    assert bound[: at + 8] == free[: at + 8]
    assert re.fullmatch(re.escape(trigger) + r"[^0-9]{0,20} \[[0-9]{3}\]" + END, bound[at:])
    assert beside.startswith(still_beside)


def test_a_reply_that_must_come_under_its_grammar_does_not_end_before(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    logits = np.zeros(vocabulary.n_vocab, dtype=np.float32)
    logits[list(vocabulary.eog_tokens)] = 9.0
    for start, ends in (
        (GrammarStart(quiet=("[", "]"), begins_quiet=True), False),
        (GrammarStart(triggers=(Trigger("<call>"),)), True),
    ):
        grammar = Grammar(GrammarKind.REGEX, CALL, start)
        sampler = backend.new_sampler(Sampling(temperature=0, grammar=grammar), (1,), 0, None)
        token, _ = sampler.sample(logits.copy())
        assert (token in vocabulary.eog_tokens) == ends
        sampler.close()


def test_what_a_grammar_needs_comes_before_a_bias_against_it(
    backend: LlamaBackend, vocabulary: Vocabulary
) -> None:
    digits = [vocabulary.tokenize(str(n), parse_special=False)[0] for n in range(10)]
    bias = tuple((token, -math.inf) for token in range(vocabulary.n_vocab))
    grammar = Grammar(GrammarKind.REGEX, "[0-9]")
    sampling = Sampling(temperature=0, grammar=grammar, logit_bias=bias)
    sampler = backend.new_sampler(sampling, (1,), 0, None)
    token, _ = sampler.sample(np.zeros(vocabulary.n_vocab, dtype=np.float32))
    assert token in digits
    sampler.close()
