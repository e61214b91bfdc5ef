"""What reuse is worth: the same prompt cold, live, from memory and from disk; and idle rows' tax.

    python -m bench.reuse [MODEL [N_TOKENS]]

The engine in this process, without HTTP. Disk reads come from the page cache.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from rekindle.chat.accounts import Accounts
from rekindle.config import Bytes, CacheSettings, EngineSettings, Settings
from rekindle.generation import GenerationRequest, PromptEvaluated, Sampling, TokenSampled
from rekindle.loaded_model import LoadedModel, load
from rekindle.model_source import ModelFile, resolve_model
from rekindle.model_stores import MemoryShares, ModelStores, cache_memory_bytes
from rekindle.server import run_event_loop

N_IDLE = 2  # conversations that stay in the context while another one decodes
STREAM_TOKENS = 120
N_STREAMS = 6
_ids = count()


@dataclass(frozen=True, slots=True)
class Answer:
    evaluated: PromptEvaluated
    first_token_seconds: float
    token_seconds: list[float]


def main(model: str | None, n_tokens: int) -> None:
    file = resolve_model(model)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        run_event_loop(_measure(file, n_tokens, Path(folder), console))


async def _measure(file: ModelFile, n_tokens: int, folder: Path, console: Console) -> None:
    prompts = [_prompt(seed, n_tokens) for seed in range(N_IDLE)]
    table = Table("prompt", "found", "prefilled", "restored in, ms", "first token, ms")
    loaded = _engine(file, folder, n_tokens, n_slots=1)
    await _ask(loaded, _prompt(99, min(n_tokens, 2048)))  # warms up
    for name, prompt in [
        ("cold", prompts[0]),
        ("again", prompts[0]),
        ("another", prompts[1]),
        ("back", prompts[0]),
    ]:
        _add(table, name, await _ask(loaded, prompt))
    loaded.close()
    loaded = _engine(file, folder, n_tokens, n_slots=1)
    _add(table, "after a restart", await _ask(loaded, prompts[0]))
    loaded.close()
    console.print(table)

    loaded = _engine(file, folder, n_tokens, n_slots=4)
    for prompt in prompts:
        await _ask(loaded, prompt)
    for number in range(N_STREAMS):
        answer = await _ask(loaded, _prompt(100 + number, 300), STREAM_TOKENS)
        status = loaded.engine.status()
        assert status.cache is not None
        console.print(
            f"stream {number}: {1e3 * median(answer.token_seconds[:20]):.2f} ms a token at first,"
            f" {1e3 * median(answer.token_seconds[-20:]):.2f} at the end; then"
            f" {status.n_cells_used} cells in use, {status.cache.counters.parked} slots parked"
        )
    loaded.close()


def _engine(file: ModelFile, folder: Path, n_tokens: int, *, n_slots: int) -> LoadedModel:
    settings = Settings(
        engine=EngineSettings(
            ctx_size=(N_IDLE + 1) * n_tokens + 4096, parallel=n_slots, threads=os.cpu_count()
        ),
        cache=CacheSettings(cache_dir=folder / "cache", cache_write_budget=Bytes(0)),
    )
    stores = ModelStores(settings.cache, MemoryShares(cache_memory_bytes(settings.cache)))
    loaded = load(settings, file, file.name, stores, Accounts())
    loaded.start()
    return loaded


async def _ask(loaded: LoadedModel, prompt: tuple[int, ...], n_tokens: int = 1) -> Answer:
    request = GenerationRequest(
        id=str(next(_ids)),
        prompt=prompt,
        boundaries=(),
        sampling=Sampling(temperature=0, ignore_eos=True),
        max_tokens=n_tokens,
    )
    began = last = time.perf_counter()
    evaluated, first, seconds = None, 0.0, []
    async for event in loaded.engine.submit(request):
        now = time.perf_counter()
        if isinstance(event, PromptEvaluated):
            evaluated = event
        elif isinstance(event, TokenSampled):
            first = first or now - began
            seconds.append(now - last)
            last = now
    assert evaluated is not None
    await asyncio.sleep(1.0)  # what it left behind is stored meanwhile
    return Answer(evaluated, first, seconds[1:])


def _prompt(seed: int, n_tokens: int) -> tuple[int, ...]:
    random_ids = random.Random(seed)
    return tuple(random_ids.randrange(300, 500) for _ in range(n_tokens))


def _add(table: Table, name: str, answer: Answer) -> None:
    evaluated = answer.evaluated
    found = ", ".join(f"{span.source} {span.stop - span.start}" for span in evaluated.spans)
    table.add_row(
        name,
        found or "-",
        str(evaluated.n_prompt - evaluated.n_cached),
        f"{1e3 * evaluated.restore_seconds:.0f}",
        f"{1e3 * answer.first_token_seconds:.0f}",
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else None, int(given[1]) if len(given) > 1 else 2048)
