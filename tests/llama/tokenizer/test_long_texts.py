"""Texts that a tokenizer could choke on: tokenised exactly, or refused with a sentence."""

import base64
import ctypes
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.tokenizer import GrammarTokenizer, TokenizeFunction
from rekindle.llama.tokenizer import deep_stack
from rekindle.llama.tokenizer.deep_stack import call_with_stack
from rekindle.llama.tokenizer.pre_tokenizer import MAX_MATCH
from rekindle.llama.tokenizer.special_strings import (
    MAX_STRINGS,
    MAX_STRINGS_IN_ALL,
    PART_STRINGS,
    SpecialStrings,
)
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.vocabulary_files import opened, write_bpe_vocabulary, write_piece_vocabulary

LINE_BREAKS = tuple("\n" * n for n in range(1, 32))  # as Gemma has them


def bpe(folder: Path, pre: str) -> Iterator[Vocabulary]:
    path = write_bpe_vocabulary(folder / "vocabulary.gguf", pre)
    with opened(path, tokenizer="gpt2", pre=pre) as vocabulary:
        yield vocabulary


def spm(folder: Path, *user_defined: str) -> Iterator[Vocabulary]:
    path = write_piece_vocabulary(folder / "spm.gguf", "llama", user_defined=user_defined)
    with opened(path, tokenizer="llama", pre="") as vocabulary:
        yield vocabulary


@pytest.fixture
def gpt_4o(tmp_path: Path) -> Iterator[Vocabulary]:
    yield from bpe(tmp_path, "gpt-4o")


@pytest.fixture
def gemma(tmp_path: Path) -> Iterator[Vocabulary]:
    yield from spm(tmp_path, *LINE_BREAKS, "<table>", "</table>", "<tab", "e>\n")


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return vocabulary.detokenize(tokens, render_special=False).decode()


def test_the_longest_run_that_is_accepted_is_tokenised(gpt_4o: Vocabulary) -> None:
    if deep_stack._available_bytes() < 2 * 2**30:
        pytest.skip("2 GB of free memory are missing")
    text = "A" * (MAX_MATCH - 1)
    assert text_of(gpt_4o, gpt_4o.tokenize(text, parse_special=False)) == text


def test_line_breaks_and_slashes_in_turn_are_one_run(gpt_4o: Vocabulary) -> None:
    """They are one match of its expression, and no run of one class is long."""
    text = "!" + "\n/" * 100_000
    assert text_of(gpt_4o, gpt_4o.tokenize(text, parse_special=False)) == text


def test_a_longer_run_is_refused_and_a_longer_text_is_not(gpt_4o: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match=r"run of up to 2,000,001 characters .*gpt-4o"):
        gpt_4o.tokenize("A" * (MAX_MATCH + 1), parse_special=False)
    text = "words of usual length " * (MAX_MATCH // 20)
    assert gpt_4o.tokenize(text, parse_special=False)


@pytest.mark.parametrize("model", ["llama", "t5", "plamo2"])
def test_tokenizers_without_a_pre_tokenizer_take_long_runs(model: str, tmp_path: Path) -> None:
    path = write_piece_vocabulary(tmp_path / "vocabulary.gguf", model)
    with opened(path, tokenizer=model, pre="") as vocabulary:
        tokens = vocabulary.tokenize("A" * 100_000, parse_special=False)
        assert text_of(vocabulary, tokens).count("A") == 100_000


@pytest.mark.parametrize(
    ("pre", "text"),
    [
        ("deepseek-llm", " " * 6_000 + "5"),
        ("deepseek-llm", " " * 6_000 + "\x1cA"),
        ("deepseek-llm", (" " * 2_400 + "1" + "<|im_end|>" * 1_000) * 8),
        ("superbpe", ("1" * 99 + " ") * 10_000),
        ("deepseek-llm", (" " * 3_000 + "5") * 10),
        ("superbpe", "7" * 5_000),
        ("jais-2", " " * 150_000 + "x"),
    ],
)
def test_runs_that_backtrack_are_refused(pre: str, text: str, tmp_path: Path) -> None:
    for vocabulary in bpe(tmp_path, pre):
        with pytest.raises(InvalidRequest, match=rf"Runs of .* \({pre}\): the longest has "):
            vocabulary.tokenize(text, parse_special=False)


@pytest.mark.parametrize("pre", ["gpt-4o", "deepseek-llm", "superbpe", "jais-2", "exaone-moe"])
def test_ordinary_large_texts_are_never_refused(pre: str, tmp_path: Path) -> None:
    numbers = random.Random(1)
    texts = (
        base64.b64encode(numbers.randbytes(100_000)).decode(),
        "".join(f"2026-01-01T00:00:00Z INFO {i} took {i % 97} ms\n" for i in range(2_000)),
        ("-" * 10_000 + "\n") * 3,
        (" " * 5_000 + "x = 1\n") * 10,
        "function a(b,c){return b+c*d[0]};" * 2_000,
        "中文的书没有空格。" * 5_000,
    )
    for vocabulary in bpe(tmp_path, pre):
        for text in texts:
            assert text_of(vocabulary, vocabulary.tokenize(text, parse_special=False)) == text


def test_a_text_cut_behind_special_strings_has_the_same_tokens(gemma: Vocabulary) -> None:
    numbers = random.Random(2)
    words = ("a", " ", "\n", "\n\n", "\n" * 40, "<table>", "</table>", "<tab", "e>\n", "le>")
    text = "".join(numbers.choices(words, k=4 * PART_STRINGS))
    special = SpecialStrings(
        [*LINE_BREAKS, "<table>", "</table>", "<tab", "e>\n"],
        cuttable=[*LINE_BREAKS, "<table>", "</table>", "<tab", "e>\n"],
    )
    assert len(special.parts(text)) > 1
    whole = gemma._tokenize(text, parse_special=False)
    assert gemma.tokenize(text, parse_special=False) == whole


def test_special_strings_behind_which_space_is_dropped_are_no_place_to_cut() -> None:
    text = "<end>  " * 3 * PART_STRINGS
    assert SpecialStrings(["<end>"], cuttable=[]).parts(text) == [text]
    assert len(SpecialStrings(["<end>"], cuttable=["<end>"]).parts(text)) == 4


def test_200_000_line_breaks_are_tokenised(tmp_path: Path) -> None:
    text = "\n" * 200_000
    for vocabulary in spm(tmp_path, *LINE_BREAKS):
        assert len(vocabulary.tokenize(text, parse_special=False)) == -(-len(text) // 31)
    for vocabulary in spm(tmp_path, "\n"):
        assert len(vocabulary.tokenize(text, parse_special=False)) == len(text)


def test_a_run_of_special_strings_that_cannot_be_cut_has_a_limit(gemma: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match=rf"more than {MAX_STRINGS:,} special strings"):
        gemma.tokenize("\n" * 31 * (MAX_STRINGS + 1), parse_special=False)


def test_special_strings_that_can_be_cut_have_a_limit_in_all() -> None:
    special = SpecialStrings(["\n"], cuttable=["\n"])
    assert len(special.parts("\n" * MAX_STRINGS_IN_ALL)) == MAX_STRINGS_IN_ALL // PART_STRINGS
    with pytest.raises(InvalidRequest, match=rf"more than {MAX_STRINGS_IN_ALL:,} special"):
        special.parts("\n" * (MAX_STRINGS_IN_ALL + 1))


def test_many_special_strings_with_one_beginning_have_a_limit() -> None:
    special = SpecialStrings([f"<unused{n}>" for n in range(6_000)], cuttable=[])
    assert special.parts("<p>" * 10_000) == ["<p>" * 10_000]
    with pytest.raises(InvalidRequest, match=r"'<' 100,000 times\..* 6,000 special"):
        special.parts("<" * 100_000)


def test_a_stack_that_the_machine_cannot_give_is_a_refusal(
    gpt_4o: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_stack, "_available_bytes", lambda: 2**20)
    with pytest.raises(InvalidRequest, match=r"may take 122 MiB of memory"):
        gpt_4o.tokenize("A" * 200_000, parse_special=False)


def test_a_stack_without_address_space_is_a_memory_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deep_stack, "_available_bytes", lambda: 2**63)
    with pytest.raises(MemoryError):
        call_with_stack(lambda: 1, 2**60)
    assert call_with_stack(lambda: 1, 2**27) == 1, "a lock was left behind"


def test_a_thread_that_never_begins_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begin: list[Callable[[], None]] = []
    monkeypatch.setattr(deep_stack, "_START_SECONDS", 0.05)
    monkeypatch.setattr("_thread.start_new_thread", lambda run, _: begin.append(run))
    called: list[int] = []
    with pytest.raises(MemoryError, match="did not start"):
        call_with_stack(lambda: called.append(1), 2**24)
    begin[0]()
    assert not called, "the call was made for nobody"


def test_other_threads_keep_their_stack_size() -> None:
    before = threading.stack_size()
    call_with_stack(lambda: 1, 2**24)
    assert threading.stack_size() == before


@pytest.mark.parametrize("schema", [{"const": "A" * 40_000}, {"enum": ["A" * 40_000, "b"]}])
def test_a_schema_with_a_long_constant_is_a_grammar(
    schema: dict[str, object], gpt_4o: Vocabulary
) -> None:
    GrammarCompiler(gpt_4o).check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_special_strings_in_a_constant_are_tokenised_in_parts(tmp_path: Path) -> None:
    """In one call they would take 2 s, for each token of the reply."""
    constant = json.dumps("<b>" * 16_000).encode()
    for vocabulary in spm(tmp_path, "<b>"):
        tokenizer = GrammarTokenizer(vocabulary)
        tokenize = TokenizeFunction(tokenizer.pointer)
        tokens = (ctypes.c_int32 * 20_000)()
        plain = (False, False)  # no special tokens, neither added nor parsed
        text = ctypes.create_string_buffer(constant)
        arguments = (ctypes.addressof(text), len(constant), ctypes.addressof(tokens))
        assert len(vocabulary._in_text.parts(constant.decode())) > 1
        count = tokenize(vocabulary.handle, *arguments, len(tokens), *plain)
        assert tokens[:count] == vocabulary.tokenize(constant.decode(), parse_special=False)
        assert tokenize(vocabulary.handle, *arguments, 10, *plain) == -count


def test_a_constant_too_long_for_the_tokenizer_is_a_refusal_that_says_so(
    gpt_4o: Vocabulary,
) -> None:
    compiler = GrammarCompiler(gpt_4o)
    long = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": "A" * 60_000}))
    with pytest.raises(InvalidRequest, match=r"a grammar: it forces a text of 60,0\d\d bytes"):
        compiler.check(long)
    compiler.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"const": "short"})))
