"""Stored entries: the start that lists them, a lookup among them, the memory of their index."""

import gc
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from bench.curves.curve import (
    BYTES,
    FLAT,
    LINEAR,
    MILLISECONDS,
    Curve,
    Measured,
    cpu_milliseconds,
    curves_of,
)
from bench.engine_run import scratch_directory
from bench.lookup import MODEL, TRAITS, EngineLookup, prompt_of, stored_blocks
from bench.simulated_store import headers, write_store
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.index import PrefixIndex, Where
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.config.choices import WritePolicy

NAME = "entries"
ABOUT = "stored entries (blocks of 256 tokens)"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (100, 500)
PROMPT_TOKENS = 8_192
PAYLOAD_BYTES = 100_000  # of sparse files
POLL_SECONDS = 0.001
START, FIND, INDEX = "start", "find a prompt of 8,192 tokens", "index"
MEASURES = (
    Measured(START, MILLISECONDS, LINEAR),
    Measured(FIND, MILLISECONDS, FLAT, "the table no longer fits the processor's caches"),
    Measured(INDEX, BYTES, LINEAR),
)


def measure(sizes: Sequence[int]) -> list[Curve]:
    values = {n_entries: _measured(n_entries) for n_entries in sizes}
    return curves_of(NAME, MEASURES, values)


def _measured(n_entries: int) -> dict[str, float]:
    with scratch_directory() as folder:
        prompt = prompt_of(PROMPT_TOKENS, seed=1)
        own = stored_blocks(prompt)
        others = headers(n_entries - len(own), root=MODEL, payload_bytes=PAYLOAD_BYTES)
        write_store(folder, chain(own, others))
        with closing(_Cache(folder)) as opened:
            start_ms = opened.start(n_entries)
            engine = EngineLookup(opened.cache, prompt)
            find_ms = cpu_milliseconds(engine.find)
    return {START: start_ms, FIND: find_ms, INDEX: index_bytes(n_entries)}


def index_bytes(n_entries: int) -> float:
    """Return what Python allocates for an index of so many entries."""
    index = PrefixIndex(has_rows=True, has_checkpoints=False)
    gc.collect()
    tracemalloc.start()
    try:
        for header in headers(n_entries, root=MODEL, payload_bytes=PAYLOAD_BYTES):
            index.add(header, Where.DISK)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


class _Cache:
    """A prefix cache over a folder that holds a catalogue and sparse files."""

    def __init__(self, directory: Path) -> None:
        rules = WriteRules(bytes_per_hour=0, policy=WritePolicy.REUSED, min_tokens=0)
        policy = CachePolicy(memory_bytes=0, disk_bytes=2**50, writes=rules, may_recompute=False)
        tier = DiskTier(
            directory, fingerprint=MODEL, budget_bytes=2**50, is_leased=lambda _key: False
        )
        transfers = DiskTransfers(tier, disk_pool(lambda: None))
        self.cache = PrefixCache(MODEL, TRAITS, policy, transfers, None)

    def start(self, n_entries: int) -> float:
        """Start, and return the CPU time until every entry is listed."""
        began = time.process_time()
        self.cache.start()
        while self.cache.status().tiers[-1].n_entries < n_entries:
            if not self.cache.poll():
                time.sleep(POLL_SECONDS)
        milliseconds = (time.process_time() - began) * 1e3
        gc.freeze()  # as the server does once its index is read
        return milliseconds

    def close(self) -> None:
        self.cache.close(10.0)
        gc.unfreeze()
