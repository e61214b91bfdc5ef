"""Turns and counters of one model across its loads, and its share of the memory for prefixes."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from rekindle.cache.disk.shares import divide
from rekindle.cache.disk.trust import trouble_with
from rekindle.cache.fingerprint import (
    DIGESTS_NAME,
    DigestFile,
    cache_directory,
    turn_fingerprint,
    weights_digest,
)
from rekindle.cache.memory.tier import machine_memory_bytes
from rekindle.cache.responses.store import MemoryResponses, ResponseDatabase
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.cache.turns.shared import SharedTurns
from rekindle.config.cache import CacheSettings
from rekindle.errors import StartupError
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.status import CacheCounters
from rekindle.generation.stored_responses import ResponseStore
from rekindle.generation.stored_turns import TurnStore
from rekindle.models.source import ModelFile

_log = logging.getLogger(__name__)


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
    """Data of one model that this process keeps across its loads: turns, counters, a memory share.

    The stored prefixes are in the process of its engine.
    """

    def __init__(
        self,
        settings: CacheSettings,
        shares: MemoryShares,
        shared: SharedStore | None,
        forgotten: Tombstones,
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._forgotten = forgotten
        self._shares = shares
        self._turns: TurnStore | None = None
        self._turns_of = ""
        self._set_budget: Callable[[int], None] | None = None  # of the engine; None: unloaded
        self.past = CacheCounters()  # of closed caches
        self.past_restarts: Counter[str] = Counter()  # of closed engines, by cause

    @property
    def _is_lasting(self) -> bool:
        """Return True if stored entries outlive the process."""
        return bool(self._settings.cache_disk) or self._shared is not None

    def weights(self, file: ModelFile, on_progress: Callable[[int, int], None]) -> str:
        """Return an id that only these weights have. Raises StartupError."""
        if not self._is_lasting:
            return state_of(file.files)  # no need to read and hash gigabytes
        known = DigestFile(_directory(self._settings) / DIGESTS_NAME)
        return weights_digest(file.files, known=known, on_progress=on_progress)

    def adapters(self, paths: Sequence[Path]) -> tuple[str, ...]:
        """Return an id for the content of each LoRA adapter. Raises StartupError."""
        if not self._is_lasting:
            return tuple(state_of([path]) for path in paths)
        known = DigestFile(_directory(self._settings) / DIGESTS_NAME)
        return tuple(weights_digest([path], known=known, on_progress=None) for path in paths)

    def open_turns(self, weights: str) -> TurnStore:
        """Return the turn store of these weights. Turns do not depend on the KV types."""
        if self._turns is None or self._turns_of != weights:
            self._turns = self._new_turns(weights)
            self._turns_of = weights
        return self._turns

    def forget(self, tombstone: Tombstone) -> int:
        """Delete the turns that the deletion covers. Return how many. Raises TierFailed."""
        return self._turns.forget(tombstone) if self._turns is not None else 0

    def memory_share(self) -> int:
        """Return the bytes of memory that this model's stored prefixes may take."""
        return self._shares.join(self)

    def follow_budget(self, set_budget: Callable[[int], None]) -> None:
        """Call `set_budget` whenever the share of memory changes."""
        self._set_budget = set_budget

    def set_memory_budget(self, n_bytes: int) -> None:
        if self._set_budget is not None:
            self._set_budget(n_bytes)

    def close(self, counters: CacheCounters, restarts: Mapping[str, int]) -> None:
        """Give the share of memory back. After the engine was closed, with its last counts."""
        self.past += counters
        self.past_restarts.update(restarts)
        self._set_budget = None
        self._shares.leave(self)
        if self._turns is not None and self._is_lasting:
            self._turns.close()
            self._turns = None

    def _new_turns(self, weights: str) -> TurnStore:
        mark = turn_fingerprint(weights)
        turns: TurnStore = MemoryTurns(self._forgotten)
        if self._settings.cache_disk:
            shares = divide(self._settings.cache_disk)
            turns = TurnDatabase(
                _directory(self._settings),
                fingerprint=mark,
                forgotten=self._forgotten,
                max_bytes=shares.turns,
                wal_bytes=shares.turn_log,
            )
        if self._shared is None:
            return turns
        return SharedTurns(turns, self._shared, fingerprint=mark, forgotten=self._forgotten)


def cache_memory_bytes(settings: CacheSettings) -> int:
    if settings.cache_ram is not None:
        return settings.cache_ram
    return machine_memory_bytes() // 4


def stored_in(settings: CacheSettings) -> Path | None:
    """Return the cache directory; None: nothing is stored on disk."""
    return _directory(settings) if settings.cache_disk else None


def response_store(settings: CacheSettings, forgotten: Tombstones) -> ResponseStore:
    if not settings.cache_disk:
        return MemoryResponses(forgotten)
    max_bytes = divide(settings.cache_disk).responses
    return ResponseDatabase(_directory(settings), forgotten=forgotten, max_bytes=max_bytes)


def check_cache_directory(settings: CacheSettings) -> None:
    """Warn if other users can write to the cache directory, or raise StartupError if strict."""
    if not settings.cache_disk:
        return
    if trouble := trouble_with(_directory(settings)):
        if settings.strict:
            raise StartupError(f"The cache directory is not private: {trouble}")
        _log.warning("cache: the directory is not private: %s", trouble)


def _directory(settings: CacheSettings) -> Path:
    return cache_directory(settings.cache_dir)


def state_of(paths: Sequence[Path]) -> str:
    """Return a text that differs when one of the files was replaced or rewritten."""
    try:
        stats = [(str(path.resolve()), path.stat()) for path in paths]
    except OSError as error:
        raise StartupError(f"The file {paths[0]} cannot be read: {error.strerror}.") from error
    states = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats]
    return sha256(repr(states).encode("utf-8", "surrogateescape")).hexdigest()
