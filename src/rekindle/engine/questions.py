"""Questions about live and stored prefixes, answered on the engine thread a slice at a time."""

import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, cast

from rekindle.cache.disk.transfers import DiskDeletion
from rekindle.cache.entry import Key, Kind
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.live_rows import LiveRows
from rekindle.engine.orders import Ask
from rekindle.engine.reuse.prefix_finder import PrefixFinder, Start
from rekindle.engine.sequence import new_sequence
from rekindle.engine.slots import Slots
from rekindle.engine.step_time import StepTime
from rekindle.errors import EngineError, RekindleError
from rekindle.generation.events import NO_SPANS, CacheSource, Spans
from rekindle.generation.forgetting import Deleted, Place, Tombstone, total
from rekindle.generation.questions import (
    AnyQuestion,
    Forget,
    ForgetKey,
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    Quarantine,
    ReadTokens,
)
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.generation.status import Forecast
from rekindle.link.activity_page import Activity, ActivityPage

T = TypeVar("T")
# Yields between two slices of work: None, or until when there is only the disk to wait for.
Answering = Generator[float | None, None, T]

_log = logging.getLogger(__name__)

DISK_SECONDS = 10.0  # longest wait of a deletion for the disk; picked
INDEX_SECONDS = 1.0  # longest wait of a question about all entries for the disk's index; picked


@dataclass(frozen=True, slots=True)
class EnginePrefixes:
    """Answers `generation.questions` on the engine thread."""

    _cache: PrefixCache
    _slots: Slots
    _saver: SlotSaver
    _finder: PrefixFinder
    _live: LiveRows

    def answer(self, question: AnyQuestion, asked_at: float) -> Answering[object]:
        match question:
            case LookUp(tokens=tokens, namespace=namespace):
                return (yield from self._look_up(tokens, namespace))
            case Quarantine(tokens=tokens, namespace=namespace):
                return (yield from self._quarantine(tokens, namespace))
            case Forget(tombstone=tombstone):
                return (yield from self._forget(tombstone))
        # The disk may hang. Then the answer has the entries known so far.
        while not self._cache.is_listed and time.monotonic() < asked_at + INDEX_SECONDS:
            yield asked_at + INDEX_SECONDS
        root = self._cache.root_of(question.namespace)
        match question:
            case ListStored(limit=limit):
                return (yield from self._cache.contents.listed(root, limit))
            case ListBranches(limit=limit):
                return (yield from self._cache.contents.forest(root, limit))
            case ReadTokens(key=key):
                return self._cache.contents.tokens(root, key)
            case PinStored(key=key, seconds=seconds, namespace=namespace):
                return (yield from self._cache.pin_stored(namespace, key, seconds))
            case ForgetKey(key=key):
                return (yield from self._forget_key(root, key))

    def _look_up(self, tokens: tuple[int, ...], namespace: str) -> Answering[Forecast]:
        n_prompt = len(tokens)
        request = GenerationRequest(
            id="",
            prompt=tokens,
            boundaries=(),
            sampling=Sampling(),
            max_tokens=None,
            terms=CacheTerms(namespace=namespace),
        )
        sequence = new_sequence(request, self._cache, n_ctx=n_prompt)
        lookup = self._cache.look_up(sequence.keys, n_prompt)
        while lookup is not None and not lookup.is_over(time.monotonic()):
            yield lookup.deadline
        start = self._finder.find(sequence)
        restore_seconds: float | None = 0.0
        if start.match is not None and start.n_stored:
            restore_seconds = self._cache.gate.load_seconds(start.match, n_live=start.n_live)
        per_token = self._saver.prefill_seconds_per_token
        return Forecast(
            n_prompt=n_prompt,
            spans=_spans(start),
            restore_seconds=restore_seconds,
            prefill_seconds=None if per_token is None else per_token * (n_prompt - start.n_tokens),
        )

    def _quarantine(self, tokens: tuple[int, ...], namespace: str) -> Answering[int]:
        keys = self._cache.keys(list(tokens), namespace)
        lookup = self._cache.look_up(keys, len(tokens))
        while lookup is not None and not lookup.is_over(time.monotonic()):
            yield lookup.deadline
        nodes = self._cache.match(keys, len(tokens)).nodes
        if nodes and nodes[-1].kind is Kind.BLOCK:  # a dense model: its checkpoints are ends
            nodes += self._cache.checkpoints_before(nodes[-1])
        if (end := self._cache.find_end(keys, len(tokens))) is not None and end not in nodes:
            nodes.append(end)
        for node in reversed(nodes):
            self._cache.distrust(node, "the engine crashed on its prompt")
        return len(nodes)

    def _forget(self, tombstone: Tombstone) -> Answering[Deleted]:
        cache = self._cache
        on_disk = cache.begin_to_forget(tombstone)
        cache.texts.forget()
        deletion = Deletions(cache.root, [tombstone])
        n_live = self._live.forget(
            lambda keys, _, terms: deletion.covers(keys.root, terms.session, terms.asked_at)
        )
        yield None  # the rest is done in slices
        parts = [Deleted(counts={Place.LIVE: n_live}), (yield from cache.forget(tombstone))]
        if on_disk is not None:
            parts.append((yield from _answer_of(on_disk)))
        return total(parts)

    def _forget_key(self, root: Key, key: str) -> Answering[Deleted]:
        prefix = self._cache.contents.tokens_of(root, key)
        if prefix is None:
            return Deleted(counts={})

        def is_deleted(keys: PrefixKeys, n_tokens: int, _: CacheTerms) -> bool:
            return keys.root == root and keys.between(0, n_tokens).startswith(prefix)

        self._cache.texts.forget()
        n_live = self._live.forget(is_deleted)
        deleted, on_disk = yield from self._cache.forget_key(root, prefix)
        parts = [deleted, Deleted(counts={Place.LIVE: n_live})]
        if on_disk is not None:
            # What the index knew is counted above. The disk counts the rest.
            parts.append((yield from _answer_of(on_disk)))
        return total(parts)


@dataclass(slots=True, eq=False)
class _Asked:
    order: Ask[Any]
    answering: Answering[object]
    has_begun: bool = False
    waits_until: float | None = None  # None: there is work to do


@dataclass(slots=True, eq=False)
class QuestionQueue:
    """Answers questions in order, a slice at a time. Those about one prompt overtake the others."""

    _prefixes: EnginePrefixes
    _time: StepTime
    _activity: ActivityPage
    _look_ups: deque[_Asked] = field(default_factory=deque)
    _others: deque[_Asked] = field(default_factory=deque)

    def add(self, order: Ask[Any]) -> None:
        question = cast(AnyQuestion, order.question)
        asked = _Asked(order, self._prefixes.answer(question, time.monotonic()))
        if isinstance(question, Forget):
            # Its first slice is done at once: from now on, nothing that it covers is stored.
            if not self._advance(asked):
                self._others.append(asked)
        elif not isinstance(question, LookUp | Quarantine):
            self._others.append(asked)
        elif not self._advance(asked):
            self._look_ups.append(asked)

    @property
    def read_stores(self) -> bool:
        """Whether a question about all that is stored waits."""
        return bool(self._others)

    def advance(self) -> bool:
        """Work on the questions for up to half of the step's time. Return False if none can."""
        did_work = False
        for asked in list(self._look_ups):
            if self._advance(asked):
                self._look_ups.remove(asked)
                did_work = True
        while self._others and not self._time.is_half_over:
            asked = self._others[0]
            if self._advance(asked):
                self._others.popleft()
            elif asked.waits_until is not None:
                break
            did_work = True
        return did_work

    def seconds_to_wait(self, most: float | None) -> float | None:
        """Return how long all questions wait for the disk, at most `most`; None: no limit."""
        waiting = [*self._look_ups, *islice(self._others, 1)]
        now = time.monotonic()
        seconds = [max((asked.waits_until or now) - now, 0.0) for asked in waiting]
        return min([*seconds, *([] if most is None else [most])], default=None)

    def fail_all(self, error: RekindleError) -> None:
        for asked in (*self._look_ups, *self._others):
            asked.answering.close()
            if asked.has_begun or asked.order.outcome.set_running_or_notify_cancel():
                asked.order.outcome.set_exception(error)
        self._look_ups.clear()
        self._others.clear()

    def _advance(self, asked: _Asked) -> bool:
        """Do one slice. Return True once the question is answered, or its reader has gone."""
        outcome = asked.order.outcome
        if not asked.has_begun and not outcome.set_running_or_notify_cancel():
            return True
        asked.has_begun = True
        self._activity.note(Activity.ANSWER, [asked.order.number])
        try:
            with self._time.spent():
                asked.waits_until = next(asked.answering)
        except StopIteration as answered:
            outcome.set_result(answered.value)
        except Exception as error:  # the client waits for an answer or an error
            _log.exception("engine: query failed")
            outcome.set_exception(EngineError(f"The engine could not answer: {error}"))
        else:
            return False
        return True


def _answer_of(on_disk: DiskDeletion) -> Answering[Deleted]:
    """Wait for the disk's part of a deletion."""
    deadline = time.monotonic() + DISK_SECONDS
    while not on_disk.is_over and time.monotonic() < deadline:
        yield deadline
    return on_disk.answer


def _spans(start: Start) -> Spans:
    """Return each source up to where its rows would be used; for an entry, its nearest tier."""
    spans = NO_SPANS.extended(CacheSource.LIVE, start.n_live)
    for node in start.match.nodes if start.match else ():
        spans = spans.extended(node.where.cheapest, min(node.stop, start.n_stored))
    return spans
