"""The engine of these tests runs on a fast machine, whatever this one is doing."""

import time
from itertools import count
from types import SimpleNamespace

import pytest

from rekindle.cache import entry_writer
from rekindle.engine import replies, step_time
from rekindle.engine.export import slot_saver, slot_writer
from rekindle.engine.reuse import restorer
from rekindle.engine.scheduler import batch_runner, compaction

TIMED = (
    *(entry_writer, replies, step_time, slot_saver, slot_writer),
    *(restorer, batch_runner, compaction),
)


@pytest.fixture(autouse=True)
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything that the engine measures take a microsecond. Waits take as long as they do."""
    ticks = count(1)
    fast = SimpleNamespace(
        perf_counter=lambda: next(ticks) / 1e6, monotonic=time.monotonic, time=time.time
    )
    for module in TIMED:
        monkeypatch.setattr(module, "time", fast)
