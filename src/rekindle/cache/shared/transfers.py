"""The shared store's jobs on the transfer threads.

The store may be far away: several reads run at once, and lookups have threads of their own.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.entry import Key
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.heads import Head
from rekindle.cache.shared.tier import KnownEntry, LookupResult, SharedTier
from rekindle.cache.stores.transfers import STOPPING, EntryTransfers, Lane, TransferPool
from rekindle.errors import CacheError, TierFailed
from rekindle.generation.model_state import StateTraits

_log = logging.getLogger(__name__)

N_READERS = 4  # picked; one connection alone does not fill a network
N_LOOKUP_THREADS = 2  # picked
ABANDON_SECONDS = 1.5  # grace for calls under way after queued jobs are dropped; about a timeout


@dataclass(slots=True, eq=False, kw_only=True)
class SharedLookup:
    """A lookup of the tokens of a prompt that follow a known block.

    `is_over`: answered, or it took too long. Only the engine thread uses this and the deadline.
    """

    namespace: str
    parent: Key  # of the last whole block that is known, or the root
    start: int
    tokens: bytes
    deadline: float
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class LookedUp:
    lookup: SharedLookup
    heads: list[Head]  # parents first
    n_corrupt: int  # objects that failed a check and were removed
    trouble: str | None


def shared_pool(notify: Callable[[], None]) -> TransferPool:
    n_threads = {Lane.WRITE: 1, Lane.READ: N_READERS, Lane.LOOKUP: N_LOOKUP_THREADS}
    return TransferPool("shared", n_threads, notify, abandon_seconds=ABANDON_SECONDS)


class SharedTransfers(EntryTransfers):
    def __init__(
        self, store: SharedStore, pool: TransferPool, *, fingerprint: Key, traits: StateTraits
    ) -> None:
        # The engine thread changes it. Transfer threads look up single entries.
        self.known: BoundedCache[Key, KnownEntry] = BoundedCache()
        tier = SharedTier(
            store, fingerprint=fingerprint, known=self.known.peek, row_bytes=traits.row_bytes
        )
        # The store's circuit breaker already spaces out calls after a failure.
        super().__init__(tier, pool, retry_seconds=0.0)
        self.store = store
        self._tier: SharedTier = tier
        self._traits = traits

    @property
    def stores_checkpoints(self) -> bool:
        """Whether other servers look for them.

        They cannot find the rows before the logits of a dense model's prompt: a short block is
        found by all of its tokens, and these include the reply's.
        """
        return self._traits.resumes_at_checkpoints

    def look_up(self, lookup: SharedLookup) -> None:
        self.pool.submit(Lane.LOOKUP, lambda: self._look_up(lookup))

    def _look_up(self, lookup: SharedLookup) -> None:
        result = LookupResult([], 0)
        trouble = None
        try:
            if self.pool.is_abandoned:
                raise TierFailed(STOPPING)
            result = self._tier.look_up(
                lookup.namespace,
                lookup.parent,
                lookup.start,
                lookup.tokens,
                has_rows=self._traits.has_rows,
                has_checkpoints=self._traits.resumes_at_checkpoints,
            )
        except CacheError as error:
            trouble = error.message
        except Exception as error:  # a request waits for an answer
            _log.exception("shared: lookup failed")
            trouble = f"it failed: {error}"
        self.pool.emit(LookedUp(lookup, *result, trouble))
