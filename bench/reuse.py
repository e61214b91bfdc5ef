"""Measure reuse: the same prompt cold, live, from memory and from disk; and idle rows.

    python -m bench.reuse [MODEL [N_TOKENS]]

The engine runs in this process, without HTTP. Disk reads come from the page cache.
"""

import asyncio
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.engine_run import (
    TimedAnswer,
    ask_and_save,
    cache_status,
    random_prompt,
    scratch_directory,
    start_engine,
)
from rekindle.config.cache import CacheSettings
from rekindle.config.declare import Bytes
from rekindle.models.serving_model import ServingModel
from rekindle.models.source import ModelFile, resolve_model
from rekindle.server.serving import run_event_loop

N_IDLE = 2  # idle conversations in the context while another one decodes
STREAM_TOKENS = 120
N_STREAMS = 6


def main(model: str | None, n_tokens: int) -> None:
    file = resolve_model(model)
    console = Console()
    with scratch_directory() as folder:
        run_event_loop(_measure(file, n_tokens, folder, console))


async def _measure(file: ModelFile, n_tokens: int, folder: Path, console: Console) -> None:
    prompts = [random_prompt(seed, n_tokens) for seed in range(N_IDLE)]
    table = Table("prompt", "found", "prefilled", "restored in, ms", "first token, ms")
    loaded = _engine(file, folder, n_tokens, n_slots=1)
    await ask_and_save(loaded, random_prompt(99, min(n_tokens, 2048)))  # warms up
    for name, prompt in [
        ("cold", prompts[0]),
        ("again", prompts[0]),
        ("another", prompts[1]),
        ("back", prompts[0]),
    ]:
        _add(table, name, await ask_and_save(loaded, prompt))
    await asyncio.to_thread(loaded.close)
    loaded = _engine(file, folder, n_tokens, n_slots=1)
    _add(table, "after a restart", await ask_and_save(loaded, prompts[0]))
    await asyncio.to_thread(loaded.close)
    console.print(table)

    loaded = _engine(file, folder, n_tokens, n_slots=4)
    for prompt in prompts:
        await ask_and_save(loaded, prompt)
    for number in range(N_STREAMS):
        answer = await ask_and_save(loaded, random_prompt(100 + number, 300), STREAM_TOKENS)
        n_parked = (await cache_status(loaded)).counters.parked
        console.print(
            f"stream {number}: {1e3 * median(answer.token_seconds[:20]):.2f} ms a token at first,"
            f" {1e3 * median(answer.token_seconds[-20:]):.2f} at the end; then"
            f" {loaded.engine.status().n_cells_used} cells in use, {n_parked} slots parked"
        )
    await asyncio.to_thread(loaded.close)


def _engine(file: ModelFile, folder: Path, n_tokens: int, *, n_slots: int) -> ServingModel:
    settings = CacheSettings(cache_dir=folder / "cache", cache_write_budget=Bytes(0))
    n_cells = (N_IDLE + 1) * n_tokens + 4096
    return start_engine(file, settings, n_cells=n_cells, n_slots=n_slots)


def _add(table: Table, name: str, answer: TimedAnswer) -> None:
    table.add_row(name, *answer.cells(), f"{1e3 * answer.first_token_seconds:.0f}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else None, int(given[1]) if len(given) > 1 else 2048)
