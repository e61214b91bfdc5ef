"""Samples the next tokens of replies from computed or kept logits, and ends replies."""

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.orders import Outbox
from rekindle.engine.reports import Reports
from rekindle.engine.scheduler.batch_planner import BatchItem
from rekindle.engine.scheduler.run_queue import RunQueue
from rekindle.engine.sequence import DECODING, PREFILLING, Sequence
from rekindle.engine.slots import PromptEnd, Slots
from rekindle.engine.speculation.speculation import Speculation
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.events import StopCause, TokenSampled
from rekindle.link.activity_page import Activity, ActivityPage


@dataclass(slots=True, eq=False)
class ReplySampler:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _saver: SlotSaver
    _run_queue: RunQueue
    _reports: Reports
    _activity: ActivityPage
    _speculation: Speculation
    _outbox: Outbox
    _begun: list[Sequence] = field(default_factory=list)  # replies with their first token

    def sample(self, plan: list[BatchItem]) -> None:
        """Advance sequences by what the batch computed; sample tokens for the complete ones."""
        complete: list[_Row] = []
        n_rows = 0
        for sequence, n_tokens in plan:
            if sequence.draft is not None:
                sequence.n_computed += 1  # and one for each accepted token
                complete.append(_Row(sequence, n_rows))
                n_rows += n_tokens
                continue
            sequence.n_computed += n_tokens
            if sequence.phase is PREFILLING:
                self._cache.counters.prefilled_tokens += n_tokens
                if sequence.stops and sequence.stops[-1] == sequence.n_computed:
                    sequence.stops.pop()
                    self._saver.take_checkpoint(sequence)
                if not sequence.has_replied:
                    self._reports.prefilled(sequence)
            if sequence.n_computed < len(sequence.tokens):
                continue
            if sequence.is_sampled:
                if sequence.phase is PREFILLING:
                    self._keep_end(sequence, n_rows)
                if sequence.sampler is not None:
                    complete.append(_Row(sequence, n_rows))
                n_rows += 1
            else:
                self._run_queue.finish(sequence, StopCause.LENGTH)
        began, n_sampled, n_accepted = time.perf_counter(), 0, 0
        while complete:  # again for each drafted token that was right
            n_sampled += len(complete)
            samplers = [sequence.sampler for sequence, _ in complete]
            results = self._backend.sample(samplers, [row + n_accepted for _, row in complete])
            sampled = zip(complete, results, strict=True)
            complete = [each for each, result in sampled if self._take(each[0], result, n_accepted)]
            n_accepted += 1
        if n_sampled:
            self._speculation.observe_sampling(n_sampled, time.perf_counter() - began)

    def _keep_end(self, sequence: Sequence, row: int) -> None:
        """Keep the logits, for the same prompt or until the sampler is ready."""
        is_for_others = self._is_for_others(sequence)
        if is_for_others or sequence.sampler is None:
            end = PromptEnd(self._backend.logits(row), is_saved=not is_for_others)
            self._slots.all[sequence.slot].keep_end(sequence.n_computed, end)

    def _is_for_others(self, sequence: Sequence) -> bool:
        """Return whether the logits are those of a dense model's prompt that may be stored."""
        is_prompt = self._backend.traits.is_dense and not sequence.has_replied
        return is_prompt and sequence.request.cache_prompt

    def sample_ends(self) -> bool:
        """Sample the first tokens of prompts whose logits are kept. Return whether there were any.

        The logits were stored, or computed before the sampler was ready.
        """
        complete = [
            sequence
            for sequence in self._run_queue.running
            if sequence.phase is PREFILLING and sequence.n_pending == 0
        ]
        for sequence in complete:
            if not (sequence.is_evaluated or sequence.has_replied):
                self._reports.evaluated(sequence)
        ready = [sequence for sequence in complete if sequence.sampler is not None]
        if ready:
            self._activity.note(Activity.DECODE, [each.request.number for each in ready])
        for sequence in ready:
            ends = self._slots.all[sequence.slot].ends
            end = ends[sequence.n_computed]
            if not self._is_for_others(sequence):
                del ends[sequence.n_computed]
            self._take(sequence, self._backend.sample_stored(sequence.sampler, end.logits), 0)
        return bool(ready)

    def begin_drafts(self) -> bool:
        """Look for drafts behind first tokens, once these are delivered. Return if there were any.

        It takes an index over the whole prompt.
        """
        begun, self._begun = self._begun, []
        for sequence in begun:
            if sequence.drafter is not None:
                sequence.drafter.note(sequence.tokens[-1])
        return bool(begun)

    def _take(self, sequence: Sequence, result: TokenSampled | Exception, n_accepted: int) -> bool:
        """Take what was sampled behind `n_accepted` drafted tokens.

        Return whether the next one was right, too. Its row is computed.
        """
        if isinstance(result, TokenSampled) and _is_drafted(sequence, result.token, n_accepted):
            sequence.n_computed += 1
            self._append(sequence, result)
            return True
        drafted = self._speculation.settle(sequence, n_accepted)
        if isinstance(result, TokenSampled):
            if drafted is not None:
                result = replace(result, drafted=drafted)
            self._append(sequence, result)
        elif isinstance(result, RekindleError):
            self._run_queue.fail(sequence, result)
        else:
            self._run_queue.fail(sequence, EngineError(f"Sampling failed: {result}"))
        return False

    def _append(self, sequence: Sequence, sampled: TokenSampled) -> None:
        is_first = sequence.phase is PREFILLING
        sequence.phase = DECODING
        token = sampled.token
        if token in self._backend.eog_tokens:
            cause = StopCause.LENGTH if sampled.lands else StopCause.END_OF_TURN
            self._run_queue.finish(sequence, cause, token, sampled.drafted)
            return
        sequence.tokens.append(token)
        self._outbox.put(sequence.request.id, sampled)
        if len(sequence.tokens) >= sequence.max_length:
            self._run_queue.finish(sequence, StopCause.LENGTH)
        elif is_first:
            self._begun.append(sequence)
        elif sequence.drafter is not None:
            sequence.drafter.note(token)


class _Row(NamedTuple):
    """A sequence to sample, and its first row among the outputs of the batch."""

    sequence: Sequence
    first: int


def _is_drafted(sequence: Sequence, token: int, n_accepted: int) -> bool:
    draft = sequence.draft
    return draft is not None and draft.tokens[n_accepted : n_accepted + 1] == [token]
