"""An engine without HTTP, in its own process as in the server: start it, ask it, time it."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import count
from pathlib import Path
from typing import TypeVar

from bench.report import RESULTS
from rekindle.chat.accounts.accounts import Accounts
from rekindle.config.cache import CacheSettings
from rekindle.config.engine import EngineSettings
from rekindle.config.settings import Settings
from rekindle.generation.events import CacheSource, PromptEvaluated, TokenSampled
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import GenerationRequest, Sampling
from rekindle.generation.status import CacheStatus
from rekindle.llama.context import ContextParams
from rekindle.models.llama_model import load_llama
from rekindle.models.serving_model import SILENT, ServerParts, ServingModel
from rekindle.models.source import ModelFile
from rekindle.models.stores import MemoryShares, ModelStores, cache_memory_bytes

POLL_SECONDS = 0.05
PLAIN_IDS = range(300, 500)  # tokens of plain text in every vocabulary that we measure with
T = TypeVar("T")
_ids = count()


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    evaluated: PromptEvaluated
    first_token_seconds: float
    token_seconds: list[float]  # between two tokens

    def cells(self) -> list[str]:
        """Return what was found, the tokens prefilled, and the restore time, as text."""
        evaluated = self.evaluated
        found = [f"{span.source} {span.stop - span.start}" for span in evaluated.spans]
        return [
            ", ".join(found) or "-",
            str(evaluated.n_prompt - evaluated.n_cached),
            f"{1e3 * evaluated.restore_seconds:.0f}",
        ]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a temporary folder beside the results: the system's own is often not on a disk."""
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
    forgotten = Tombstones()
    stores = ModelStores(
        settings.cache, MemoryShares(cache_memory_bytes(settings.cache)), None, forgotten
    )
    parts = ServerParts(settings, Accounts(forgotten), (), forgotten)
    loaded = load_llama(parts, file.name, file, stores, SILENT)
    loaded.engine.start()
    return loaded


@asynccontextmanager
async def engine(
    file: ModelFile, cache: CacheSettings, *, n_cells: int, n_slots: int
) -> AsyncIterator[ServingModel]:
    loaded = start_engine(file, cache, n_cells=n_cells, n_slots=n_slots)
    try:
        yield loaded
    finally:
        await asyncio.to_thread(loaded.close)


def context_params(*, n_cells: int, n_slots: int, n_ubatch: int = 512) -> ContextParams:
    """Return the server's defaults, for a backend without an engine."""
    return ContextParams(
        n_cells=n_cells,
        n_slots=n_slots,
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_threads=os.cpu_count() or 1,
        flash_attn="on",
        type_k="f16",
        type_v="f16",
        swa_full=False,
    )


async def ask(
    loaded: ServingModel,
    prompt: tuple[int, ...],
    n_tokens: int = 1,
    *,
    cache_prompt: bool = True,
) -> TimedAnswer:
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
    return TimedAnswer(evaluated, first, seconds[1:])


async def ask_and_save(
    loaded: ServingModel, prompt: tuple[int, ...], n_tokens: int = 1
) -> TimedAnswer:
    """Ask, then wait until the engine has exported the rows of the answer."""
    answer = await ask(loaded, prompt, n_tokens)
    await asyncio.sleep(1.0)
    return answer


async def cache_status(loaded: ServingModel) -> CacheStatus:
    await loaded.engine.refresh()
    status = loaded.engine.status().cache
    assert status is not None
    return status


async def until_written(loaded: ServingModel, n_entries: int) -> None:
    """Wait until the disk holds so many entries. No event reports this."""
    while await _n_on_disk(loaded) < n_entries:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)


async def _n_on_disk(loaded: ServingModel) -> int:
    tiers = (await cache_status(loaded)).tiers
    return sum(tier.n_entries for tier in tiers if tier.name is CacheSource.DISK)


def random_prompt(seed: int, n_tokens: int, ids: range = PLAIN_IDS) -> tuple[int, ...]:
    noise = random.Random(seed)
    return tuple(noise.randrange(ids.start, ids.stop) for _ in range(n_tokens))


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Ask the system to drop the files from its page cache. Not every file system does."""
    for path in paths:
        with FileIO(path, "r+") as file:
            os.fsync(file.fileno())  # pages that are not written yet would stay
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """Return the value of the call, and the seconds it took."""
    began = time.perf_counter()
    value = action()
    return value, time.perf_counter() - began
