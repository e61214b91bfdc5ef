"""Compare the accounted bytes of the memory tier with the growth of the process.

    python -m bench.memory.accounts [NAME...]

`rekindle serve` runs with random weights and no disk. Prompts without a common prefix fill the
memory tier to its budget. Then they evict each other until all entries were replaced three times,
and at the end the cache is emptied. Growth is anonymous memory by the kernel's count, beyond that
of a server that has used its whole context and stores nothing.
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.models.big import DenseShape, write_dense_model
from rekindle.bench.meter import metric_in
from tests.support.server_process import ServerProcess, serve
from tests.support.tables import anonymous_bytes
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

CONTEXT_TOKENS, LONG_TOKENS = 4096, 1024
N_REPLACED = 3
N_WARM_UP = 10  # picked
LIMIT = 0.05
MIB = 2**20

# Many heads: large rows (32 KiB per token) and little work.
WIDE = DenseShape(
    n_vocab=512, n_embd=64, n_ff=96, n_layers=2, n_head=128, n_head_kv=128, head_dim=32
)


@dataclass(frozen=True, slots=True)
class MemoryCase:
    name: str
    architecture: TinyArchitecture | None  # None: rows of 32 KiB per token
    budget_bytes: int
    prompt_tokens: int
    more_tokens: int = 0  # at most, at random


CASES = (
    MemoryCase("wide-256", None, 256 * MIB, 1024),  # payloads of 8 MiB
    MemoryCase("wide-1024", None, 1024 * MIB, 1024),
    MemoryCase("mixed-256", None, 256 * MIB, 16, 1000),
    MemoryCase("narrow-128", TinyArchitecture.LLAMA, 128 * MIB, 1024),  # of 256 KiB
    MemoryCase(
        "short-64", TinyArchitecture.LLAMA, 64 * MIB, 100
    ),  # of 100 KiB: malloc does not map these
    # The memory of a server without its cache differs by 2 MiB from start to start.
    MemoryCase("states-128", TinyArchitecture.MAMBA2, 128 * MIB, 256),
)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    moment: str
    accounted_bytes: float
    grown_bytes: int
    n_entries: float

    @property
    def error(self) -> float:
        return self.grown_bytes / self.accounted_bytes - 1 if self.accounted_bytes else 0.0


def main(names: list[str]) -> int:
    table = Table("case", "moment", "entries", "accounted, MiB", "grown, MiB", "off by")
    worst = 0.0
    for case in CASES:
        if names and case.name not in names:
            continue
        for reading in _measure(case):
            table.add_row(case.name, *_cells(reading))
            if reading.moment.startswith(("full", "replaced")):
                worst = max(worst, abs(reading.error))
    console = Console()
    console.print(table)
    console.print(
        f"At the budget the accounts are off by {worst:.1%} at most; the limit is {LIMIT:.0%}."
    )
    return int(worst > LIMIT)


def _cells(reading: MemoryReading) -> Iterator[str]:
    yield reading.moment
    yield f"{reading.n_entries:.0f}"
    yield f"{reading.accounted_bytes / MIB:.1f}"
    yield f"{reading.grown_bytes / MIB:.1f}"
    yield f"{reading.error:+.1%}" if reading.accounted_bytes else ""


def _measure(case: MemoryCase) -> Iterator[MemoryReading]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        if case.architecture is None:
            write_dense_model(model, "wide", WIDE)
        else:
            write_tiny_model(model, case.architecture)
        arguments = (
            *("--ctx-size", str(CONTEXT_TOKENS), "--parallel", "1", "--threads", "1"),
            *("--cache-ram", f"{case.budget_bytes}B", "--no-cache-disk", "--log-level", "warning"),
        )
        with serve(str(model), *arguments) as server:
            filling = _Filling(server, case)
            yield from filling.readings()
            speed = f"{filling.megabytes_per_second():.0f} MB/s"
            Console(stderr=True).print(f"{case.name}: saved into memory at {speed}")


class _Filling:
    def __init__(self, server: ServerProcess, case: MemoryCase) -> None:
        self._server = server
        self._case = case
        self._http = httpx.Client(base_url=server.url, timeout=600)
        self._noise = random.Random(1)
        self._n_base_bytes = 0

    def readings(self) -> Iterator[MemoryReading]:
        # One stored prompt, because some tables are allocated early but touched late. Not more:
        # memory that evicted entries leave to malloc would serve the counted ones.
        self._ask(LONG_TOKENS)
        self._empty()
        for _ in range(N_WARM_UP):
            self._ask(LONG_TOKENS, cache_prompt=False)
        self._n_base_bytes = self._anonymous_bytes()
        yield self._read("empty")
        for percent in (25, 50, 75):
            while self._accounted() < self._case.budget_bytes * percent // 100:
                self._ask_next()
            yield self._read(f"{percent} %")
        while not self._evictions():
            self._ask_next()
        yield self._read("full")
        n_entries = self._metric("rekindle_cache_entries", "memory")
        for times in range(1, N_REPLACED + 1):
            while self._evictions() < times * n_entries:
                self._ask_next()
            yield self._read(f"replaced {times} x")
        self._empty()
        yield self._read("emptied")

    def _ask_next(self) -> None:
        case = self._case
        self._ask(case.prompt_tokens + self._noise.randrange(case.more_tokens + 1))

    def _ask(self, n_tokens: int, *, cache_prompt: bool = True) -> None:
        """Send a prompt that shares no prefix with others. No reply is remembered."""
        prompt = [self._noise.randrange(1, 250) for _ in range(n_tokens)]
        body = {"prompt": prompt, "max_tokens": 0, "cache_prompt": cache_prompt}
        # One name for all: names take memory too.
        body |= {"cache_key": "accounts"} if cache_prompt else {}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def _empty(self) -> None:
        self._ask(1, cache_prompt=False)
        self._http.delete("/v1/cache").raise_for_status()

    def _read(self, moment: str) -> MemoryReading:
        self._ask(1, cache_prompt=False)  # the engine saves after it has answered
        return MemoryReading(
            moment,
            self._accounted(),
            self._anonymous_bytes() - self._n_base_bytes,
            self._metric("rekindle_cache_entries", "memory"),
        )

    def _accounted(self) -> float:
        return self._metric("rekindle_cache_bytes", "memory")

    def _evictions(self) -> float:
        return self._metric("rekindle_cache_evictions_total", "memory")

    def megabytes_per_second(self) -> float:
        """Return the speed of saves from the context into memory."""
        n_bytes = self._metric("rekindle_cache_saved_bytes_total", "memory")
        return n_bytes / self._metric("rekindle_cache_save_seconds_total", "memory") / 1e6

    def _metric(self, name: str, tier: str) -> float:
        value = metric_in(self._http.get("/metrics").text, f'{name}{{tier="{tier}"}}')
        assert value is not None
        return value

    def _anonymous_bytes(self) -> int:
        return anonymous_bytes(self._server.process.pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
