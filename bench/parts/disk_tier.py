"""Measure the disk tier: puts, gets, touches, a start, a rebuild, and puts that evict.

    python -m bench.parts.disk_tier DIRECTORY [N_ENTRIES [PAYLOAD_BYTES]]

DIRECTORY must not exist and is deleted at the end. Reads come from the page cache.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console

from bench.engine_run import timed
from bench.report import percentiles_ms
from bench.simulated_store import CHAIN_BLOCKS, N_VOCAB, chain
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import BLOCK_TOKENS, Entry, Header, Key

MODEL = b"m" * 16
TOUCHED_AT_ONCE = 20
CONSOLE = Console(highlight=False)
T = TypeVar("T")


def main(directory: Path, n_entries: int = 10_000, payload_bytes: int = 600_000) -> None:
    directory.mkdir(parents=True)
    try:
        _measure(directory, list(_headers(n_entries, payload_bytes, seed=1)))
    finally:
        shutil.rmtree(directory)


def _measure(directory: Path, headers: list[Header]) -> None:
    payload = np.random.default_rng(1).bytes(headers[0].payload_bytes)
    keys = [header.key for header in headers]
    n_bytes = sum(header.file_bytes for header in headers)
    with closing(_tier(directory, 2 * n_bytes + 2**24)) as tier:
        tier.open()
        _each("put", lambda header: tier.put(Entry(header, payload)), headers, n_bytes)
        _each("get", tier.get, keys, n_bytes)
        groups = [keys[n : n + TOUCHED_AT_ONCE] for n in range(0, len(keys), TOUCHED_AT_ONCE)]
        _each(f"touch of {TOUCHED_AT_ONCE}", tier.touch, groups)
        used_bytes = tier.n_bytes
    CONSOLE.print(f"usage beyond the size of the files: {used_bytes / n_bytes - 1:.2%}")
    with closing(_tier(directory, 2 * n_bytes)) as tier:
        _each("open", lambda _: tier.open(), [None])
        _each("headers", lambda _: list(tier.rows()), [None])
    (directory / "catalog.sqlite3").unlink()
    with closing(_tier(directory, used_bytes)) as tier:
        _each("rebuild", lambda _: tier.open(), [None])
        others = list(_headers(len(headers) // 2, headers[0].payload_bytes, seed=2))
        put = "put that evicts"
        _each(put, lambda header: tier.put(Entry(header, payload)), others, n_bytes // 2)


def _each(
    name: str, action: Callable[[T], object], items: Sequence[T], n_bytes: int | None = None
) -> None:
    seconds = [timed(partial(action, item))[1] for item in items]
    p50, p99 = percentiles_ms(seconds)
    speed = f", {n_bytes / sum(seconds) / 2**20:.0f} MiB/s" if n_bytes is not None else ""
    CONSOLE.print(f"{name}: p50 {p50:.2f}, p99 {p99:.2f}, max {max(seconds) * 1000:.2f} ms{speed}")


def _tier(directory: Path, budget_bytes: int) -> DiskTier:
    def is_leased(key: Key) -> bool:
        return False

    return DiskTier(directory, fingerprint=MODEL, budget_bytes=budget_bytes, is_leased=is_leased)


def _headers(n_entries: int, payload_bytes: int, *, seed: int) -> Iterator[Header]:
    """Yield chains of 64 blocks without a common prefix."""
    noise = np.random.default_rng(seed)
    while n_entries > 0:
        n_blocks = min(n_entries, CHAIN_BLOCKS)
        tokens = noise.integers(0, N_VOCAB, n_blocks * BLOCK_TOKENS, np.uint32)
        yield from chain(MODEL, tokens.astype(">u4").tobytes(), payload_bytes=payload_bytes)
        n_entries -= n_blocks


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
