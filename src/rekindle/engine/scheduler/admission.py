"""Admits waiting sequences to slots, in order of arrival, and advances their restores."""

import logging
import time
from dataclasses import dataclass

from rekindle.engine.backend import Backend
from rekindle.engine.reports import Reports
from rekindle.engine.reuse.placement import Placement
from rekindle.engine.reuse.prefix_finder import PrefixFinder
from rekindle.engine.reuse.restorer import Restorer
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import RESTORING, Sequence
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.events import StopCause

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Admission:
    _backend: Backend
    _run_queue: RunQueue
    _finder: PrefixFinder
    _placement: Placement
    _restorer: Restorer
    _reports: Reports

    def admit_waiting(self) -> bool:
        """Admit sequences in order of arrival. Return whether one was admitted.

        A sequence that waits for a lookup, or for another's prefill, is skipped.
        """
        queue = self._run_queue
        if not queue.waiting:
            return False
        others_decode = queue.is_decoding
        n_admitted = 0
        for sequence in list(queue.waiting):
            if len(queue.running) == self._backend.n_slots or queue.is_context_full:
                break
            if self._finder.awaits_lookup(sequence) or self._finder.awaits_leader(sequence):
                continue
            if sequence.request.background and queue.running:
                break  # background requests run one at a time
            start = self._finder.find(sequence)
            if self._placement.serve_without_slot(sequence, start):
                n_admitted += 1
                sequence.admitted_at = sequence.admitted_at or time.monotonic()
                self._reports.evaluated(sequence)
                queue.finish(sequence, StopCause.LENGTH)
                continue
            self._finder.find_leader(sequence, start, queue.running)
            if sequence.leader is not None:
                continue
            if not self._placement.place(
                sequence, start, queue.running, others_decode=others_decode
            ):
                if sequence.request.background:
                    queue.finish(sequence, StopCause.YIELDED)  # it never evicts other rows
                    continue
                break
            queue.admit(sequence)
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            n_admitted += 1
            self._make_sampler(sequence)
        return n_admitted > 0

    def advance_restores(self) -> bool:
        """Import restored pieces. Return whether there was one.

        While others decode, one piece per step: each import delays their next token.
        """
        restoring = [each for each in self._run_queue.running if each.phase is RESTORING]
        if not restoring:
            return False
        others_decode = self._run_queue.is_decoding
        did_import = False
        for sequence in restoring:
            did_import |= self._restorer.advance(
                sequence, others_decode=others_decode or sequence.request.background
            )
            if did_import and others_decode:
                break
        return did_import

    def _make_sampler(self, sequence: Sequence) -> None:
        if sequence.sampler is not None or not sequence.is_sampled:
            return
        request = sequence.request
        try:
            sequence.sampler = self._backend.new_sampler(
                request.sampling, request.prompt, request.n_top_logprobs
            )
        except RekindleError as error:
            self._run_queue.fail(sequence, error)
        except Exception as error:  # one request's sampler must not fail the others
            _log.exception("engine: sampler failed request=%s", request.id)
            self._run_queue.fail(sequence, EngineError(f"The sampler cannot be created: {error}"))
