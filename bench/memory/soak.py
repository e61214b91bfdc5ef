"""Check that nothing grows with the number of requests served.

    python -m bench.memory.soak [REQUESTS]

A server with random weights gets requests of every kind from four clients at once. Its budgets are
small, so it evicts all the time. Every 500 requests we look inside the process: memory, files,
tasks, threads, time series, and every container that one of our objects owns. Tables with a large
bound get a small one here, so that they are full when the warm-up ends.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from rekindle.config.cache import CacheSettings
from rekindle.config.choices import LogLevel
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ModelSettings
from rekindle.config.server import ServerSettings
from rekindle.config.settings import Settings
from rekindle.models.source import resolve_model
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.support.mixed_traffic import send
from tests.support.tables import Look, look, small_limits
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

N_REQUESTS, N_WARM_UP, N_BETWEEN = 10_000, 2_000, 500
LIMIT_BYTES = 1024  # per request
N_SHOWN = 25


class Sample(NamedTuple):
    n_requests: int
    seconds: float
    look: Look


def main(n_requests: int = N_REQUESTS) -> int:
    console = Console()
    samples, kinds = [], Counter[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _watched(Path(folder)) as server:
        samples.append(Sample(0, 0.0, server.look()))
        for first in range(0, n_requests, N_BETWEEN):
            kinds += asyncio.run(send(server.url, N_BETWEEN, first=first))
            samples.append(Sample(first + N_BETWEEN, time.monotonic() - began, server.look()))
            console.print(_line(samples[-1]), highlight=False)
    console.print(_table(samples))
    console.print(", ".join(f"{kind} {n}" for kind, n in kinds.most_common()))
    steady = [sample for sample in samples if sample.n_requests >= min(N_WARM_UP, n_requests // 2)]
    console.print(_growing(steady))
    slope, noise = _slope(steady)
    console.print(
        f"{slope:+.0f} bytes per request after the warm-up (standard error {noise:.0f});"
        f" the limit is {LIMIT_BYTES}."
    )
    return int(slope > LIMIT_BYTES)


class _WatchedServer(NamedTuple):
    url: str
    asked: Connection

    def look(self) -> Look:
        self.asked.send("look")
        answer: Look = self.asked.recv()
        return answer


@contextmanager
def _watched(folder: Path) -> Iterator[_WatchedServer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder))
    process.start()
    theirs.close()  # else the end of the process closes no pipe
    try:
        yield _WatchedServer(ours.recv(), ours)
        ours.send("stop")
        process.join(60)
    finally:
        process.kill()
        process.join()


def _serve(asked: Connection, folder: Path) -> None:
    model = write_tiny_model(folder / "tiny.gguf", TinyArchitecture.LLAMA)
    settings = Settings(
        model=ModelSettings(model=str(model)),
        engine=EngineSettings(ctx_size=4096, parallel=4, threads=1),
        cache=CacheSettings(
            cache_ram=Bytes(8 << 20), cache_disk=Bytes(8 << 20), cache_dir=folder / "cache"
        ),
        server=ServerSettings(log_level=LogLevel.WARNING),
    )
    with small_limits(), background(assemble(settings, resolve_model(str(model)))) as url:
        asked.send(url)
        while asked.recv() == "look":
            metrics = httpx.get(f"{url}/metrics").text
            asked.send(look(metrics, folder / "cache"))


def _slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return bytes per request by least squares, and the standard error."""
    x = np.array([sample.n_requests for sample in samples], float)
    y = np.array([sample.look.anonymous_bytes for sample in samples], float)
    x -= x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    return slope, float(np.sqrt(rest @ rest / max(len(x) - 2, 1) / (x @ x)))


def _line(sample: Sample) -> str:
    return f"{sample.n_requests} in {sample.seconds:.0f} s"


def _table(samples: Sequence[Sample]) -> Table:
    table = Table(
        "requests", "s", "memory, MiB", "files", "threads", "tasks", "series", "SQLite, kB", "held"
    )
    for number, seconds, seen in samples:
        table.add_row(
            str(number),
            f"{seconds:.0f}",
            f"{seen.anonymous_bytes / 2**20:.1f}",
            str(seen.n_files),
            str(seen.n_threads),
            str(seen.n_tasks),
            str(seen.n_series),
            f"{seen.sqlite_bytes / 1e3:.0f}",
            str(seen.n_in_tables),
        )
    return table


def _growing(samples: Sequence[Sample]) -> Table:
    """List containers that hold more at the end of each quarter than of the one before."""
    marks = [samples[i * (len(samples) - 1) // 4].look.tables for i in range(5)]
    table = Table("still growing", "per request", *(f"{i * 25} %" for i in range(5)))
    n_requests = samples[-1].n_requests - samples[0].n_requests
    found = []
    for name in marks[-1]:
        sizes = [mark.get(name, 0) for mark in marks]
        if all(a < b for a, b in pairwise(sizes)):
            found.append(((sizes[-1] - sizes[0]) / n_requests, name, sizes))
    for rate, name, sizes in sorted(found, reverse=True)[:N_SHOWN]:
        table.add_row(name, f"{rate:.3f}", *map(str, sizes))
    return table


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
