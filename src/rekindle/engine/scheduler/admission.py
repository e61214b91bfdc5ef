"""Who gets a slot: those that wait, in order of arrival, and what is restored for them.

`warm_start` knows where a sequence starts, `roster` who runs and who waits.
"""

import logging
import time

from rekindle.engine.backend import Backend
from rekindle.engine.reports import Reports
from rekindle.engine.reuse.warm_start import WarmStart
from rekindle.engine.scheduler.roster import Roster
from rekindle.engine.sequence import Phase, Sequence
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.events import StopCause

_log = logging.getLogger(__name__)


class Admission:
    def __init__(
        self, backend: Backend, roster: Roster, warm_start: WarmStart, reports: Reports
    ) -> None:
        self._backend = backend
        self._roster = roster
        self._warm_start = warm_start
        self._reports = reports

    def admit_waiting(self, n_decoding: int) -> bool:
        """In order of arrival, but nobody behind waits for one that follows another's prefill."""
        roster = self._roster
        n_admitted = 0
        for sequence in list(roster.waiting):
            if len(roster.running) == self._backend.n_slots or roster.is_crowded:
                break
            if self._warm_start.is_asking(sequence) or self._warm_start.is_following(sequence):
                continue
            if sequence.request.background and roster.running:
                break  # one after another
            start = self._warm_start.find(sequence)
            if self._warm_start.serve_without_slot(sequence, start):
                n_admitted += 1
                sequence.admitted_at = sequence.admitted_at or time.monotonic()
                self._reports.evaluated(sequence)
                roster.finish(sequence, StopCause.LENGTH)
                continue
            self._warm_start.find_leader(sequence, start, roster.running)
            if sequence.leader is not None:
                continue
            if not self._warm_start.place(
                sequence, start, roster.running, others_decode=n_decoding > 0
            ):
                if sequence.request.background:
                    roster.finish(sequence, StopCause.YIELDED)  # not for what others left
                    continue
                break
            roster.admit(sequence)
            sequence.admitted_at = sequence.admitted_at or time.monotonic()
            n_admitted += 1
            self._prepare(sequence)
        return n_admitted > 0

    def advance_restores(self, n_decoding: int) -> bool:
        """While others decode, one piece in a step: each holds them up."""
        did_put = False
        for sequence in self._roster.running:
            if sequence.phase is Phase.RESTORING and not (did_put and n_decoding):
                did_put |= self._warm_start.advance_restore(
                    sequence, others_decode=n_decoding > 0 or sequence.request.background
                )
        return did_put

    def _prepare(self, sequence: Sequence) -> None:
        if sequence.sampler is not None or not sequence.is_sampled:
            return
        request = sequence.request
        try:
            sequence.sampler = self._backend.new_sampler(
                request.sampling, request.prompt, request.n_top_logprobs
            )
        except RekindleError as error:
            self._roster.fail(sequence, error)
        except Exception as error:  # one request's sampler must not end the others
            _log.exception("request=%s cannot be sampled", request.id)
            self._roster.fail(sequence, EngineError(f"The request cannot be sampled: {error}"))
