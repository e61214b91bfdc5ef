"""Embedding requests on the engine thread: in order of arrival, one part of one input at a time.

Embeddings take no slot. They share only the time of a step with sequences.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from rekindle.engine.backend import Embedder
from rekindle.engine.orders import Outbox
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.events import Embedded
from rekindle.generation.request import EmbeddingRequest
from rekindle.generation.status import EmbedderStatus
from rekindle.link.activity_page import Activity, ActivityPage
from rekindle.observe.watchdog import EngineWatchdog

_log = logging.getLogger(__name__)

REST_SECONDS = 300.0  # without a request, until the embedder frees its memory; picked


@dataclass(slots=True)
class _WaitingInput:
    request: EmbeddingRequest
    vectors: list[bytes] = field(default_factory=list)
    has_begun: bool = False  # the embedder holds the next input


class EmbeddingQueue:
    def __init__(
        self,
        embedder: Embedder,
        outbox: Outbox,
        activity: ActivityPage,
        watchdog: EngineWatchdog,
    ) -> None:
        self._outbox = outbox
        self._activity = activity
        self._watchdog = watchdog
        self._embedder = embedder
        self._pending: deque[_WaitingInput] = deque()
        self._rests_at: float | None = None  # None: the embedder holds no memory

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def accept(self, request: EmbeddingRequest) -> None:
        self._pending.append(_WaitingInput(request))

    def cancel(self, request_id: str) -> None:
        self._pending = deque(each for each in self._pending if each.request.id != request_id)

    def fail_all(self, error: RekindleError) -> None:
        while self._pending:
            self._end(self._pending[0], error)

    def advance(self) -> bool:
        """Compute the next part of the oldest request. Return False if there is no request.

        A failure ends that request only. An embedder that is idle for long frees its memory.
        """
        if not self._pending:
            if self._rests_at is not None and time.monotonic() >= self._rests_at:
                self.close()
            return False
        pending = self._pending[0]
        self._watchdog.free()
        try:
            self._compute_part(pending)
            if len(pending.vectors) == len(pending.request.inputs):
                self._end(pending, Embedded(tuple(pending.vectors)))
        except RekindleError as error:
            self._end(pending, error)
        except Exception as error:
            _log.exception("engine: embedding failed request=%s", pending.request.id)
            self._end(pending, EngineError(f"The embedder failed: {error}"))
        finally:
            self._watchdog.busy()
        return True

    def _compute_part(self, pending: _WaitingInput) -> None:
        self._activity.note(Activity.EMBED, [pending.request.number])
        self._rests_at = time.monotonic() + REST_SECONDS
        if not pending.has_begun:
            self._embedder.begin(pending.request.inputs[len(pending.vectors)])
            pending.has_begun = True
        if (vector := self._embedder.advance()) is not None:
            pending.vectors.append(vector)
            pending.has_begun = False

    def _end(self, pending: _WaitingInput, outcome: Embedded | RekindleError) -> None:
        self._pending.remove(pending)
        self._outbox.put(pending.request.id, outcome)

    def seconds_to_rest(self) -> float | None:
        return None if self._rests_at is None else max(0.0, self._rests_at - time.monotonic())

    def close(self) -> None:
        self._rests_at = None
        self._embedder.rest()

    def status(self) -> EmbedderStatus:
        """Any thread may call it."""
        return EmbedderStatus(
            n_ctx=self._embedder.n_ctx,
            n_dimensions=self._embedder.n_dimensions,
            n_requests=len(self._pending),
            ranks=self._embedder.ranks,
        )
