"""A shared store in memory for engine tests. The test decides when jobs are done."""

from collections import deque
from collections.abc import Callable

from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.transfers import SharedTransfers
from rekindle.cache.stores.transfers import Job, Lane, TransferPool
from rekindle.generation.model_state import StateTraits
from tests.support.caches import ROOT
from tests.support.memory_objects import MemoryObjects, memory_store


class HeldPool(TransferPool):
    """Without threads. Jobs run at once, but for those of lanes that are held."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__("held", {}, notify, abandon_seconds=0.0)
        self._held_lanes: set[Lane] = set()
        self._held: deque[Job] = deque()

    def hold(self, lane: Lane) -> None:
        self._held_lanes.add(lane)

    def let_go(self, lane: Lane) -> None:
        self._held_lanes.discard(lane)

    def submit(self, lane: Lane, job: Job) -> None:
        if lane in self._held_lanes:
            self._held.append(job)
        else:
            job()

    def close(self, grace_seconds: float) -> bool:
        self.work()
        return True

    @property
    def n_held(self) -> int:
        return len(self._held)

    def work(self) -> int:
        """Do the jobs that are held. Return how many there were."""
        n_jobs = 0
        while self._held:
            self._held.popleft()()
            n_jobs += 1
        return n_jobs


class SharedHouse:
    """One store, and a connection for each server."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.store: SharedStore = memory_store(self.objects)
        self.pools: list[HeldPool] = []

    def door(self, traits: StateTraits, notify: Callable[[], None]) -> SharedTransfers:
        pool = HeldPool(notify)
        self.pools.append(pool)
        return SharedTransfers(self.store, pool, fingerprint=ROOT, traits=traits)
