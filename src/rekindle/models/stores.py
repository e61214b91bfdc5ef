"""Stored prefixes and turns of one model, across its loads.

With a disk tier or a shared store, unloading the model frees their memory. Without one they
stay in memory, so that the next load of the model finds them.
"""

import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from rekindle.cache.disk.shares import divide
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.fingerprint import (
    DIGESTS_NAME,
    DigestFile,
    Identity,
    default_cache_dir,
    fingerprint,
    turn_fingerprint,
    weights_digest,
)
from rekindle.cache.memory.tier import machine_memory_bytes
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.responses.store import MemoryResponses, ResponseDatabase
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.transfers import SharedTransfers, shared_pool
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.cache.turns.shared import SharedTurns
from rekindle.config import CacheSettings
from rekindle.errors import StartupError
from rekindle.generation.model_state import StateTraits
from rekindle.generation.status import CacheCounters, CacheStatus
from rekindle.generation.stored_responses import ResponseStore
from rekindle.generation.stored_turns import TurnStore
from rekindle.models.source import ModelFile

IdentityOf = Callable[[StateTraits], Identity]


class MemoryShares:
    """One memory budget, in equal shares for all models with a cache in memory."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._members: dict[ModelStores, None] = {}

    def join(self, member: "ModelStores") -> int:
        """Add a model, and shrink the shares of the others. Return the share of the new one."""
        with self._lock:
            self._members[member] = None
            return self._divide()

    def leave(self, member: "ModelStores") -> None:
        with self._lock:
            self._members.pop(member, None)
            self._divide()

    def _divide(self) -> int:
        share = self._total_bytes // max(len(self._members), 1)
        for member in self._members:
            member.set_memory_budget(share)
        return share


class ModelStores:
    """The stores of one model. The engine thread opens the cache; any thread reads its status."""

    def __init__(
        self, settings: CacheSettings, shares: MemoryShares, shared: SharedStore | None
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._shares = shares
        self._lock = threading.Lock()
        self._cache: PrefixCache | None = None
        self._wake: Callable[[], None] | None = None  # wakes the engine; None: unloaded
        self._traits: StateTraits | None = None
        self._turns: TurnStore | None = None
        self._turns_of = ""
        self.past = CacheCounters()  # of closed caches

    @property
    def _is_lasting(self) -> bool:
        """Return True if stored entries outlive the process."""
        return bool(self._settings.cache_disk) or self._shared is not None

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in the context; 0: not known yet, or the model has no rows."""
        return self._traits.row_bytes if self._traits else 0

    def weights(self, file: ModelFile, on_progress: Callable[[int, int], None]) -> str:
        """Return an id that only these weights have. Raises StartupError."""
        if not self._is_lasting:
            return _file_identity(file)  # no need to read and hash gigabytes
        known = DigestFile(_directory(self._settings) / DIGESTS_NAME)
        return weights_digest(file.files, known=known, on_progress=on_progress)

    def open_turns(self, weights: str) -> TurnStore:
        """Return the turn store of these weights. Turns do not depend on the KV types."""
        if self._turns is None or self._turns_of != weights:
            self._turns = self._new_turns(weights)
            self._turns_of = weights
        return self._turns

    def open_cache(
        self, identity_of: IdentityOf, traits: StateTraits, notify: Callable[[], None]
    ) -> PrefixCache:
        root = fingerprint(identity_of(traits))
        memory_bytes = self._shares.join(self)
        with self._lock:
            self._wake = notify
            if self._cache is None or (self._cache.root, self._traits) != (root, traits):
                self._retire_cache()
                self._cache = self._new_cache(root, traits, memory_bytes, notify)
                self._traits = traits
            return self._cache

    def close(self) -> None:
        """Free the memory that the disk or the shared store backs. After the engine was closed."""
        with self._lock:
            self._wake = None
            if not self._is_lasting:
                return
            self._retire_cache()
        self._shares.leave(self)
        if self._turns is not None:
            self._turns.close()
            self._turns = None

    def set_memory_budget(self, n_bytes: int) -> None:
        with self._lock:
            if self._cache is None:
                return
            self._cache.set_memory_budget(n_bytes)
            if self._wake is not None:
                self._wake()  # the engine evicts what exceeds the budget
            else:
                self._cache.poll()

    def status(self) -> CacheStatus | None:
        """Return the status of the cache, also of an unloaded model whose cache is in memory."""
        cache = self._cache
        return cache.status() if cache is not None else None

    def _retire_cache(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            self.past += cache.counters

    def _new_turns(self, weights: str) -> TurnStore:
        mark = turn_fingerprint(weights)
        turns: TurnStore = MemoryTurns()
        if self._settings.cache_disk:
            shares = divide(self._settings.cache_disk)
            turns = TurnDatabase(
                _directory(self._settings),
                fingerprint=mark,
                max_bytes=shares.turns,
                wal_bytes=shares.turn_log,
            )
        return SharedTurns(turns, self._shared, fingerprint=mark) if self._shared else turns

    def _new_cache(
        self, root: bytes, traits: StateTraits, memory_bytes: int, notify: Callable[[], None]
    ) -> PrefixCache:
        settings = self._settings
        policy = CachePolicy(
            memory_bytes=memory_bytes,
            disk_bytes=settings.cache_disk,
            writes=WriteRules(
                bytes_per_hour=settings.cache_write_budget,
                policy=settings.cache_write_policy,
                min_tokens=settings.cache_min_tokens,
            ),
            may_recompute=settings.cache_recompute,
        )
        disk = None
        if settings.cache_disk and traits.off_because is None:
            tier = DiskTier(
                _directory(settings),
                fingerprint=root,
                budget_bytes=divide(settings.cache_disk).entries,
                is_leased=lambda key: cache.is_leased(key),
            )
            disk = DiskTransfers(tier, disk_pool(notify))
        shared = None
        if self._shared is not None and traits.off_because is None:
            shared = SharedTransfers(
                self._shared, shared_pool(notify), fingerprint=root, traits=traits
            )
        cache = PrefixCache(root, traits, policy, disk, shared)
        return cache


def cache_memory_bytes(settings: CacheSettings) -> int:
    if settings.cache_ram is not None:
        return settings.cache_ram
    return machine_memory_bytes() // 4


def response_store(settings: CacheSettings) -> ResponseStore:
    if not settings.cache_disk:
        return MemoryResponses()
    max_bytes = divide(settings.cache_disk).responses
    return ResponseDatabase(_directory(settings), max_bytes=max_bytes)


def _directory(settings: CacheSettings) -> Path:
    return settings.cache_dir or default_cache_dir()


def _file_identity(file: ModelFile) -> str:
    try:
        stats = [(str(path.resolve()), path.stat()) for path in file.files]
    except OSError as error:
        raise StartupError(f"The file {file.path} cannot be read: {error.strerror}.") from error
    states = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats]
    return sha256(repr(states).encode("utf-8", "surrogateescape")).hexdigest()
