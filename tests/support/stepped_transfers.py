"""Transfers without threads, and a clock, both driven by the test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

from rekindle.cache import entry_writer, prefix_cache
from rekindle.cache.disk import residency as disk_residency
from rekindle.cache.disk import transfers as disk_transfers
from rekindle.cache.stores import back_store, read_queue, transfers
from rekindle.cache.stores.transfers import Lane, TransferPool
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
    entry_writer,
    back_store,
    disk_residency,
    disk_transfers,
    read_queue,
    transfers,
)


class Pace(NamedTuple):
    """How many jobs are done between two steps of the loop."""

    n_reads: int
    n_writes: int


AT_ONCE = Pace(_EVERYTHING, _EVERYTHING)


class SteppedPool(TransferPool):
    """A pool without threads: jobs are done in `work` only."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__("stepped", {}, notify, abandon_seconds=0.0)

    def work(self, pace: Pace) -> int:
        """Do as many jobs as the pace allows. Return how many were done."""
        return self._work(Lane.READ, pace.n_reads) + self._work(Lane.WRITE, pace.n_writes)

    def wait(self, timeout_seconds: float) -> object | None:
        self.work(AT_ONCE)
        return super().wait(0.0)

    def close(self, grace_seconds: float) -> bool:
        self.work(AT_ONCE)
        return True

    def _work(self, lane: Lane, n_jobs: int) -> int:
        jobs = self._jobs[lane]
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
