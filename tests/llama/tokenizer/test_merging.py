"""A text whose tokens would take too long to merge is refused; large ordinary texts are not."""

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle.errors import InvalidRequest
from rekindle.llama.library import lib
from rekindle.llama.tokenizer.merging import MAX_COST, RUN_BYTES, RUN_COST, check_cost
from tests.support.vocabulary_files import opened, write_bpe_vocabulary, write_piece_vocabulary

LONGEST_RUN = MAX_COST // RUN_COST


@pytest.mark.parametrize(
    ("unit", "n"), [("A", 8_000_000), ("\n", 2**25), ("<|im_start|>", 2_800_000)]
)
def test_a_text_of_one_endless_run_is_refused(unit: str, n: int, tmp_path: Path) -> None:
    path = write_bpe_vocabulary(tmp_path / "bpe.gguf", "smollm")
    refusal = rf"has {n * len(unit):,} bytes.* At most {MAX_COST:,} "
    with opened(path, tokenizer="gpt2", pre="smollm") as vocabulary:
        for parse_special in (True, False):
            with pytest.raises(InvalidRequest, match=refusal):
                vocabulary.tokenize(unit * n, parse_special=parse_special)


def test_tokenizers_that_do_not_split_texts_have_the_same_limit(tmp_path: Path) -> None:
    path = write_piece_vocabulary(tmp_path / "spm.gguf", "llama")
    with (
        opened(path, tokenizer="llama", pre="") as vocabulary,
        pytest.raises(InvalidRequest, match=rf"At most {MAX_COST:,} "),
    ):
        vocabulary.tokenize("a" * 8_000_000, parse_special=False)


@pytest.mark.parametrize("unit", ["A", " ", "\n", "7", "ab", "中", "\U0001f600"])
def test_the_limit_of_a_run_is_counted_in_bytes(unit: str) -> None:
    n_bytes = len(unit.encode())
    check_cost(unit * (LONGEST_RUN // n_bytes))
    with pytest.raises(InvalidRequest, match=rf"counts as {RUN_COST}\."):
        check_cost(unit * (LONGEST_RUN // n_bytes + 1))


def test_many_long_runs_cost_as_much_as_one() -> None:
    runs = ("x" * (3 * RUN_BYTES) + " ") * (2 * LONGEST_RUN // (3 * RUN_BYTES))
    with pytest.raises(InvalidRequest, match=r"in long runs"):
        check_cost(runs)


@pytest.mark.parametrize(
    ("unit", "n"),
    [
        ("The server keeps what it has computed. A returning chat starts where it ended.", 1),
        ("    for position, token in enumerate(tokens):  # each of them", 1),
        ("中文的书没有空格。", 300),
        ("function a(b,c){return b+c*d[0]};", 200),
        ("QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=", 200),
        ("-", 5_000),
    ],
)
def test_8_mb_of_an_ordinary_text_are_accepted(unit: str, n: int) -> None:
    line = unit * n + "\n"
    check_cost(line * (8_000_000 // len(line.encode())))


def test_more_than_10_mb_of_an_ordinary_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"has 10,000,010 bytes, 0 of them in long runs"):
        check_cost("ten bytes\n" * (MAX_COST // 10 + 1))


@contextmanager
def switching_only_when_released() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_other_threads_run_while_a_text_is_tokenised(tmp_path: Path) -> None:
    path = write_bpe_vocabulary(tmp_path / "bpe.gguf", "smollm")
    data = b"A" * 500_000
    tokens = (ctypes.c_int32 * len(data))()
    steps, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0.001)

    with opened(path, tokenizer="gpt2", pre="smollm") as vocabulary:
        other = threading.Thread(target=count)
        other.start()
        add_special = parse_special = False
        with switching_only_when_released():
            before = steps[0]
            lib.llama_tokenize(
                *(vocabulary.handle, data, len(data), tokens, len(tokens)),
                *(add_special, parse_special),
            )
            after = steps[0]
        stop.set()
        other.join()
    assert after > before, "the call held Python's lock"
