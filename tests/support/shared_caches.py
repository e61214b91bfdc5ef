"""A shared store in memory for engine tests. The test decides when jobs are done."""

from collections import deque
from collections.abc import Callable

from rekindle.cache.entry import Entry, Key
from rekindle.cache.prefix_cache import SharedAccess
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.tier import SharedTier
from rekindle.cache.shared.transfers import Inquiry, SharedTransfers
from rekindle.generation.model_state import StateTraits
from tests.support.caches import ROOT
from tests.support.memory_objects import MemoryObjects, memory_store


class HeldTransfers(SharedTransfers):
    """Without threads. What is not held is done at once."""

    holds_writes = holds_reads = holds_probes = False

    def start(self) -> None:
        self._held: deque[Callable[[], None]] = deque()

    def write(self, entry: Entry) -> None:
        self._do(lambda: self._write(entry), is_held=self.holds_writes)

    def read(self, key: Key) -> None:
        self._do(lambda: self._read(key), is_held=self.holds_reads)

    def probe(self, inquiry: Inquiry) -> None:
        self._do(lambda: self._probe(inquiry), is_held=self.holds_probes)

    def touch(self, keys: list[Key]) -> None:  # type: ignore[override]
        self._quietly(lambda: self._touch(keys))

    def drop(self, keys: list[Key]) -> None:  # type: ignore[override]
        self._quietly(lambda: self._tier.drop(keys))

    def close(self, grace_seconds: float) -> None:
        self.work()

    @property
    def n_held(self) -> int:
        return len(self._held)

    def work(self) -> int:
        """Do the held jobs and return their number."""
        n_jobs = 0
        while self._held:
            self._held.popleft()()
            n_jobs += 1
        return n_jobs

    def _do(self, job: Callable[[], None], *, is_held: bool) -> None:
        if is_held:
            self._held.append(job)
        else:
            job()


class SharedHouse:
    """One store, and a connection for each server."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        self.store: SharedStore = memory_store(self.objects)
        self.transfers: list[HeldTransfers] = []

    def door(self, traits: StateTraits, notify: Callable[[], None]) -> SharedAccess:
        transfers = HeldTransfers(
            SharedTier(self.store, fingerprint=ROOT),
            notify,
            has_rows=traits.has_rows,
            has_checkpoints=traits.resumes_at_checkpoints,
        )
        self.transfers.append(transfers)
        return SharedAccess(self.store, transfers)
