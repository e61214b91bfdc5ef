"""Measure saving and restoring of rows, beside plain copies and reads of the same bytes.

    python -m bench.tiers [--quick]

A prompt of 4,096 tokens is computed once. Then its blocks are imported into a slot, exported,
written and read: by the parts alone, and by the engine for a request. The best of several rounds
counts, because other work on the machine only adds time.

Plain copies go to memory that was used before. A plain read goes to new memory, as all reads here
do; reading into one buffer is shown beside it. Cold means that the page cache was asked to drop
the files, which not every file system does.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.engine_run import (
    ask,
    context_params,
    drop_page_cache,
    engine,
    random_prompt,
    scratch_directory,
    timed,
    until_written,
)
from bench.report import BenchRow, Target, at_least, run_alone
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import CatalogueOpened, DiskTransfers, disk_pool
from rekindle.cache.entry import BLOCK_TOKENS, Entry, Key, checksum
from rekindle.cache.stores.read_queue import NOBODY_WAITS
from rekindle.cache.stores.transfers import Arrived
from rekindle.config.cache import CacheSettings
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import Bytes
from rekindle.generation.events import CacheSource
from rekindle.generation.model_state import Payload
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.source import ModelFile, resolve_model
from rekindle.server.serving import run_event_loop

NAME = "tiers"
N_TOKENS = 4096
QUICK_TOKENS = 512
N_ROUNDS = 7
QUICK_ROUNDS = 2
TOUCHED_BYTES = 2**28
OF_MEMCPY = at_least(50)
OF_READ = at_least(70)
T = TypeVar("T")


def main(*, quick: bool = False) -> list[BenchRow]:
    return measure(
        resolve_model(None),
        n_tokens=QUICK_TOKENS if quick else N_TOKENS,
        n_rounds=QUICK_ROUNDS if quick else N_ROUNDS,
    )


def measure(file: ModelFile, *, n_tokens: int, n_rounds: int) -> list[BenchRow]:
    assert n_tokens % BLOCK_TOKENS == 0
    with scratch_directory() as folder:
        seconds: dict[str, list[float]] = {}
        run_event_loop(_through_the_engine(file, folder / "cache", n_tokens, n_rounds, seconds))
        entries = _stored_entries(folder / "cache")
        payloads = [entry.payload for entry in entries]
        for _ in range(n_rounds):
            _copy(payloads, seconds)
        _through_a_slot(file, payloads, n_rounds, seconds)
        for number in range(n_rounds):
            _through_files(folder / f"round-{number}", entries, seconds)
    return _rows(seconds, sum(map(len, payloads)))


class Comparison(NamedTuple):
    plain: str
    measure: str
    target: Target | None = None


def _comparisons() -> dict[str, list[Comparison]]:
    memcpy, write = "percent_of_memcpy", "percent_of_plain_write"
    found = {
        "put into a slot": [Comparison("copy", memcpy, OF_MEMCPY)],
        "engine: restore from memory": [Comparison("copy", memcpy, OF_MEMCPY)],
        "take out of a slot": [Comparison("copy, new memory", "percent_of_copy_to_new_memory")],
        "disk tier: put": [Comparison("write, a file each", write)],
    }
    for state in ("warm", "cold"):
        one_buffer = Comparison(f"read, one buffer, {state}", "percent_of_read_to_one_buffer")
        plain = Comparison(f"read, {state}", "percent_of_plain_read", OF_READ)
        for case in ("disk tier: get", "transfers: read", "engine: restore from disk"):
            found[f"{case}, {state}"] = [plain, one_buffer]
    # What no restore from the page cache can exceed: docs/decisions/0014.
    for case in ("read, warm", "read, one buffer, warm", "checksum"):
        found[case] = [Comparison("copy", memcpy)]
    found["engine: restore from disk, warm"].append(Comparison("copy", memcpy))
    return found


def _rows(seconds: dict[str, list[float]], n_bytes: int) -> list[BenchRow]:
    best = {case: min(values) for case, values in seconds.items()}
    comparisons = _comparisons()
    rows = []
    for case, each in best.items():
        rows.append(BenchRow(NAME, case, "gigabytes_per_second", n_bytes / each / 1e9))
        rows.append(BenchRow(NAME, case, "ms", each * 1e3))
        for plain, measure, target in comparisons.get(case, []):
            rows.append(BenchRow(NAME, case, measure, 100 * best[plain] / each, target))
    return rows


async def _through_the_engine(
    file: ModelFile, directory: Path, n_tokens: int, n_rounds: int, seconds: dict[str, list[float]]
) -> None:
    prompt, other = random_prompt(1, n_tokens), random_prompt(2, 64)
    settings = CacheSettings(
        cache_dir=directory, cache_write_policy=WritePolicy.ALL, cache_write_budget=Bytes(0)
    )
    n_cells = n_tokens + 1024
    n_blocks = n_tokens // BLOCK_TOKENS
    async with engine(file, settings, n_cells=n_cells, n_slots=1) as loaded:
        await ask(loaded, prompt)
        await until_written(loaded, n_blocks)
        for _ in range(n_rounds):
            await ask(loaded, other)  # takes the only slot
            evaluated = (await ask(loaded, prompt)).evaluated
            assert {span.source for span in evaluated.spans} == {CacheSource.MEMORY}
            assert evaluated.n_cached == n_tokens
            _note(seconds, "engine: restore from memory", evaluated.restore_seconds)
    for state in ("warm", "cold"):
        for _ in range(n_rounds):
            if state == "cold":
                drop_page_cache(_entry_files(directory))
            async with engine(file, settings, n_cells=n_cells, n_slots=1) as loaded:
                await ask(loaded, other)
                _touch_memory()
                evaluated = (await ask(loaded, prompt)).evaluated
                assert {span.source for span in evaluated.spans} == {CacheSource.DISK}
                case = f"engine: restore from disk, {state}"
                _note(seconds, case, evaluated.restore_seconds)


def _through_a_slot(
    file: ModelFile, payloads: Sequence[Payload], n_rounds: int, seconds: dict[str, list[float]]
) -> None:
    model = GgufModel(file.path, gpu_layers=-1)
    params = context_params(n_cells=(len(payloads) + 4) * BLOCK_TOKENS, n_slots=1)
    with closing(model), closing(LlamaBackend(model, params)) as backend:
        backend.warm_up()

        def put() -> None:
            for number, payload in enumerate(payloads):
                start = number * BLOCK_TOKENS
                backend.import_rows(0, start, start + BLOCK_TOKENS, payload)

        def take() -> list[memoryview]:
            starts = range(0, len(payloads) * BLOCK_TOKENS, BLOCK_TOKENS)
            return [backend.export_rows(0, start, start + BLOCK_TOKENS) for start in starts]

        for _ in range(n_rounds):
            backend.clear_slot(0)
            _timed(seconds, "put into a slot", put)
            taken = _timed(seconds, "take out of a slot", take)
            assert taken == payloads


def _copy(payloads: Sequence[Payload], seconds: dict[str, list[float]]) -> None:
    sources = [np.frombuffer(payload, np.uint8) for payload in payloads]
    touched = [np.ones_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, touched, strict=True):
            np.copyto(target, source)

    _timed(seconds, "copy", copy)
    _timed(seconds, "checksum", lambda: [checksum(payload) for payload in payloads])
    _timed(seconds, "copy, new memory", lambda: [source.copy() for source in sources])


def _through_files(folder: Path, entries: Sequence[Entry], seconds: dict[str, list[float]]) -> None:
    folder.mkdir()
    payloads = [entry.payload for entry in entries]
    one, many = folder / "one", [folder / f"{number}" for number in range(len(entries))]
    _timed(seconds, "write, one file", lambda: _write(one, payloads))
    _timed(seconds, "write, a file each", lambda: _write_each(many, payloads))
    tier = _tier(folder / "cache", entries[0].header.fingerprint)
    keys = [entry.header.key for entry in entries]
    with closing(tier):
        tier.open()
        _timed(seconds, "disk tier: put", lambda: [tier.put(entry) for entry in entries])
        buffer = bytearray(max(map(len, payloads)))
        for state in ("warm", "cold"):
            kept = _entry_files(folder / "cache")
            if state == "cold":
                drop_page_cache([one, *many, *kept])
            _timed(seconds, f"read, one buffer, {state}", lambda: _read(one, buffer))
            if state == "cold":
                drop_page_cache([one])
            _timed(seconds, f"read, {state}", lambda: _read_and_keep(one, len(buffer)))
            _timed(seconds, f"read, a file each, {state}", lambda: _read_each(many, buffer))
            _timed(seconds, f"disk tier: get, {state}", lambda: list(map(tier.get, keys)))
    tier = _tier(folder / "cache", entries[0].header.fingerprint)
    transfers = DiskTransfers(tier, disk_pool(lambda: None))
    transfers.start()
    while not isinstance(transfers.pool.wait(10.0), CatalogueOpened):
        pass
    for state in ("warm", "cold"):
        if state == "cold":
            drop_page_cache(kept)
        _timed(seconds, f"transfers: read, {state}", lambda: _read_all(transfers, keys))
    transfers.close(10.0)


def _read_all(transfers: DiskTransfers, keys: Sequence[Key]) -> list[Entry]:
    for key in keys:
        transfers.read(key, NOBODY_WAITS)
    arrived = [transfers.pool.wait(10.0) for _ in keys]
    return [event.entry for event in arrived if isinstance(event, Arrived)]


def _tier(directory: Path, fingerprint: Key) -> DiskTier:
    return DiskTier(
        directory, fingerprint=fingerprint, budget_bytes=2**40, is_leased=lambda _key: False
    )


def _stored_entries(directory: Path) -> list[Entry]:
    """Return the complete blocks, in the order of their positions."""
    with closing(open_catalog(directory)) as catalog:
        headers = sorted((row.header for row in catalog.rows()), key=lambda header: header.start)
    blocks = [header for header in headers if header.n_tokens == BLOCK_TOKENS]
    tier = _tier(directory, blocks[0].fingerprint)
    return [tier.get(header.key) for header in blocks]


def _write(path: Path, payloads: Sequence[Payload]) -> None:
    with FileIO(path, "w") as file:
        for payload in payloads:
            file.write(payload)


def _write_each(paths: Sequence[Path], payloads: Sequence[Payload]) -> None:
    for path, payload in zip(paths, payloads, strict=True):
        _write(path, [payload])


def _read_each(paths: Sequence[Path], buffer: bytearray) -> None:
    for path in paths:
        _read(path, buffer)


def _read(path: Path, buffer: bytearray) -> None:
    with FileIO(path) as file:
        while file.readinto(buffer):
            pass


def _read_and_keep(path: Path, n_bytes: int) -> list[NDArray[np.uint8]]:
    kept: list[NDArray[np.uint8]] = []
    with FileIO(path) as file:
        while True:
            piece = np.empty(n_bytes, np.uint8)
            if not file.readinto(piece.data):
                return kept
            kept.append(piece)


def _entry_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def _touch_memory() -> None:
    """Touch memory first: a virtual machine may get it from the host on first use."""
    np.ones(TOUCHED_BYTES, np.uint8)


def _timed(seconds: dict[str, list[float]], case: str, action: Callable[[], T]) -> T:
    _touch_memory()
    result, taken = timed(action)
    _note(seconds, case, taken)
    return result


def _note(seconds: dict[str, list[float]], case: str, value: float) -> None:
    seconds.setdefault(case, []).append(value)


if __name__ == "__main__":
    run_alone(main)
