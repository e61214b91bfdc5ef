"""Prepares the samplers of sequences on a thread of its own, while they wait, restore or prefill.

Compiling a grammar may take seconds, and so the engine thread never does it. Its thread asks for
a sampler when it accepts a request and collects those that are ready at each step.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from rekindle.engine.backend import Backend, Sampler
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import Phase, Sequence
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.request import Sampling
from rekindle.link.activity_page import ActivityPage

_log = logging.getLogger(__name__)

Job = Callable[[], None]
LIGHT, HEAVY = 0, 1  # the numbers of the threads on the activity page


class Preparer(Protocol):
    """Runs light jobs one after another, and beside them the heavy ones."""

    def start(self) -> None: ...

    def submit(self, job: Job, *, is_light: bool) -> None: ...

    def close(self) -> None:
        """Wait until every job has run."""
        ...


class PreparingThreads:
    """Two threads: a grammar that takes seconds delays no light one."""

    def __init__(self) -> None:
        self._light = _PreparingThread("prepare")
        self._heavy = _PreparingThread("prepare-heavy")

    def start(self) -> None:
        self._light.start()
        self._heavy.start()

    def submit(self, job: Job, *, is_light: bool) -> None:
        (self._light if is_light else self._heavy).jobs.put(job)

    def close(self) -> None:
        for thread in (self._light, self._heavy):  # the first one submits jobs to the second
            thread.jobs.put(None)
            thread.join()


class _PreparingThread(threading.Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()


@dataclass(slots=True, eq=False)
class SamplerQueue:
    """`wake` makes the engine take a step; the preparing thread calls it."""

    _backend: Backend
    _run_queue: RunQueue
    _activity: ActivityPage
    _preparer: Preparer
    _wake: Callable[[], None]
    _pending: list[tuple[Sequence, Future[Sampler]]] = field(default_factory=list)

    def start(self) -> None:
        self._preparer.start()

    def ask(self, sequence: Sequence) -> None:
        """Begin to make the sampler of a sequence that has just been accepted."""
        if not sequence.is_sampled:
            return
        if _takes_microseconds(sequence.request.sampling):
            try:
                sequence.sampler = self._new_sampler(sequence)
            except Exception as error:  # one request's sampler must not fail the others
                self._fail(sequence, error)
            return
        future: Future[Sampler] = Future()
        self._pending.append((sequence, future))
        self._preparer.submit(partial(self._prepare, sequence, future), is_light=True)

    def collect(self) -> bool:
        """Give sequences the samplers that are ready. Return whether there was one."""
        if not self._pending:
            return False
        pending, self._pending = self._pending, []
        for sequence, future in pending:
            has_ended = sequence.phase is Phase.DONE
            if has_ended and future.cancel():
                continue
            if not future.done():
                self._pending.append((sequence, future))
            elif not has_ended:
                self._give(sequence, future)
            elif future.exception() is None:
                future.result().close()
        return len(self._pending) < len(pending)

    def close(self) -> None:
        """Wait for the sampler that is being made. Every sequence must have ended."""
        self.collect()
        self._preparer.close()
        self.collect()

    def _prepare(self, sequence: Sequence, future: Future[Sampler]) -> None:
        sampling = sequence.request.sampling
        is_quick = sampling.grammar is None or self._backend.compiles_quickly(sampling.grammar)
        if is_quick and not sampling.has_own_breakers:
            self._prepare_on(LIGHT, sequence, future)
        else:
            job = partial(self._prepare_on, HEAVY, sequence, future)
            self._preparer.submit(job, is_light=False)

    def _prepare_on(self, preparer: int, sequence: Sequence, future: Future[Sampler]) -> None:
        if future.set_running_or_notify_cancel():
            self._activity.prepare(sequence.request.number, preparer)
            self._make(sequence, future)
            self._activity.prepare(0, preparer)
            self._wake()

    def _make(self, sequence: Sequence, future: Future[Sampler]) -> None:
        try:
            sampler = self._new_sampler(sequence)
        except Exception as error:  # one request's sampler must not fail the others
            future.set_exception(error)
        else:
            future.set_result(sampler)

    def _new_sampler(self, sequence: Sequence) -> Sampler:
        """Until the sequence has its sampler, its tokens do not change."""
        request, resumed = sequence.request, sequence.request.resumed
        return self._backend.new_sampler(
            request.sampling,
            sequence.tokens,
            len(sequence.tokens) - len(request.prompt),
            request.n_top_logprobs,
            n_left=sequence.max_length - len(sequence.tokens),
            is_landing=resumed is not None and resumed.is_landing,
            state=resumed.sampler_state if resumed is not None else (),
        )

    def _give(self, sequence: Sequence, future: Future[Sampler]) -> None:
        error = future.exception()
        if error is None:
            sequence.sampler = future.result()
        else:
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        if isinstance(error, RekindleError):
            self._run_queue.fail(sequence, error)
        else:
            _log.error("engine: sampler failed request=%s", sequence.request.id, exc_info=error)
            self._run_queue.fail(sequence, EngineError(f"The sampler cannot be created: {error}"))


def _takes_microseconds(sampling: Sampling) -> bool:
    return not (
        sampling.grammar
        or sampling.logit_bias
        or sampling.has_penalties
        or sampling.reasoning_limit
        or not sampling.is_usual
    )
