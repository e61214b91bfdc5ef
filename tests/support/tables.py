"""Count the tables, tasks, threads and files of this process."""

import asyncio
import functools
import gc
import os
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rekindle.chat.prompt import meaning

OURS = "rekindle."
CONTAINERS = (dict, list, set, deque, OrderedDict)
KIB = 2**10

# For tables whose bound a few hundred short requests would not reach.
SMALL_LIMITS: dict[str, Any] = {
    "rekindle.api.pipeline.MAX_NAMES_LOGGED": 4,
    "rekindle.api.dashboard.history.MAX_SAMPLES": 8,
    "rekindle.api.dashboard.history.N_BUCKETS": 2,
    "rekindle.cache.disk.residency.MAX_FAILED": 8,
    "rekindle.cache.names.MAX_NAMES": 8,
    "rekindle.cache.responses.store.RECENT_BYTES": 16 * KIB,
    "rekindle.chat.prompt.meaning._known": functools.lru_cache(8)(meaning._canonical),
    "rekindle.chat.accounts.recent_prompts.MAX_PROMPTS": 16,
    "rekindle.chat.accounts.sessions.Sessions.__init__.__kwdefaults__": {"max_sessions": 16},
    "rekindle.chat.prompt.token_run.MAX_KNOWN_BYTES": 32 * KIB,
    "rekindle.chat.prompt.turn_memory.MAX_DECODED_BYTES": 64 * KIB,
    "rekindle.observe.telemetry.MAX_FIELD_NAMES": 8,
}
# One for each length that a block may have: 256, and they come late.
BY_LENGTH = frozenset({"StateAccess._bytes_of_rows", "EntryWriter._payload_sizes"})


@contextmanager
def small_limits() -> Iterator[None]:
    """Lower the bounds of tables in servers assembled meanwhile, so that they fill up soon."""
    with ExitStack() as stack:
        for name, limit in SMALL_LIMITS.items():
            stack.enter_context(patch(name, limit))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    anonymous_bytes: int
    n_files: int  # descriptors
    n_threads: int
    n_tasks: int
    n_series: int  # of /metrics
    sqlite_bytes: int
    tables: dict[str, int]  # "Class.attribute" -> what it holds, over all instances

    @property
    def n_in_tables(self) -> int:
        return sum(self.tables.values())


def look(metrics: str, cache_dir: Path) -> Look:
    gc.collect()
    return Look(
        anonymous_bytes=anonymous_bytes(),
        n_files=len(os.listdir("/proc/self/fd")),
        n_threads=threading.active_count(),
        n_tasks=_n_tasks(),
        n_series=sum(not line.startswith("#") for line in metrics.splitlines()),
        sqlite_bytes=sum(path.stat().st_size for path in cache_dir.glob("*.sqlite3*")),
        tables=table_sizes(),
    )


def anonymous_bytes(process: int | str = "self") -> int:
    """Return the anonymous memory by the kernel's count, without mapped files."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text("ascii")
    [kilobytes] = re.findall(r"^Anonymous:\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) * KIB


def table_sizes() -> dict[str, int]:
    """Return the sizes of all our containers and caches, and the objects of each class.

    Objects frozen by `gc.freeze` are included.
    """
    gc.unfreeze()
    sizes: Counter[str] = Counter()
    for owner in gc.get_objects():
        if isinstance(owner, functools._lru_cache_wrapper):
            if _is_ours(owner):
                sizes[f"{owner.__module__}.{owner.__name__}"] += owner.cache_info().currsize
        elif _is_ours(type(owner)):
            name = type(owner).__name__
            sizes[name] += 1
            for attribute, value in _attributes(owner):
                if isinstance(value, CONTAINERS) and f"{name}.{attribute}" not in BY_LENGTH:
                    sizes[f"{name}.{attribute}"] += len(value)
    return dict(sizes)


def _is_ours(code: Any) -> bool:
    # Some built-in classes have a descriptor here.
    module = code.__module__
    return isinstance(module, str) and module.startswith(OURS)


def _attributes(owner: object) -> Iterator[tuple[str, Sized | Any]]:
    for base in type(owner).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(owner, name):
                yield name, getattr(owner, name)
    yield from getattr(owner, "__dict__", {}).items()


def _n_tasks() -> int:
    """Return the number of tasks of every event loop."""
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    return sum(not task.done() for task in tasks)
