"""Check that nothing became slower: `make bench-gate`, or `python -m bench.gate`.

    python -m bench.gate [--rounds N] [--threads N] [--llama-server PATH]
    python -m bench.gate --write [--rounds N] [--threads N] [--llama-server PATH]

The first compares with the committed numbers and exits with 1 if tokens differ or a stage moved.
Times are compared if ratios of this kind of machine are committed. The second measures the numbers
again. The reference is llama-server, if there is one; otherwise llama.cpp alone.
"""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.engine_run import scratch_directory
from bench.gate.compare import (
    TIMES,
    Difference,
    GateRound,
    RoundsDiffer,
    Verdict,
    differences,
    read_record,
    with_rounds,
    write_record,
)
from bench.gate.measure import (
    Conduct,
    LlamaReference,
    LlamaServerReference,
    Reference,
    measured_round,
)
from bench.report import CONSOLE
from rekindle.bench.machine import commit_label, load_warning, machine_label
from rekindle.bench.peers.contenders import LLAMA_SERVER, OURS, Program, find_contenders
from rekindle.models.source import resolve_model

COMMITTED = Path(__file__).parent / "committed.json"
N_ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gate", description=__doc__)
    parser.add_argument("--write", action="store_true", help="measure the committed numbers again")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, help="of all workloads")
    parser.add_argument("--llama-server", type=Path, help="default: from PATH")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all servers")
    options = parser.parse_args(arguments)
    if warning := load_warning():
        CONSOLE.print(warning)
    with scratch_directory() as scratch:
        conduct = Conduct(resolve_model(None).path, options.threads, scratch)
        programs = _programs(options.llama_server)
        reference: Reference = (
            LlamaServerReference(programs[LLAMA_SERVER], conduct)
            if LLAMA_SERVER in programs
            else LlamaReference(conduct)
        )
        rounds = asyncio.run(_rounds(conduct, programs[OURS], reference, options.rounds))
    try:
        return _write(rounds, reference) if options.write else _compare(rounds, reference)
    except RoundsDiffer as error:
        CONSOLE.print(f"The rounds of this run differ: {error}", soft_wrap=True)
        return 1


def report_of(found: Sequence[Difference]) -> int:
    """Print the differences. Return 1 if one of them fails the gate."""
    for each in found:
        CONSOLE.print(f"{each.verdict.name.lower()}: {each}", soft_wrap=True, markup=False)
    if any(each.verdict is Verdict.FAILED for each in found):
        return 1
    unknown = {each.workload for each in found if each.verdict is Verdict.UNKNOWN}
    if unknown == {TIMES}:
        CONSOLE.print("The numbers of tokens are the committed ones.")
    elif TIMES not in unknown:
        CONSOLE.print("Nothing became slower.")
    return 0


def _programs(llama_server: Path | None) -> dict[str, Program]:
    found = find_contenders(
        llama_server=llama_server or _on_path(),
        remotes=(),
        without=("xllamacpp", "llama_cpp.server"),
    )
    return {each.name: each for each in found if isinstance(each, Program)}


def _on_path() -> Path | None:
    found = shutil.which(LLAMA_SERVER)
    return Path(found) if found else None


async def _rounds(
    conduct: Conduct, ours: Program, reference: Reference, n_rounds: int
) -> list[GateRound]:
    # SIGTERM cancels the run as Ctrl-C does, so no server is left running.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    rounds = []
    for number in range(1, n_rounds + 1):

        def show(what: str, number: int = number) -> None:
            CONSOLE.print(f"round {number} of {n_rounds}, {what}", soft_wrap=True)

        rounds.append(await measured_round(conduct, ours, reference, show))
    return rounds


def _write(rounds: Sequence[GateRound], reference: Reference) -> int:
    before = read_record(COMMITTED) if COMMITTED.exists() else None
    record = with_rounds(
        before,
        rounds,
        reference=_named(reference),
        commit=commit_label() or "unknown",
    )
    write_record(COMMITTED, record)
    CONSOLE.print(str(COMMITTED), soft_wrap=True)
    return 0


def _compare(rounds: Sequence[GateRound], reference: Reference) -> int:
    record = read_record(COMMITTED)
    return report_of(differences(record, rounds, reference=_named(reference)))


def _named(reference: Reference) -> str:
    """Return the name of the reference on this kind of machine."""
    return f"{reference.name} on {machine_label()}"


if __name__ == "__main__":
    sys.exit(main())
