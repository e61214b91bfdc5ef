"""A GGUF file opened for its vocabulary alone, as a process without the weights does."""

import threading
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from rekindle.errors import ShuttingDown, StartupError
from rekindle.generation.tokenizer import NO_INFILL
from rekindle.llama.model import GgufModel, VocabularyFile
from tests.support.tiny_models import (
    INFILL_TOKENS,
    TinyArchitecture,
    write_tiny_model,
    write_tiny_reranker,
)

TEXTS = (
    "",
    "The prefix cache keeps what it has computed.\n\n  def f(x):\n\treturn x ** 2\n",
    "\u00e9\u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469 \u0301 \0 \x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "1234567890" * 50,
    " " * 300 + "\n" * 300,
)


@pytest.fixture
def file(embedded_model: Path) -> Iterator[VocabularyFile]:
    file = VocabularyFile(embedded_model)
    yield file
    file.close()


@pytest.fixture(scope="module")
def whole(embedded_model: Path) -> Iterator[GgufModel]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model
    model.close()


@pytest.mark.parametrize("parse_special", [True, False])
def test_tokens_and_text_are_those_of_the_whole_model(
    file: VocabularyFile, whole: GgufModel, *, parse_special: bool
) -> None:
    for text in TEXTS:
        tokens = whole.vocabulary.tokenize(text, parse_special=parse_special)
        assert file.vocabulary.tokenize(text, parse_special=parse_special) == tokens
    all_tokens = range(whole.vocabulary.n_vocab)
    for render_special in (True, False):
        assert [
            file.vocabulary.detokenize([t], render_special=render_special) for t in all_tokens
        ] == [whole.vocabulary.detokenize([t], render_special=render_special) for t in all_tokens]


def test_facts_about_text_are_those_of_the_whole_model(
    file: VocabularyFile, whole: GgufModel
) -> None:
    own, full = file.vocabulary, whole.vocabulary
    assert own.n_vocab == full.n_vocab
    assert own.eog_tokens == full.eog_tokens
    assert own.special_strings == full.special_strings
    assert own.end_strings == full.end_strings
    assert (own.bos_text, own.eos_text) == (full.bos_text, full.eos_text)
    assert (own.bos_token, own.added_eos_token) == (full.bos_token, full.added_eos_token)
    assert file.architecture == whole.facts.architecture
    assert file.chat_template


def test_a_piece_that_was_read_outlives_the_file_and_another_one_is_refused(
    embedded_model: Path,
) -> None:
    file = VocabularyFile(embedded_model)
    vocabulary = file.vocabulary
    known = vocabulary.tokenize("known", parse_special=False)
    assert vocabulary.detokenize(known, render_special=False) == b"known"
    file.close()
    assert vocabulary.detokenize(known, render_special=False) == b"known"
    unread = next(token for token in range(vocabulary.n_vocab - 1, 0, -1) if token not in known)
    with pytest.raises(ShuttingDown):
        vocabulary.piece(unread)


def test_threads_may_read_pieces_while_the_file_closes(embedded_model: Path) -> None:
    file = VocabularyFile(embedded_model)
    vocabulary, ends = file.vocabulary, []

    def read(tokens: range) -> None:
        try:
            for token in tokens:
                vocabulary.piece(token)
        except ShuttingDown:
            ends.append(token)

    threads = [
        threading.Thread(target=read, args=(range(first, vocabulary.n_vocab, 4),))
        for first in range(4)
    ]
    for thread in threads:
        thread.start()
    while not any(vocabulary._pieces):
        threading.Event().wait(0.001)
    file.close()
    for thread in threads:
        thread.join()
    assert ends, "every piece had been read before the file was closed"


def test_a_file_without_a_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(StartupError, match="could not load the model"):
        VocabularyFile(path)


def test_tokens_for_filling_in_the_middle_come_from_the_file(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "infill.gguf", TinyArchitecture.LLAMA, infill=True)
    file = VocabularyFile(path)
    marks = file.vocabulary.infill
    assert dict(zip(INFILL_TOKENS, astuple(marks), strict=True)) == INFILL_TOKENS
    file.close()


def test_a_file_without_such_tokens_has_no_marks(tmp_path: Path) -> None:
    file = VocabularyFile(write_tiny_model(tmp_path / "plain.gguf", TinyArchitecture.LLAMA))
    assert file.vocabulary.infill == NO_INFILL
    assert file.rerank_template is None
    file.close()


def test_a_reranker_has_its_own_template(tmp_path: Path) -> None:
    file = VocabularyFile(write_tiny_reranker(tmp_path / "rank.gguf", template="{query}"))
    assert file.rerank_template == "{query}"
    assert file.chat_template != file.rerank_template
    file.close()
