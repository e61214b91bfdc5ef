"""A server flooded with prompts never exceeds its budgets, seen from outside."""

import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rekindle.cache.residency import STAGED_ENTRIES
from tests.cache.entries import assert_catalogue_is_true, bytes_by_du
from tests.conftest import TinyModels
from tests.support.cache_traffic import Caller, Prompt, cold_answers, random_tokens
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture

KIB, MIB = 2**10, 2**20
RAM_BYTES = 2 * MIB
DISK_BYTES = 6 * MIB
# Requests in flight, SQLite's pages, what the allocator keeps: measured 4 to 5 MiB. Picked.
ALLOWANCE_BYTES = 16 * MIB
N_CONVERSATIONS = 30
N_SLOTS = 4
MAX_ENTRY_BYTES = 280 * KIB  # a block of 256 tokens, 1 KiB each, and what comes with it

MEMORY_BYTES = 'rekindle_cache_bytes{tier="memory"}'


def conversation(number: int) -> list[Prompt]:
    """Two turns; every fifth conversation is one that was there before."""
    noise = random.Random(0 if number % 5 == 0 else number)
    first = random_tokens(noise, noise.randrange(100, 800))
    return [first, first + random_tokens(noise, 60)]


def rss_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    [kibibytes] = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kibibytes) * KIB


def directory_bytes(server: ServerProcess, directory: Path) -> int:
    """While nothing moves: du looks at one file after the other."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        return bytes_by_du(directory)
    finally:
        server.process.send_signal(signal.SIGCONT)


@contextmanager
def watched(*measures: Callable[[], int]) -> Iterator[list[int]]:
    """The most that each of these ever was."""
    most = [measure() for measure in measures]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[:] = [
                max(before, measure()) for before, measure in zip(most, measures, strict=True)
            ]

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield most
        finally:
            is_over.set()
            watching.result()


def talk(caller: Caller, number: int) -> None:
    for turn in conversation(number):
        caller.ask(turn, n_tokens=4)


@pytest.mark.parametrize(
    ("architecture", "ram_bytes"),
    [
        pytest.param(TinyArchitecture.LLAMA, RAM_BYTES, marks=pytest.mark.long),
        (TinyArchitecture.LLAMA, 0),
        (TinyArchitecture.QWEN35, RAM_BYTES),
    ],
)
def test_no_budget_is_exceeded_under_many_prompts(
    tiny_models: TinyModels, tmp_path: Path, architecture: TinyArchitecture, ram_bytes: int
) -> None:
    model = tiny_models(architecture)
    with (
        serve(
            *(str(model), "--parallel", str(N_SLOTS), "--ctx-size", "4096", "--threads", "1"),
            *("--cache-dir", str(tmp_path), "--cache-disk", str(DISK_BYTES)),
            *("--cache-ram", f"{ram_bytes}B", "--no-cache-recompute"),
        ) as server,
        closing(Caller(server.url)) as caller,
    ):
        talk(caller, -1)
        rss_before = rss_bytes(server)
        with (
            watched(
                lambda: int(caller.metrics()[MEMORY_BYTES]),
                lambda: rss_bytes(server),
                lambda: directory_bytes(server, tmp_path),
            ) as most,
            ThreadPoolExecutor(N_SLOTS) as pool,
        ):
            list(pool.map(lambda number: talk(caller, number), range(N_CONVERSATIONS)))
        most_memory, most_rss, most_disk = most
        # With no memory at all, entries still pass through it: a few to disk, one per slot back.
        assert most_memory <= max(ram_bytes, (STAGED_ENTRIES + N_SLOTS) * MAX_ENTRY_BYTES)
        assert most_rss - rss_before <= ram_bytes + ALLOWANCE_BYTES
        assert DISK_BYTES * 0.8 < most_disk <= DISK_BYTES
        metrics = caller.metrics()
        assert metrics['rekindle_cache_evictions_total{tier="disk"}'] > 0
        assert metrics["rekindle_cache_writes_failed_total"] == 0
        assert metrics["rekindle_cache_quarantined_total"] == 0
        with cold_answers(model) as cold:
            for number in range(0, N_CONVERSATIONS, 10):
                [_, last] = conversation(number)
                cold.check(caller.ask(last), last)
        assert server.stop() == 0
    assert_catalogue_is_true(tmp_path)
