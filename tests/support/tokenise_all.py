"""A child process: tokenises long runs under each pre-tokenizer that it is given.

    python -m tests.support.tokenise_all [--pairs] NAME...

Prints the name of each pre-tokenizer that gives the texts back. A crash ends the list.
"""

import sys
import tempfile
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from rekindle.errors import InvalidRequest
from rekindle.llama.tokenizer import pre_tokenizer
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.vocabulary_files import opened, write_bpe_vocabulary

# At 320 bytes per character, 4,000 are more than the stack of 1 MiB that this process is given.
RUNS = (" ", "\n", "-", "\u4e2d", "e\u0301", "\u0301", "\U0001f600", "a'", "aA", "a ", "/", "\0")
LETTERS = "A" * 30_000
RUN_LENGTH = 4_500
# Each is a text of its own, so that its stack is no larger than it is entitled to.
TEXTS = (LETTERS, *((run * RUN_LENGTH)[:RUN_LENGTH] for run in RUNS), "7" * 900)
# Characters of every class that an expression tells apart, two by two.
PAIRS = tuple("!" + (one + other) * 6_000 for one, other in permutations("A1 \n/!'\u4e2d", 2))
# These write spaces otherwise, or drop them: their own vocabularies are of another kind.
LETTERS_ONLY = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")


def main() -> None:
    names, texts = sys.argv[1:], TEXTS
    if names[0] == "--pairs":
        names, texts = names[1:], PAIRS
        pre_tokenizer.MAX_UNSEARCHED = 1_000  # the longest match is searched for in each of them
    with tempfile.TemporaryDirectory() as folder:
        for pre in names:
            path = write_bpe_vocabulary(Path(folder) / "vocabulary.gguf", pre)
            with opened(path, tokenizer="gpt2", pre=pre) as vocabulary:
                if all(_comes_back(vocabulary, text) for text in texts_for(pre, texts)):
                    sys.stdout.write(f"{pre}\n")
                    sys.stdout.flush()


def texts_for(pre: str, texts: Sequence[str]) -> Sequence[str]:
    return (LETTERS,) if pre in LETTERS_ONLY else texts


def _comes_back(vocabulary: Vocabulary, text: str) -> bool:
    try:
        tokens = vocabulary.tokenize(text, parse_special=False)
    except InvalidRequest:
        return True  # it would take too long, and is refused
    return vocabulary.detokenize(tokens, render_special=False) == text.encode()


if __name__ == "__main__":
    main()
