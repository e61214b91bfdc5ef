"""Transfers whose jobs the test does, and a clock that the test moves."""

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
from rekindle.engine import loop, reports
from rekindle.engine.export import slot_saver
from rekindle.engine.reuse import warm_start
from rekindle.engine.scheduler import admission, batch_runner, roster

_EVERYTHING = 1_000_000
_TIMED = (
    loop,
    admission,
    batch_runner,
    reports,
    roster,
    slot_saver,
    warm_start,
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
    """Transfers without threads: disk jobs run only in `work`."""

    def start(self) -> None:
        self._writes.put(self._open)

    def work(self, pace: Pace) -> int:
        """Do up to `pace` jobs and return how many there were."""
        return _work(self._reads, pace.n_reads) + _work(self._writes, pace.n_writes)

    def wait(self, timeout_seconds: float) -> Event | None:
        self.work(AT_ONCE)
        return super().wait(0.0)

    def close(self, grace_seconds: float) -> None:
        self.work(AT_ONCE)
        self.crash()

    def crash(self) -> None:
        """Drop the pending jobs."""
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
    """Replaces the module `time`. Each look at the clock advances it a little."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 1e-4
        return self.now

    monotonic = perf_counter = time

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the clock. Measured times decide the order of eviction, so they must repeat."""
        with ExitStack() as patches:
            for module in _TIMED:
                patches.enter_context(patch.object(module, "time", self))
            yield
