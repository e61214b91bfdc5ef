"""The long form of `tests/engine/test_fidelity.py`: 10,000 operations and more, over every class.

    python -m tests.campaigns.fidelity [--operations N] [--seed N] [NAME ...]

Prints a line per subject; exits with 1 when something differed, with the steps that lead there.
"""

import argparse
import logging
import sys
import tempfile
import time
import traceback
from dataclasses import fields
from pathlib import Path

from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console

from rekindle.generation.model_state import ModelClass
from rekindle.generation.status import CacheCounters
from tests.support.fidelity import PIECES_COMPARED
from tests.support.fidelity_machine import budget, machine_for
from tests.support.fidelity_setup import Subject
from tests.support.fidelity_subjects import FakeSubject, LlamaSubject
from tests.support.tiny_models import TinyArchitecture

OPERATIONS_PER_WORLD = 40
NOT_OPERATIONS = {PIECES_COMPARED, *(each.name for each in fields(CacheCounters))}


def main() -> int:
    names = [*ModelClass, *TinyArchitecture]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=12_000, help="of all subjects together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", default=names, metavar="NAME", help=", ".join(names))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the server logs the damage that we cause
    n_worlds = -(-given.operations // (len(given.names) * OPERATIONS_PER_WORLD))
    console = Console(highlight=False)
    n_operations = n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            counted, is_right = _run(
                _subject(name, Path(folder)), name, n_worlds, given.seed, console
            )
            n_operations += counted
            n_failed += not is_right
    console.print(f"{n_operations} operations, {n_failed} of {len(given.names)} subjects failed")
    return 1 if n_failed else 0


def _subject(name: str, folder: Path) -> Subject:
    if name in list(ModelClass):
        return FakeSubject(ModelClass(name))
    return LlamaSubject(TinyArchitecture(name), folder)


def _run(
    subject: Subject, name: str, n_worlds: int, number: int, console: Console
) -> tuple[int, bool]:
    machine = machine_for(subject)
    limits = settings(
        budget(n_worlds=n_worlds, n_operations=OPERATIONS_PER_WORLD),
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
    )
    began = time.monotonic()
    is_right = True
    try:
        run_state_machine_as_test(seed(number)(machine), settings=limits)
    except Exception:  # whatever it is, the other subjects are looked at too
        console.print(traceback.format_exc())
        is_right = False
    counts = machine.counts
    n_pieces = counts[PIECES_COMPARED]
    n_operations = sum(counts[name] for name in counts if name not in NOT_OPERATIONS)
    console.print(
        f"{name}: {n_operations} operations, {n_pieces} restored pieces compared,"
        f" {time.monotonic() - began:.0f} s, {'right' if is_right else 'FAILED'}"
    )
    return n_operations, is_right


if __name__ == "__main__":
    sys.exit(main())
