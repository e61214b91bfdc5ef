"""The last status that an engine reported, and the counters of its processes that have ended."""

import asyncio
from dataclasses import replace

from rekindle.generation.status import CacheCounters, EmbedderStatus, EngineStatus
from rekindle.link.messages import AskStatus, LoadedModel, StatusReport
from rekindle.supervisor.lives import EngineLives

STATUS_SECONDS = 0.5  # for an engine to report its status; picked


class LastStatus:
    def __init__(self, model: LoadedModel, queue_size: int) -> None:
        self._status = self._total = _first_status(model, queue_size)
        self._past = CacheCounters()  # of processes that have ended
        self._asked: dict[int, asyncio.Future[None]] = {}

    def status(self, lives: EngineLives, *, n_unfinished: int) -> EngineStatus:
        status = self._total
        if not lives.is_connected:
            # Nothing runs: every unfinished request waits for the next process.
            status = replace(status, n_running=0, n_waiting=n_unfinished, n_cells_used=0, slots=())
        return replace(status, process=lives.status())

    async def ask(self, lives: EngineLives, number: int) -> None:
        """Ask the engine for its status, and wait a moment for it."""
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        lives.send(AskStatus(number))
        try:
            await asyncio.wait([answered], timeout=STATUS_SECONDS)
        finally:
            del self._asked[number]

    def note(self, report: StatusReport) -> None:
        self._renew(report.status)
        if (answered := self._asked.get(report.number)) and not answered.done():
            answered.set_result(None)

    def note_death(self) -> None:
        """Add the counters of the process to those of earlier ones. The next one counts from 0."""
        if self._status.cache is not None:
            self._past += self._status.cache.counters
            cache = replace(self._status.cache, counters=CacheCounters())
            self._renew(replace(self._status, cache=cache))
        for answered in self._asked.values():
            if not answered.done():
                answered.set_result(None)

    def _renew(self, status: EngineStatus) -> None:
        """Add up once for each report: several requests may read each."""
        self._status = self._total = status
        if status.cache is not None:
            counters = self._past + status.cache.counters
            self._total = replace(status, cache=replace(status.cache, counters=counters))


def _first_status(model: LoadedModel, queue_size: int) -> EngineStatus:
    """Return the status of an engine that has not reported yet."""
    return EngineStatus(
        n_slots=model.n_slots,
        n_running=0,
        n_waiting=0,
        max_waiting=queue_size,
        n_ctx=model.n_ctx,
        n_cells=model.n_cells,
        n_cells_used=0,
        embedder=EmbedderStatus(
            n_ctx=model.embedding_n_ctx,
            n_dimensions=model.embedding_n_dimensions,
            n_requests=0,
            ranks=model.ranks,
        ),
    )
