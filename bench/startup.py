"""How long a server takes to answer when much is stored: a simulated store, a real start.

    python -m bench.startup [--quick]

The catalogue has a row for each entry and the directory a sparse file, so 100 GB take little.
All times count from the start of the process; CPU time is steadier where the machine is busy.
Python's compiled files are kept between starts, as those of an installed package are: where they
may not be written, every start would compile all of it.
Alone it also measures a million entries, which takes minutes to make.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.engine_run import ask, engine, random_prompt, scratch_directory
from bench.report import Row, at_most, run_alone
from bench.simulated_store import headers
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import Header, Key
from rekindle.config import CacheSettings
from rekindle.models.source import resolve_model
from rekindle.server import run_event_loop

NAME = "startup"
N_STARTS = 3
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.02
BATCH_ENTRIES = 10_000
LIMIT_SECONDS = at_most(2)


class Store(NamedTuple):
    case: str
    n_entries: int
    payload_bytes: int


EMPTY = Store("empty", 0, 0)
SMALL = Store("1,000 entries", 1_000, 6_000_000)
STORES = (
    EMPTY,
    SMALL,
    Store("100 GB: 3,000 of 34 MB", 3_000, 34_000_000),
    Store("100 GB: 17,000 of 6 MB", 17_000, 6_000_000),
    Store("100,000 entries", 100_000, 1_000_000),
)
LARGEST = Store("1,000,000 entries", 1_000_000, 100_000)


class Started(NamedTuple):
    """Seconds since the process was started."""

    healthy: float
    answered: float
    listed: float
    answered_cpu: float  # what it computed for that, on all cores


def main(*, quick: bool = False) -> list[Row]:
    return measure((EMPTY, SMALL) if quick else STORES, n_starts=1 if quick else N_STARTS)


def measure(stores: tuple[Store, ...], *, n_starts: int) -> list[Row]:
    rows: list[Row] = []
    for store in stores:
        with scratch_directory() as folder:
            n_own = _fill(folder / "cache", store)
            _start(folder, n_own)  # compiles
            starts = [_start(folder, n_own) for _ in range(n_starts)]
        for measure, seconds in zip(Started._fields, zip(*starts, strict=True), strict=True):
            target = LIMIT_SECONDS if measure == "answered" else None
            rows.append(Row(NAME, store.case, f"{measure}_seconds", median(seconds), target))
    return rows


def _fill(directory: Path, store: Store) -> int:
    """How many entries there are: the simulated ones, and some that a real server left."""
    run_event_loop(_use_once(directory))
    files = EntryFiles(directory)
    with closing(open_catalog(directory)) as catalog:
        [root] = {row.header.fingerprint for row in catalog.rows()}
        for batch in _batches(store, root):
            for header in batch:
                _make_sparse(files.path(header.key), header)
            catalog.add(batch)
        return len(catalog.all_keys())


async def _use_once(directory: Path) -> None:
    """So that the weights are known, and the mark of everything that is stored of them."""
    settings = CacheSettings(cache_dir=directory)
    async with engine(resolve_model(None), settings, n_cells=1024, n_slots=1) as loaded:
        await ask(loaded, random_prompt(1, 128))


def _batches(store: Store, root: Key) -> Iterator[list[Header]]:
    made = headers(store.n_entries, root=root, payload_bytes=store.payload_bytes)
    while batch := list(islice(made, BATCH_ENTRIES)):
        yield batch


def _make_sparse(path: Path, header: Header) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.truncate(descriptor, header.file_bytes)
    os.close(descriptor)


def _start(folder: Path, n_entries: int) -> Started:
    began = time.perf_counter()
    with _server(folder) as (url, process):
        healthy = _seconds_until(lambda: _get(f"{url}/health") is not None, began)
        _answer(url)
        answered = time.perf_counter() - began
        answered_cpu = _cpu_seconds(process)
        listed = _seconds_until(lambda: _n_listed(url) >= n_entries, began)
    return Started(healthy, answered, listed, answered_cpu)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, int]]:
    port = _free_port()
    directory = str(folder / "cache")
    arguments = ["--cache-dir", directory, "--cache-disk", "1TiB", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "serve", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(folder / "compiled"),
    )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def _environment(compiled: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, "PYTHONPYCACHEPREFIX": str(compiled)}


def _cpu_seconds(process: int) -> float:
    """Steadier than the clock where the machine is busy; 0 where there is no /proc."""
    try:
        status = Path(f"/proc/{process}/stat").read_text("ascii")
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _seconds_until(condition: Callable[[], bool], began: float) -> float:
    while not condition():
        if time.perf_counter() - began > PATIENCE_SECONDS:
            raise TimeoutError("the server does not get there")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - began


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return str(reply.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def _answer(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=PATIENCE_SECONDS).close()


def _n_listed(url: str) -> int:
    found = re.search(
        r'^rekindle_cache_entries{tier="disk"} (\S+)$', _get(f"{url}/metrics") or "", re.M
    )
    return int(float(found[1])) if found else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _with_the_largest(*, quick: bool) -> list[Row]:
    return main(quick=quick) + ([] if quick else measure((LARGEST,), n_starts=1))


if __name__ == "__main__":
    run_alone(_with_the_largest)
