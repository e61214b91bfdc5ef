"""Nothing grows with the number of requests served: `python -m bench.memory.soak`, in short."""

import asyncio
from pathlib import Path

import httpx
import pytest

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ModelSettings
from rekindle.config.settings import Settings
from rekindle.models.source import resolve_model
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.support.mixed_traffic import send
from tests.support.tables import Look, look, small_limits
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

pytestmark = pytest.mark.long

N_WARM_UP, N_BETWEEN, N_LOOKS = 200, 37, 8
MIB = 2**20


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[Look]:
    """Through all that comes after the warm-up."""
    folder = tmp_path_factory.mktemp("soak")
    model = write_tiny_model(folder / "tiny.gguf", TinyArchitecture.LLAMA)
    settings = Settings(
        model=ModelSettings(model=str(model)),
        engine=EngineSettings(ctx_size=2048, threads=1),
        cache=CacheSettings(
            cache_ram=Bytes(MIB), cache_disk=Bytes(4 * MIB), cache_dir=folder / "cache"
        ),
    )
    with small_limits(), background(assemble(settings, resolve_model(str(model)))) as url:
        asyncio.run(send(url, N_WARM_UP))
        last = N_WARM_UP + N_LOOKS * N_BETWEEN
        return [
            _look_after(url, first, folder / "cache") for first in range(N_WARM_UP, last, N_BETWEEN)
        ]


def _look_after(url: str, first: int, cache_dir: Path) -> Look:
    asyncio.run(send(url, N_BETWEEN, first=first))
    with httpx.Client(base_url=url, timeout=60) as http:
        http.post("/v1/embeddings", json={"input": "The last one is kept."}).raise_for_status()
        return look(http.get("/metrics").text, cache_dir)


def test_no_table_grows_with_the_requests_served(looks: list[Look]) -> None:
    """Fails for a table without a bound. For tables with a large bound, see `small_limits`."""
    growing = {}
    for name in looks[-1].tables:
        sizes = [each.tables.get(name, 0) for each in looks]
        before, after = sizes[: N_LOOKS // 2], sizes[N_LOOKS // 2 :]
        # What is bounded goes up and down: entries come and go, a slot holds what came last.
        if min(after) > max(before) and sizes[-1] > 1.2 * sizes[0] + 8:
            growing[name] = sizes
    assert not growing


def test_files_threads_and_tasks_are_released(looks: list[Look]) -> None:
    first, last = looks[0], looks[-1]
    assert last.n_files <= first.n_files + 2  # of a database that is written right now
    assert last.n_threads <= first.n_threads + 4  # a pool starts a thread when it first needs it
    assert last.n_tasks <= first.n_tasks + 1  # one that computes ahead may wait


def test_the_number_of_time_series_is_bounded(looks: list[Look]) -> None:
    assert looks[-1].n_series <= looks[0].n_series + 12  # a route that is asked for the first time
