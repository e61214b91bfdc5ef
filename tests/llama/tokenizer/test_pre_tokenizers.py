"""No text overflows the stack, whichever pre-tokenizer the model names.

The texts are tokenised in a child process, whose threads have small stacks: a crash there is a
failure here.
"""

import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from rekindle.llama.tokenizer.pre_tokenizer import FLAT
from tests.support.vocabulary_files import PRE_TOKENIZERS, READ_FROM

ROOT = Path(__file__).parents[3]
STACK_KIB = 1024


@cache
def unharmed(*options: str) -> frozenset[str]:
    """Return the names whose texts came back. After a crash, a new child continues."""
    names: set[str] = set()
    waiting = [pre for pre in PRE_TOKENIZERS if not options or pre not in FLAT]
    while waiting:
        command = [sys.executable, "-m", "tests.support.tokenise_all", *options, *waiting]
        child = subprocess.run(
            ["sh", "-c", f'ulimit -s {STACK_KIB} && exec "$@"', "sh", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        done = child.stdout.split()
        names.update(done)
        if child.returncode == 0:
            break
        reached = waiting.index(done[-1]) + 1 if done else 0
        waiting = waiting[reached + 1 :]
    return frozenset(names)


def test_the_table_is_of_the_llama_cpp_in_use() -> None:
    """After an upgrade: read the names again, with the command beside the table."""
    assert version("llama_cpp_python") == READ_FROM


def test_flat_names_are_names_that_llama_cpp_knows() -> None:
    assert set(PRE_TOKENIZERS) >= FLAT


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_long_runs_come_back_as_they_were(pre: str) -> None:
    assert pre in unharmed()


@pytest.mark.long
@pytest.mark.parametrize("pre", sorted({*PRE_TOKENIZERS} - FLAT))
def test_no_match_is_longer_than_the_stack_that_it_is_given(pre: str) -> None:
    """Two alternating characters: a match may continue across words and gaps."""
    assert pre in unharmed("--pairs")
