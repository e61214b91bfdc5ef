"""Requests with `persist`: computed, and waiting for their prompt to be on disk."""

import time
from dataclasses import dataclass

from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.outbox import Outbox
from rekindle.engine.sequence import Sequence
from rekindle.errors import EngineError, RekindleError, TierFailed
from rekindle.generation.events import Finished

PATIENCE_SECONDS = 60.0  # far more than the write of a prompt takes; picked


@dataclass(frozen=True, slots=True)
class _UnsavedPrompt:
    request_id: str
    keys: PrefixKeys
    n_prompt: int
    finished: Finished
    began_at: float


class PersistQueue:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._pending: list[_UnsavedPrompt] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def add(self, sequence: Sequence, finished: Finished) -> None:
        request = sequence.request
        began_at = time.monotonic()
        self._pending.append(
            _UnsavedPrompt(request.id, sequence.keys, len(request.prompt), finished, began_at)
        )

    def cancel(self, request_id: str) -> None:
        self._pending = [each for each in self._pending if each.request_id != request_id]

    def fail_all(self, error: RekindleError) -> None:
        for each in self._pending:
            self._outbox.put(each.request_id, error)
        self._pending = []

    def advance(self, cache: PrefixCache) -> None:
        """End the requests whose prompt is on disk, or will not be."""
        for each in list(self._pending):
            outcome = _outcome(each, cache)
            if outcome is not None:
                self._pending.remove(each)
                self._outbox.put(each.request_id, outcome)


def _outcome(pending: _UnsavedPrompt, cache: PrefixCache) -> Finished | EngineError | None:
    try:
        if cache.persist(pending.keys, pending.n_prompt, since=pending.began_at):
            return pending.finished
        if time.monotonic() < pending.began_at + PATIENCE_SECONDS:
            return None
        why = "the cache has no room for all of it"
    except TierFailed as error:
        why = error.message
    return EngineError(f"The prompt is computed, but it is not on disk: {why}.")
