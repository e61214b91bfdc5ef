"""The parts of a World: sizes, a model, and a disk that can fail."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rekindle.cache.disk.entry_file import DISK_BLOCK_BYTES
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Entry, Key
from rekindle.cache.memory.tier import size_in_memory
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy
from rekindle.config.choices import WritePolicy
from rekindle.errors import TierFailed
from rekindle.generation.events import StopCause
from tests.support.audited_backend import AuditedBackend, Ledger, Scored

ROOT = b"r" * 16
ROOMY_ENTRIES = 1000  # more than a World ever makes
CATALOG_BYTES = 150_000  # of a disk budget, that go to the catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    n_slots: int = 2
    n_cells: int = 2048
    n_ubatch: int = 256
    memory_entries: int = ROOMY_ENTRIES  # the budget, in entries of the usual size
    disk_entries: int | None = ROOMY_ENTRIES  # None: no disk
    write_policy: WritePolicy = WritePolicy.ALL
    min_tokens: int = 0
    written_per_hour: int = 0  # entries; 0: no limit
    min_path_checkpoints: int = 16
    may_recompute: bool = False
    is_calm: bool = False  # no files are damaged and no calls fail

    @property
    def keeps_all(self) -> bool:
        """Whether every save is written and never evicted."""
        is_roomy = self.disk_entries is not None and self.disk_entries >= ROOMY_ENTRIES
        writes_all = self.write_policy is WritePolicy.ALL and not self.written_per_hour
        return is_roomy and writes_all and self.min_tokens == 0

    def policy(self, entry_bytes: int) -> CachePolicy:
        writes = WriteRules(
            bytes_per_hour=self.written_per_hour * entry_bytes,
            policy=self.write_policy,
            min_tokens=self.min_tokens,
        )
        return CachePolicy(
            memory_bytes=self.memory_entries * size_in_memory(entry_bytes),
            disk_bytes=self.disk_bytes(entry_bytes),
            writes=writes,
            may_recompute=self.may_recompute,
        )

    def disk_bytes(self, entry_bytes: int) -> int:
        if self.disk_entries is None:
            return 0
        return CATALOG_BYTES + self.disk_entries * (entry_bytes + 2 * DISK_BLOCK_BYTES)


class Subject(Protocol):
    """A model, as the world sees it."""

    entry_bytes: int  # of a block or a checkpoint, whichever is larger

    def new_backend(self, setup: Setup, ledger: Ledger) -> AuditedBackend: ...

    def text(self, seed: int, n_tokens: int) -> list[int]: ...

    def check_reply(
        self, prompt: list[int], reply: list[int], end: StopCause | None, scored: list[Scored]
    ) -> None:
        """Check that the reply equals a cold one. `end` is None for a cut reply."""
        ...


class FlakyDiskTier(DiskTier):
    n_failing_calls = 0

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        is_leased: Callable[[Key], bool],
        now: Callable[[], float],
    ) -> None:
        super().__init__(
            directory, fingerprint=ROOT, budget_bytes=budget_bytes, is_leased=is_leased, now=now
        )

    def get(self, key: Key) -> Entry:
        self._fail_if_told()
        return super().get(key)

    def put(self, entry: Entry) -> list[Key]:
        self._fail_if_told()
        return super().put(entry)

    def _fail_if_told(self) -> None:
        if self.n_failing_calls:
            self.n_failing_calls -= 1
            raise TierFailed("told to")
