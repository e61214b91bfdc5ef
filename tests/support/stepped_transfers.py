"""Transfers without threads, and a clock, both driven by the test."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import NamedTuple
from unittest.mock import patch

from rekindle.cache import entry_writer as keeper
from rekindle.cache import prefix_cache
from rekindle.cache.disk import residency as disk_store
from rekindle.cache.disk import transfers
from rekindle.cache.disk.transfers import Event, Job, Transfers
from rekindle.cache.stores import back_store
from rekindle.engine import loop, reports, sequence
from rekindle.engine.export import slot_saver
from rekindle.engine.reuse import placement, prefix_finder, restorer
from rekindle.engine.scheduler import admission, batch_runner, run_queue

_EVERYTHING = 1_000_000
_TIMED = (
    loop,
    admission,
    batch_runner,
    reports,
    run_queue,
    slot_saver,
    prefix_finder,
    placement,
    restorer,
    sequence,
    prefix_cache,
    keeper,
    back_store,
    disk_store,
    transfers,
)


class Pace(NamedTuple):
    """How many jobs are done between two steps of the loop."""

    n_reads: int
    n_writes: int


AT_ONCE = Pace(_EVERYTHING, _EVERYTHING)


class SteppedTransfers(Transfers):
    """Transfers without threads: jobs are done in `work` only."""

    def start(self) -> None:
        self._writes.put(self._open)

    def work(self, pace: Pace) -> int:
        """Do as many jobs as the pace allows. Return how many were done."""
        return _work(self._reads, pace.n_reads) + _work(self._writes, pace.n_writes)

    def wait(self, timeout_seconds: float) -> Event | None:
        self.work(AT_ONCE)
        return super().wait(0.0)

    def close(self, grace_seconds: float) -> None:
        self.work(AT_ONCE)
        self.crash()

    def crash(self) -> None:
        """Close the tier; pending jobs are lost."""
        self._quietly(self._tier.close)


def _work(jobs: SimpleQueue[Job | None], n_jobs: int) -> int:
    n_done = 0
    while n_done < n_jobs and not jobs.empty():
        job = jobs.get()
        assert job is not None
        job()
        n_done += 1
    return n_done


class Clock:
    """Stands in for the module `time`. Each reading advances the clock a little."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 1e-4
        return self.now

    monotonic = perf_counter = time

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Measured times decide what is evicted first, so they must be the same in every run."""
        with ExitStack() as patches:
            for module in _TIMED:
                patches.enter_context(patch.object(module, "time", self))
            yield
