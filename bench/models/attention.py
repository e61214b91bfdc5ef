"""Measure batches on the CPU with this build of llama.cpp and another one, in turns.

    python -m bench.models.attention OTHER [--rounds 3] [--model FILE]

OTHER is the folder of another build's libraries, such as `llama-build/bin` of a llama-server. Each
round loads the model once with each library, in a process of its own. The number of tokens before
a batch and in it, and streams that share nothing, make up the cases. Numbers are medians in ms.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.engine_run import context_params, random_prompt
from bench.report import CONSOLE
from rekindle.bench.machine import load_warning
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model

N_UBATCH = 512
N_BEFORE = 2048
BATCHES = (1, 2, 4, 8, 16, 32, 63, 64, 130)
N_STREAMS, N_OWN = (1, 4, 16, 32), 768  # streams that decode, and the tokens before each
N_TIMES = 5  # each case, the median counts

Cases = dict[str, float]  # milliseconds


def measure(model: Path) -> Cases:
    with closing(GgufModel(model, gpu_layers=0)) as loaded:
        return dict([*_prompts(loaded), *_streams(loaded)])


def _prompts(model: GgufModel) -> Iterator[tuple[str, float]]:
    tokens = list(random_prompt(0, N_BEFORE + max(BATCHES)))
    params = context_params(n_cells=2 * N_BEFORE, n_slots=1)
    with closing(LlamaBackend(model, params)) as backend:
        backend.warm_up()
        for start in range(0, N_BEFORE, N_UBATCH):
            batch = tokens[start : start + N_UBATCH]
            seconds = _decode(backend, batch, list(range(start, start + N_UBATCH)), slots=[0])
            yield f"{N_UBATCH} tokens after {start:,}", 1e3 * seconds
        for n_tokens in BATCHES:
            times = []
            for _ in range(N_TIMES):
                positions = list(range(N_BEFORE, N_BEFORE + n_tokens))
                batch = tokens[N_BEFORE : N_BEFORE + n_tokens]
                times.append(_decode(backend, batch, positions, slots=[0]))
                backend.trim_slot(0, N_BEFORE)
            noun = "token" if n_tokens == 1 else "tokens"
            yield f"{n_tokens} {noun} after {N_BEFORE:,}", 1e3 * median(times)


def _streams(model: GgufModel) -> Iterator[tuple[str, float]]:
    tokens = list(random_prompt(1, N_OWN))
    params = context_params(n_cells=max(N_STREAMS) * (N_OWN + 64), n_slots=max(N_STREAMS))
    with closing(LlamaBackend(model, params)) as backend:
        backend.warm_up()
        _decode(backend, tokens[:N_UBATCH], list(range(N_UBATCH)), slots=[0])
        _decode(backend, tokens[N_UBATCH:], list(range(N_UBATCH, N_OWN)), slots=[0])
        rows = bytes(backend.export_rows(0, 0, N_OWN))
        for slot in range(1, max(N_STREAMS)):
            backend.import_rows(slot, 0, N_OWN, rows)
        for n_streams in N_STREAMS:
            times = []
            slots = list(range(n_streams))
            for _ in range(N_TIMES):
                batch = tokens[:n_streams]
                times.append(_decode(backend, batch, [N_OWN] * n_streams, slots=slots))
                for slot in slots:
                    backend.trim_slot(slot, N_OWN)
            yield f"{n_streams} streams, one token each after {N_OWN}", 1e3 * median(times)


def _decode(
    backend: LlamaBackend, tokens: list[int], positions: list[int], *, slots: list[int]
) -> float:
    of_tokens = slots if len(slots) == len(tokens) else slots * len(tokens)
    began = time.perf_counter()
    backend.decode(tokens, positions, of_tokens, [len(tokens) - 1])
    return time.perf_counter() - began


def _measure_with(library: Path | None, model: Path) -> Cases:
    environment = {key: text for key, text in os.environ.items() if key != "LLAMA_CPP_LIB_PATH"}
    if library is not None:
        environment["LLAMA_CPP_LIB_PATH"] = str(library.resolve())
    command = [sys.executable, "-m", __spec__.name, "--measure", "--model", str(model)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    cases: Cases = json.loads(run.stdout.splitlines()[-1])
    return cases


def _compare(other: Path, model: Path, n_rounds: int) -> None:
    if warning := load_warning():
        CONSOLE.print(warning)
    rounds: dict[Path | None, list[Cases]] = {other: [], None: []}
    for number in range(n_rounds):
        for library, measured in rounds.items():
            CONSOLE.print(f"round {number + 1} of {n_rounds}: {library or 'this build'}")
            measured.append(_measure_with(library, model))
    table = Table("case", "other, ms", "this build, ms", "ratio", "ratio of each round")
    for case in rounds[None][0]:
        theirs, ours = ([each[case] for each in rounds[library]] for library in (other, None))
        ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(theirs, ours, strict=True))
        a, b = median(theirs), median(ours)
        table.add_row(case, f"{a:,.1f}", f"{b:,.1f}", f"{b / a:.2f}", ratios)
    CONSOLE.print(table)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models.attention", description=__doc__)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="default: the embedded one")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    model = options.model or resolve_model(None).path
    if options.measure:
        print(json.dumps(measure(model)))  # noqa: T201
    elif options.other is None:
        parser.error("name the folder of another build's libraries")
    else:
        _compare(options.other, model, options.rounds)


if __name__ == "__main__":
    main()
