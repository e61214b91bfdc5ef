"""Requests with `persist`: computed, and waiting for their prompt to be on disk."""

import time
from collections.abc import Callable
from typing import NamedTuple

from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.orders import Outbox
from rekindle.engine.sequence import Sequence
from rekindle.errors import EngineError, PromptDeleted, RekindleError, TierFailed
from rekindle.generation.events import Finished
from rekindle.generation.request import CacheTerms, GenerationRequest

PATIENCE_SECONDS = 60.0  # far more than the write of a prompt takes; picked

DELETED = PromptDeleted("The prompt is computed, but it is not on disk: it was deleted meanwhile.")


class _UnsavedPrompt(NamedTuple):
    request: GenerationRequest
    keys: PrefixKeys
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
        if not sequence.request.cache_prompt:
            self._outbox.put(sequence.request.id, DELETED)
            return
        self._pending.append(
            _UnsavedPrompt(sequence.request, sequence.keys, finished, time.monotonic())
        )

    def cancel(self, request_id: str) -> None:
        self._pending = [each for each in self._pending if each.request.id != request_id]

    def forget(self, is_deleted: Callable[[PrefixKeys, int, CacheTerms], bool]) -> None:
        """Fail the requests whose prompts are deleted."""
        for each in list(self._pending):
            request = each.request
            if is_deleted(each.keys, len(request.prompt), request.terms):
                self._pending.remove(each)
                self._outbox.put(request.id, DELETED)

    def fail_all(self, error: RekindleError) -> None:
        for each in self._pending:
            self._outbox.put(each.request.id, error)
        self._pending = []

    def advance(self, cache: PrefixCache) -> None:
        """End the requests whose prompt is on disk, or will not be."""
        for each in list(self._pending):
            outcome = _outcome(each, cache)
            if outcome is not None:
                self._pending.remove(each)
                self._outbox.put(each.request.id, outcome)


def _outcome(pending: _UnsavedPrompt, cache: PrefixCache) -> Finished | EngineError | None:
    try:
        if cache.persist(pending.keys, len(pending.request.prompt), since=pending.began_at):
            return pending.finished
        if time.monotonic() < pending.began_at + PATIENCE_SECONDS:
            return None
        why = "the cache has no room for all of it"
    except TierFailed as error:
        why = error.message
    return EngineError(f"The prompt is computed, but it is not on disk: {why}.")
