"""Requests that are computed and end only when their prompt is on disk."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.sequence import Sequence
from rekindle.errors import EngineError, TierFailed
from rekindle.generation.events import Finished

PATIENCE_SECONDS = 60.0  # picked: far beyond what a prompt takes to be written


@dataclass(frozen=True, slots=True)
class _UnsavedPrompt:
    request_id: str
    keys: PrefixKeys
    n_prompt: int
    finished: Finished
    began_at: float


class PersistQueue:
    def __init__(self) -> None:
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

    def drain(self) -> list[str]:
        """The ids of all that wait; none does afterwards."""
        pending, self._pending = self._pending, []
        return [each.request_id for each in pending]

    def advance(self, cache: PrefixCache) -> Iterator[tuple[str, Finished | EngineError]]:
        """Those that have ended: their prompt is on disk, or will not be."""
        waiting = []
        for each in self._pending:
            outcome = _outcome(each, cache)
            if outcome is None:
                waiting.append(each)
            else:
                yield each.request_id, outcome
        self._pending = waiting


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
