"""Measure how long a server with a large store takes to its first answer.

    python -m bench.startup [--quick]

The start is real, the store is simulated: each entry has a row in the catalogue and a sparse file.
All times count from the start of the process. CPU time is steadier on a busy machine. Python's
compiled files are kept between starts, as for an installed package. Run alone, this module also
measures a million entries, which take minutes to make.
"""

import asyncio
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

from bench.engine_run import ask, engine, random_prompt, scratch_directory
from bench.report import BenchRow, at_most, run_alone
from bench.simulated_store import headers, write_store
from rekindle.bench.meter import metric_in
from rekindle.bench.peers.processes import ServerProcess
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.config.cache import CacheSettings
from rekindle.models.source import resolve_model
from rekindle.server.serving import run_event_loop

NAME = "startup"
N_STARTS = 3
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02
LIMIT_SECONDS = at_most(2)
QUESTION = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


class StoreSize(NamedTuple):
    case: str
    n_entries: int
    payload_bytes: int


EMPTY = StoreSize("empty", 0, 0)
SMALL = StoreSize("1,000 entries", 1_000, 6_000_000)
STORES = (
    EMPTY,
    SMALL,
    StoreSize("100 GB: 3,000 of 34 MB", 3_000, 34_000_000),
    StoreSize("100 GB: 17,000 of 6 MB", 17_000, 6_000_000),
    StoreSize("100,000 entries", 100_000, 1_000_000),
)
LARGEST = StoreSize("1,000,000 entries", 1_000_000, 100_000)


class ServerStart(NamedTuple):
    """Seconds since the process was started."""

    healthy: float
    answered: float
    listed: float
    answered_cpu: float  # CPU time until then, on all cores


def main(*, quick: bool = False) -> list[BenchRow]:
    return measure((EMPTY, SMALL) if quick else STORES, n_starts=1 if quick else N_STARTS)


def measure(stores: tuple[StoreSize, ...], *, n_starts: int) -> list[BenchRow]:
    rows: list[BenchRow] = []
    for store in stores:
        with scratch_directory() as folder:
            n_own = _fill(folder / "cache", store)
            # The first start compiles.
            _, *starts = [asyncio.run(_start(folder, n_own)) for _ in range(n_starts + 1)]
        for measure, seconds in zip(ServerStart._fields, zip(*starts, strict=True), strict=True):
            target = LIMIT_SECONDS if measure == "answered" else None
            rows.append(BenchRow(NAME, store.case, f"{measure}_seconds", median(seconds), target))
    return rows


def _fill(directory: Path, store: StoreSize) -> int:
    """Fill the directory and return its entries: simulated ones, and some of a real server."""
    run_event_loop(_use_once(directory))
    with closing(open_catalog(directory)) as catalog:
        [root] = {row.header.fingerprint for row in catalog.rows()}
        n_own = len(catalog.all_keys())
    write_store(directory, headers(store.n_entries, root=root, payload_bytes=store.payload_bytes))
    return n_own + store.n_entries


async def _use_once(directory: Path) -> None:
    """Let an engine store a prompt, so that the model's fingerprint is known."""
    settings = CacheSettings(cache_dir=directory)
    async with engine(resolve_model(None), settings, n_cells=1024, n_slots=1) as loaded:
        await ask(loaded, random_prompt(1, 128))


async def _start(folder: Path, n_entries: int) -> ServerStart:
    server = ServerProcess(_command(folder), folder, "/health")
    began = time.perf_counter()
    try:
        healthy = await server.start()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as http:
            (await http.post("/v1/chat/completions", json=QUESTION)).raise_for_status()
            answered = time.perf_counter() - began
            answered_cpu = _cpu_seconds(server.pid)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await _n_listed(http) < n_entries:  # noqa: ASYNC110 - no event reports it
                    await asyncio.sleep(POLL_SECONDS)
        return ServerStart(healthy, answered, time.perf_counter() - began, answered_cpu)
    finally:
        await server.end()


def _command(folder: Path) -> list[str]:
    keeps_compiled = ("-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPYCACHEPREFIX={folder / 'compiled'}")
    serve = (sys.executable, "-m", "rekindle", "serve", "--cache-dir", str(folder / "cache"))
    return ["env", *keeps_compiled, *serve, "--cache-disk", "1TiB"]


async def _n_listed(http: httpx.AsyncClient) -> float:
    metrics = (await http.get("/metrics")).text
    return metric_in(metrics, 'rekindle_cache_entries{tier="disk"}') or 0


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of the process on all cores; 0 where there is no /proc."""
    try:
        status = Path(f"/proc/{process}/stat").read_text("ascii")
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _with_the_largest(*, quick: bool) -> list[BenchRow]:
    return main(quick=quick) + ([] if quick else measure((LARGEST,), n_starts=1))


if __name__ == "__main__":
    run_alone(_with_the_largest)
