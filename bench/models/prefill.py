"""Measure cold prompts against the library alone, by length and number of streams.

    python -m bench.models.prefill MODEL [--tokens 512,4096] [--streams 1,4] [--ubatch 2048]
        [--max-alone TOKENS]

The library alone decodes batches of `--ubatch` tokens and waits for the last one of a prompt;
several prompts follow each other in one context. "repeated" decodes nothing else, as llama-bench
does, so llama.cpp computes the same graph again. "after replies" decodes single tokens behind each
burst, as a server does, so llama.cpp builds the graph of each prompt anew.

The engine runs in its own process, without HTTP. A burst of streams has prompts that share
nothing. "first token" counts from the first request to the last first token; the tokens that other
streams decode meanwhile are not counted (`--reply-tokens 1`: there are none). "prompt_ms" counts
the time that the engine reports, from the first slot given to the last prompt computed: without
the way to the engine and back. The stored kind keeps the rows, the other does not. Each stream
then decodes some tokens, while rows are still being stored.
"""

import argparse
import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.engine_run import (
    PLAIN_IDS,
    ask,
    context_params,
    random_prompt,
    scratch_directory,
    start_engine,
)
from rekindle.config.cache import CacheSettings
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import Bytes
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.serving_model import ServingModel
from rekindle.models.source import resolve_model
from rekindle.server.serving import run_event_loop

REST_SECONDS = 1.0  # between two bursts: exports end
CONSOLE = Console(highlight=False, width=140)
_seeds = count(1)


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    tokens: tuple[int, ...]
    streams: tuple[int, ...]
    n_ubatch: int
    n_rounds: int
    max_tokens: int  # of all streams together: larger bursts are left out
    max_alone: int  # larger bursts are not measured with the library alone
    reply_tokens: int  # of each stream; the first one ends its prefill

    @property
    def bursts(self) -> list[tuple[int, int]]:
        return [
            (n_tokens, n_streams)
            for n_tokens in self.tokens
            for n_streams in self.streams
            if n_tokens * n_streams <= self.max_tokens
        ]

    @property
    def n_cells(self) -> int:
        bursts = [*self.bursts, (self.n_ubatch, 1)]  # the last one loads the kernels
        return max(
            n_streams * (n_tokens + self.reply_tokens + 64) for n_tokens, n_streams in bursts
        )


class Floor(NamedTuple):
    """Tokens per second of the library alone."""

    repeated: float
    after_replies: float


class Speeds(NamedTuple):
    """Tokens per second of a burst."""

    first_token: float
    by_engine: float
    decode: float


def main(plan: Plan) -> None:
    alone = _library_in_a_process()
    with scratch_directory() as folder:
        run_event_loop(_measure(plan, folder, alone))


async def _measure(plan: Plan, folder: Path, alone: dict[tuple[int, int], Floor]) -> None:
    table = Table(
        "tokens", "streams", "repeated", "after replies", "kind",
        "first token", "to rep.", "to after", "prompt_ms", "to rep.", "to after", "decode",
    )  # fmt: skip
    loaded = _start(plan, folder)
    await _burst(
        loaded, plan, plan.n_ubatch, 1, is_stored=True
    )  # kernels are loaded, speeds learnt
    for n_tokens, n_streams in plan.bursts:
        floor = alone[n_tokens, n_streams]
        bursts: dict[bool, list[Speeds]] = {True: [], False: []}
        for _ in range(plan.n_rounds):
            for is_stored in (True, False):
                burst = await _burst(loaded, plan, n_tokens, n_streams, is_stored=is_stored)
                bursts[is_stored].append(burst)
        for is_stored, measured in bursts.items():
            speeds = Speeds(*(median(each) for each in zip(*measured, strict=True)))
            cells = [f"{n_tokens:,}", str(n_streams), f"{floor.repeated:,.0f}"]
            cells += [f"{floor.after_replies:,.0f}", "stored" if is_stored else "not stored"]
            for speed in (speeds.first_token, speeds.by_engine):
                ratios = [speed / floor.repeated, speed / floor.after_replies]
                cells += [f"{speed:,.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
            table.add_row(*cells, f"{speeds.decode:.1f}")
        CONSOLE.print(f"{n_tokens} x {n_streams}: {bursts}")
    CONSOLE.print(table)
    await asyncio.to_thread(loaded.close)


async def _burst(
    loaded: ServingModel, plan: Plan, n_tokens: int, n_streams: int, *, is_stored: bool
) -> Speeds:
    prompts = [random_prompt(next(_seeds), n_tokens) for _ in range(n_streams)]
    answers = await asyncio.gather(
        *(ask(loaded, each, plan.reply_tokens, cache_prompt=is_stored) for each in prompts)
    )
    await asyncio.sleep(REST_SECONDS)
    first = max(answer.first_token_seconds for answer in answers)
    last = max(answer.first_token_seconds + sum(answer.token_seconds) for answer in answers)
    waits = [answer.evaluated.queue_seconds for answer in answers]
    by_engine = max(
        wait + answer.evaluated.prefill_seconds for wait, answer in zip(waits, answers, strict=True)
    ) - min(waits)
    n_decoded = n_streams * (plan.reply_tokens - 1)
    return Speeds(
        first_token=n_streams * n_tokens / first,
        by_engine=n_streams * n_tokens / by_engine,
        decode=n_decoded / max(last - first, 1e-9),
    )


def _start(plan: Plan, folder: Path) -> ServingModel:
    cache = CacheSettings(
        cache_dir=folder / "cache",
        cache_write_budget=Bytes(0),
        cache_write_policy=WritePolicy.ALL,
    )
    file = resolve_model(str(plan.model))
    n_slots = max(plan.streams)
    return start_engine(file, cache, n_cells=plan.n_cells, n_slots=n_slots, n_ubatch=plan.n_ubatch)


def _library_in_a_process() -> dict[tuple[int, int], Floor]:
    """Measure the library alone. The memory of the process is free again afterwards."""
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--alone"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    return {
        (int(tokens), int(streams)): Floor(float(repeated), float(after_replies))
        for tokens, streams, repeated, after_replies in lines
    }


def _library_alone(plan: Plan) -> None:
    """Print the speeds of prompts that are computed one after the other, in one context."""
    model = GgufModel(plan.model, gpu_layers=-1)
    n_slots = max(plan.streams)
    params = context_params(n_cells=plan.n_cells, n_slots=n_slots, n_ubatch=plan.n_ubatch)
    backend = LlamaBackend(model, params)
    backend.warm_up()
    for n_tokens, n_streams in plan.bursts:
        if n_tokens * n_streams > plan.max_alone:
            print(n_tokens, n_streams, math.nan, math.nan)  # noqa: T201
            continue
        tokens = list(random_prompt(0, n_tokens))
        speeds = []
        for n_replied in (0, plan.reply_tokens - 1):
            seconds = []
            for _ in range(plan.n_rounds + 1):
                backend.clear_all()
                time.sleep(REST_SECONDS)  # as between two bursts: a GPU may lower its clock
                began = time.perf_counter()
                _decode_all(backend, tokens, n_streams, plan.n_ubatch)
                seconds.append(time.perf_counter() - began)
                _decode_replies(backend, n_tokens, n_streams, n_replied)
            speeds.append(n_streams * n_tokens / median(seconds[1:]))
        print(n_tokens, n_streams, *speeds)  # noqa: T201
    backend.close()


def _decode_all(backend: LlamaBackend, tokens: list[int], n_streams: int, n_ubatch: int) -> None:
    for slot in range(n_streams):
        for start in range(0, len(tokens), n_ubatch):
            chunk = tokens[start : start + n_ubatch]
            positions = list(range(start, start + len(chunk)))
            outputs = [len(chunk) - 1] if start + len(chunk) == len(tokens) else []
            backend.decode(chunk, positions, [slot] * len(chunk), outputs)
        backend.wait()


def _decode_replies(backend: LlamaBackend, n_tokens: int, n_streams: int, n_replied: int) -> None:
    slots = list(range(n_streams))
    for position in range(n_tokens, n_tokens + n_replied):
        backend.decode([PLAIN_IDS[0]] * n_streams, [position] * n_streams, slots, slots)
        backend.wait()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=_numbers, default=(512, 4096, 16_384, 65_536))
    parser.add_argument("--streams", type=_numbers, default=(1, 4, 8))
    parser.add_argument("--ubatch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=524_288)
    parser.add_argument("--max-alone", type=int, default=524_288)
    parser.add_argument("--reply-tokens", type=int, default=33)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


if __name__ == "__main__":
    options = _arguments(sys.argv[1:])
    plan = Plan(
        options.model,
        options.tokens,
        options.streams,
        options.ubatch,
        options.rounds,
        options.max_tokens,
        options.max_alone,
        options.reply_tokens,
    )
    if options.alone:
        _library_alone(plan)
    else:
        main(plan)
