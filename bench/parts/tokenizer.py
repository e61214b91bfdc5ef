"""Measure llama.cpp's tokenizers on hostile texts: stack per character, and time by length.

Without Rekindle's limits, on stacks of 1 GiB. Linux only.

python -m bench.parts.tokenizer
"""

import ctypes
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.engine_run import timed
from rekindle.llama.library import lib
from rekindle.llama.tokenizer.deep_stack import call_with_stack
from rekindle.llama.tokenizer.pre_tokenizer import FLAT
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.models.files.embedded import embedded_model
from tests.support.vocabulary_files import (
    PRE_TOKENIZERS,
    opened,
    write_bpe_vocabulary,
    write_piece_vocabulary,
)

STACK_BYTES = 2**30
MAX_SECONDS = 3.0  # a text that took longer is not doubled again
RUNS = ("A", "a", " ", "\n", "7", "-", "e\u0301", "\u4e2d", "\U0001f600", "a'", "aA", "a ", "\0")
SLOW: dict[str, Callable[[int], str]] = {
    "deepseek-llm": lambda n: " " * n + "5",
    "superbpe": lambda n: "7" * n,
    "jais-2": lambda n: " " * n + "x",
    "gpt-2": lambda n: "<|im_end|>" * n,
    "gpt-4o": lambda n: "A" * n,
}
PROSE = "".join(path.read_text("utf-8") for path in sorted(Path("docs").rglob("*.md")))
LETTERS = "".join(filter(str.isalpha, PROSE))
# Of the embedded model: one long word, against prose.
WORDS: dict[str, Callable[[int], str]] = {
    "prose": lambda n: _repeated(PROSE, n),
    "prose without spaces": lambda n: _repeated(LETTERS, n),
    "A": lambda n: "A" * n,
    "spaces": lambda n: " " * n,
}


def main() -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for pre in PRE_TOKENIZERS:
            if pre not in FLAT and pre not in ("whitespace", "superbpe"):
                console.print(f"{pre}: {_stack_per_character(path, pre)} bytes of stack/character")
        for pre, text in SLOW.items():
            write_bpe_vocabulary(path, pre)
            console.print(pre, *_times(path, "gpt2", text))
        for name, breaks in (("only", 1), ("up to 31 of them", 31)):
            pieces = tuple("\n" * n for n in range(1, breaks + 1))
            write_piece_vocabulary(path, "llama", user_defined=pieces)
            console.print(f"SPM, line breaks, {name}", *_times(path, "llama", lambda n: "\n" * n))
    for name, text in WORDS.items():
        console.print(f"embedded model, {name}", *_times(embedded_model(), "gpt2", text))


def _repeated(text: str, n: int) -> str:
    return (text * (n // len(text) + 1))[:n]


def _stack_per_character(path: Path, pre: str) -> int:
    write_bpe_vocabulary(path, pre)
    with opened(path, tokenizer="gpt2", pre=pre) as vocabulary:
        short, long = (
            max(
                call_with_stack(partial(_touched, vocabulary, text), STACK_BYTES)
                for text in ((run * n)[:n] for run in RUNS)
            )
            for n in (10_000, 20_000)
        )
    return (long - short) // 10_000


def _times(path: Path, tokenizer: str, text: Callable[[int], str]) -> list[str]:
    rows, n, seconds = [], 2_500, 0.0
    with opened(path, tokenizer=tokenizer, pre="") as vocabulary:
        while seconds < MAX_SECONDS and n < 10_000_000:
            seconds = call_with_stack(partial(_seconds, vocabulary, text(n)), STACK_BYTES)
            rows.append(f"{n:,}: {seconds:.2f} s")
            n *= 2
    return rows


def _seconds(vocabulary: Vocabulary, text: str) -> float:
    return timed(partial(_tokenise, vocabulary, text))[1]


def _touched(vocabulary: Vocabulary, text: str) -> int:
    """Return the resident bytes of this thread's stack, found by the size of its mapping."""
    _tokenise(vocabulary, text)
    touched, is_stack = 0, False
    for line in Path("/proc/self/smaps").read_text("ascii", "replace").splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            n_bytes = int(area[2], 16) - int(area[1], 16)
            is_stack = abs(n_bytes - STACK_BYTES) <= 2**20
        elif is_stack and line.startswith("Rss:"):
            touched = max(touched, int(line.split()[1]) * 1024)
    return touched


def _tokenise(vocabulary: Vocabulary, text: str) -> None:
    data = text.encode()
    tokens = (ctypes.c_int32 * (len(data) + 2))()
    add_special, parse_special = False, True
    lib.llama_tokenize(
        vocabulary.handle, data, len(data), tokens, len(tokens), add_special, parse_special
    )


if __name__ == "__main__":
    main()
