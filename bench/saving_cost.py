"""Measure how much saving slows decode streams and a prefill.

    python -m bench.saving_cost [--quick]

Bursts with and without `cache_prompt` alternate on one engine that writes to memory and disk.
Every stream completes a block. `export_percent` is the share of its time that the engine's thread
spent on exports, `writing_percent` the share of all cores that the cache's threads used. On a busy
machine these two are steadier than the speeds.
"""

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from bench.engine_run import ask, cache_status, engine, random_prompt, scratch_directory
from bench.report import BenchRow, at_most, run_alone
from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.config.cache import CacheSettings
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import Bytes
from rekindle.models.serving_model import ServingModel
from rekindle.models.source import ModelFile, resolve_model
from rekindle.server.serving import run_event_loop

NAME = "saving_cost"
STREAMS = (1, 8)
PROMPT_TOKENS = 16
REPLY_TOKENS = BLOCK_TOKENS + 16
PREFILL_TOKENS = 1024
N_ROUNDS = 3
LIMIT_PERCENT = at_most(3)
_seeds = count(1)


@dataclass(frozen=True, slots=True)
class SavingBurst:
    tokens_per_second: float
    export_percent: float
    writing_percent: float


def main(*, quick: bool = False) -> list[BenchRow]:
    file = resolve_model(None)
    if quick:
        return measure(file, streams=(1,), prefill_tokens=64, n_rounds=1, reply_tokens=16)
    return measure(file, streams=STREAMS, prefill_tokens=PREFILL_TOKENS, n_rounds=N_ROUNDS)


def measure(
    file: ModelFile,
    *,
    streams: tuple[int, ...],
    prefill_tokens: int,
    n_rounds: int,
    reply_tokens: int = REPLY_TOKENS,
) -> list[BenchRow]:
    rows: list[BenchRow] = []

    async def measure_all() -> None:
        for n_streams in streams:
            shape = (n_streams, PROMPT_TOKENS, reply_tokens)
            case = f"decode, {n_streams} streams" if n_streams > 1 else "decode, 1 stream"
            rows.extend(_rows(case, await _in_turn(file, shape, n_rounds)))
        shape = (1, prefill_tokens, 1)
        rows.extend(
            _rows(f"prefill, {prefill_tokens:,} tokens", await _in_turn(file, shape, n_rounds))
        )

    run_event_loop(measure_all())
    return rows


def _rows(case: str, bursts: dict[bool, list[SavingBurst]]) -> list[BenchRow]:
    """Compare bursts in pairs: a slow moment of the machine affects both."""
    speeds = {is_on: [burst.tokens_per_second for burst in bursts[is_on]] for is_on in bursts}
    lost = [100 * (1 - on / off) for on, off in zip(speeds[True], speeds[False], strict=True)]
    exported = median(burst.export_percent for burst in bursts[True])
    written = median(burst.writing_percent for burst in bursts[True])
    return [
        BenchRow(NAME, case, "tokens_per_second_without", median(speeds[False])),
        BenchRow(NAME, case, "tokens_per_second_saving", median(speeds[True])),
        BenchRow(NAME, case, "lost_percent", median(lost), LIMIT_PERCENT),
        BenchRow(NAME, case, "export_percent", exported, LIMIT_PERCENT),
        BenchRow(NAME, case, "writing_percent", written, LIMIT_PERCENT),
    ]


async def _in_turn(
    file: ModelFile, shape: tuple[int, int, int], n_rounds: int
) -> dict[bool, list[SavingBurst]]:
    n_streams, n_prompt, n_reply = shape
    bursts: dict[bool, list[SavingBurst]] = {False: [], True: []}
    n_cells = n_streams * (n_prompt + n_reply + 64) + 512
    with scratch_directory() as folder:
        settings = CacheSettings(
            cache_dir=folder, cache_write_policy=WritePolicy.ALL, cache_write_budget=Bytes(0)
        )
        async with engine(file, settings, n_cells=n_cells, n_slots=n_streams) as loaded:
            await ask(loaded, random_prompt(0, 64), 16)  # warms up
            for number in range(n_rounds):
                order = (False, True) if number % 2 else (True, False)
                for is_saving in order:
                    bursts[is_saving].append(await _burst(loaded, shape, is_saving=is_saving))
    return bursts


async def _burst(
    loaded: ServingModel, shape: tuple[int, int, int], *, is_saving: bool
) -> SavingBurst:
    n_streams, n_prompt, n_reply = shape
    before = (await cache_status(loaded)).counters.memory.write_microseconds
    written_before = _transfer_seconds()
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(
            ask(loaded, random_prompt(next(_seeds), n_prompt), n_reply, cache_prompt=is_saving)
            for _ in range(n_streams)
        )
    )
    seconds = time.perf_counter() - began
    exported = (await cache_status(loaded)).counters.memory.write_microseconds - before
    written = _transfer_seconds() - written_before
    if n_reply > 1:  # the time in which all of them decode
        decoding = seconds - max(answer.first_token_seconds for answer in answers)
        speed = n_streams * (n_reply - 1) / decoding
    else:
        speed = n_streams * n_prompt / seconds
    await _saved(loaded)
    return SavingBurst(
        speed, exported / seconds / 1e4, 100 * written / seconds / (os.cpu_count() or 1)
    )


def _transfer_seconds() -> float:
    """Return the CPU time of the threads that read and write entries; 0 without /proc."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("cache-")]
    try:
        texts = [
            Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text("ascii")
            for thread in threads
        ]
    except OSError:
        return 0.0
    return sum(int(text.split()[0]) for text in texts) / 1e9


async def _saved(loaded: ServingModel) -> None:
    """Wait until the rows of this burst are saved, before the next one begins."""
    last = None
    while (counters := (await cache_status(loaded)).counters) != last:
        last = counters
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    run_alone(main)
