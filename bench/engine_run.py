"""An engine in this process, without HTTP: started on a scratch directory, asked, timed."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.report import RESULTS
from rekindle.chat.accounts.accounts import Accounts
from rekindle.config import CacheSettings, EngineSettings, Settings
from rekindle.engine.handle import ANY_GRAMMAR
from rekindle.generation.events import CacheSource, PromptEvaluated, TokenSampled
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.generation.status import CacheStatus
from rekindle.models.llama_model import load_llama
from rekindle.models.serving_model import SILENT, ServerParts, ServingModel
from rekindle.models.source import ModelFile
from rekindle.models.stores import MemoryShares, ModelStores, cache_memory_bytes

POLL_SECONDS = 0.05
_ids = count()


@dataclass(frozen=True, slots=True)
class Answer:
    evaluated: PromptEvaluated
    first_token_seconds: float
    token_seconds: list[float]  # between two tokens


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Beside the results, because the system's own is often not on a disk."""
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        yield Path(folder)


def start_engine(
    file: ModelFile, cache: CacheSettings, *, n_cells: int, n_slots: int, n_ubatch: int = 512
) -> ServingModel:
    settings = Settings(
        engine=EngineSettings(
            ctx_size=n_cells, parallel=n_slots, threads=os.cpu_count(), ubatch_size=n_ubatch
        ),
        cache=cache,
    )
    stores = ModelStores(settings.cache, MemoryShares(cache_memory_bytes(settings.cache)), None)
    parts = ServerParts(settings, Accounts(), ())
    loaded = load_llama(parts, file.name, file, stores, SILENT)
    loaded.engine.start()
    return loaded


@asynccontextmanager
async def engine(
    file: ModelFile, cache: CacheSettings, *, n_cells: int, n_slots: int
) -> AsyncIterator[ServingModel]:
    loaded = start_engine(file, cache, n_cells=n_cells, n_slots=n_slots)
    loaded.engine.check_grammar(ANY_GRAMMAR)  # a server that has settled has done this
    try:
        yield loaded
    finally:
        loaded.resources.close()


async def ask(
    loaded: ServingModel,
    prompt: tuple[int, ...],
    n_tokens: int = 1,
    *,
    cache_prompt: bool = True,
) -> Answer:
    request = GenerationRequest(
        id=str(next(_ids)),
        prompt=prompt,
        boundaries=(),
        sampling=Sampling(temperature=0, ignore_eos=True),
        max_tokens=n_tokens,
        cache_prompt=cache_prompt,
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
    return Answer(evaluated, first, seconds[1:])


def cache_status(loaded: ServingModel) -> CacheStatus:
    status = loaded.engine.status().cache
    assert status is not None
    return status


async def until_written(loaded: ServingModel, n_entries: int) -> None:
    """The disk has so many; nobody tells when."""
    while _n_on_disk(loaded) < n_entries:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)


def _n_on_disk(loaded: ServingModel) -> int:
    tiers = cache_status(loaded).tiers
    return sum(tier.n_entries for tier in tiers if tier.name is CacheSource.DISK)


def random_prompt(seed: int, n_tokens: int) -> tuple[int, ...]:
    ids = random.Random(seed)
    return tuple(ids.randrange(300, 500) for _ in range(n_tokens))
