"""Measure on a GPU: a long prompt cold, from memory and from disk, and the cost of idle rows.

    python -m bench.models.gpu MODEL [N_TOKENS]

MODEL is a GGUF file, for example from `python -m bench.models.big`. The engine runs in this
process, without HTTP. Files are read from disk, not from the page cache, if the system allows it.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.engine_run import (
    TimedAnswer,
    ask,
    ask_and_save,
    cache_status,
    drop_page_cache,
    random_prompt,
    scratch_directory,
    start_engine,
    until_written,
)
from rekindle.config.cache import CacheSettings
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import Bytes
from rekindle.generation.events import CacheSource
from rekindle.models.serving_model import ServingModel
from rekindle.models.source import ModelFile, resolve_model
from rekindle.server.serving import run_event_loop

N_UBATCH = 2048
N_ROUNDS = 3
N_IDLE = 2
STREAM_TOKENS = 1500
WARM_UP_TOKENS = 4096
SETTLE_SECONDS = 120.0
CONSOLE = Console(highlight=False, width=120)
_starts = count()


def main(model: str, n_tokens: int) -> None:
    file = resolve_model(model)
    with scratch_directory() as folder:
        run_event_loop(_measure(file, n_tokens, folder))


async def _measure(file: ModelFile, n_tokens: int, folder: Path) -> None:
    table = Table("prompt", "found", "prefilled", "restored, ms", "GB/s", "first token, ms")
    cold, other = random_prompt(1, n_tokens), random_prompt(2, n_tokens)
    loaded = _start(file, folder, n_tokens, n_slots=1)
    row_bytes = await _warm_up(loaded)
    for name, prompt in [("cold", cold), ("another, cold", other)]:
        _add(table, name, await ask_and_save(loaded, prompt), row_bytes)
    for _ in range(N_ROUNDS):
        for prompt in (cold, other):
            _add(table, "back, from memory", await ask_and_save(loaded, prompt), row_bytes)
    await asyncio.wait_for(until_written(loaded, 2 * (n_tokens // 256)), SETTLE_SECONDS)
    await asyncio.to_thread(loaded.close)

    for may_recompute, name in ((False, "from disk, told to load"), (True, "from disk, or not")):
        loaded = _start(file, folder, n_tokens, n_slots=1, may_recompute=may_recompute)
        await _warm_up(loaded)
        for prompt in (cold, other) if may_recompute else (cold,):
            drop_page_cache(_files(folder))
            _add(table, f"restarted, {name}", await ask_and_save(loaded, prompt), row_bytes)
        await asyncio.to_thread(loaded.close)
    CONSOLE.print(table)
    await _idle_tax(file, folder, n_tokens)


async def _idle_tax(file: ModelFile, folder: Path, n_tokens: int) -> None:
    """Measure a stream alone, and beside idle conversations in the context."""
    loaded = _start(file, folder, n_tokens, n_slots=N_IDLE + 1)
    await _warm_up(loaded)
    alone = await ask(loaded, random_prompt(10, n_tokens), STREAM_TOKENS)
    for number in range(N_IDLE):
        await ask(loaded, random_prompt(20 + number, n_tokens), 200)
    await asyncio.sleep(1.0)  # a user reads
    beside = await ask(loaded, random_prompt(30, n_tokens), STREAM_TOKENS)
    counters = (await cache_status(loaded)).counters
    table = Table(f"{STREAM_TOKENS} tokens behind {n_tokens}", "first 20", "last 20", "all", "tax")
    whole = sum(alone.token_seconds)
    for name, answer in (("alone", alone), (f"beside {N_IDLE} idle ones", beside)):
        seconds = answer.token_seconds
        table.add_row(
            name,
            f"{1e3 * median(seconds[:20]):.2f} ms",
            f"{1e3 * median(seconds[-20:]):.2f} ms",
            f"{sum(seconds):.2f} s",
            f"{sum(seconds) / whole - 1:.1%}",
        )
    CONSOLE.print(table)
    CONSOLE.print(f"{counters.parked} slots were parked to speed up decoding")
    await asyncio.to_thread(loaded.close)


def _start(
    file: ModelFile, folder: Path, n_tokens: int, *, n_slots: int, may_recompute: bool = True
) -> ServingModel:
    cache = CacheSettings(
        cache_dir=folder / "cache",
        cache_write_budget=Bytes(0),
        cache_write_policy=WritePolicy.ALL,
        cache_recompute=may_recompute,
    )
    n_cells = n_slots * max(n_tokens + STREAM_TOKENS + 256, WARM_UP_TOKENS + 256)
    return start_engine(file, cache, n_cells=n_cells, n_slots=n_slots, n_ubatch=N_UBATCH)


async def _warm_up(loaded: ServingModel) -> float:
    """Load kernels and let the engine measure its prefill. Return the bytes of a row."""
    before = (await cache_status(loaded)).counters.memory.written_bytes
    await ask_and_save(loaded, random_prompt(100 + next(_starts), WARM_UP_TOKENS))
    return ((await cache_status(loaded)).counters.memory.written_bytes - before) / WARM_UP_TOKENS


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _add(table: Table, name: str, answer: TimedAnswer, row_bytes: float) -> None:
    evaluated = answer.evaluated
    n_restored = sum(
        span.stop - span.start for span in evaluated.spans if span.source is not CacheSource.LIVE
    )
    speed = n_restored * row_bytes / evaluated.restore_seconds if n_restored else None
    table.add_row(
        name,
        *answer.cells(),
        f"{speed / 1e9:.1f}" if speed else "-",
        f"{1e3 * answer.first_token_seconds:.0f}",
    )


def _arguments(given: Sequence[str]) -> tuple[str, int]:
    return given[0], int(given[1]) if len(given) > 1 else 16_384


if __name__ == "__main__":
    main(*_arguments(sys.argv[1:]))
