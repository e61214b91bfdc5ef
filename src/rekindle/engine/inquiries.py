"""Questions about what is held, answered on the engine thread between two steps."""

import time
from dataclasses import dataclass

from rekindle.cache.index import Match
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.warm_start import Start, WarmStart
from rekindle.engine.sequence import Sequence
from rekindle.engine.slots import Slots
from rekindle.generation.events import CachedSpan, CacheSource
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix


@dataclass(frozen=True, slots=True)
class LookUp:
    tokens: tuple[int, ...]
    namespace: str


@dataclass(frozen=True, slots=True)
class ListStored:
    namespace: str
    limit: int


@dataclass(frozen=True, slots=True)
class Forget:
    key: str | None  # None: everything
    namespace: str


@dataclass(frozen=True, slots=True)
class ShowForest:
    namespace: str
    limit: int


@dataclass(frozen=True, slots=True)
class ReadTokens:
    key: str
    namespace: str


@dataclass(frozen=True, slots=True)
class PinStored:
    key: str
    namespace: str
    seconds: float  # 0: no longer


Question = LookUp | ListStored | Forget | ShowForest | ReadTokens | PinStored
Answer = Forecast | list[StoredPrefix] | list[StoredBranch] | tuple[int, ...] | int | bool | None


class Inquiries:
    def __init__(
        self, cache: PrefixCache, slots: Slots, saver: SlotSaver, warm_start: WarmStart
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._saver = saver
        self._warm_start = warm_start

    def answer(self, question: Question) -> Answer:
        if not isinstance(question, LookUp):
            self._cache.wait_for_index()
        match question:
            case LookUp(tokens, namespace):
                return self._forecast(tokens, namespace)
            case ListStored(namespace, limit):
                return self._cache.contents.listed(self._cache.root_of(namespace), limit)
            case Forget(key, namespace):
                return self._forget(key, namespace)
            case ShowForest(namespace, limit):
                return self._cache.contents.forest(self._cache.root_of(namespace), limit)
            case ReadTokens(key, namespace):
                return self._cache.contents.tokens(self._cache.root_of(namespace), key)
            case PinStored(key, namespace, seconds):
                return self._cache.pin_stored(namespace, key, seconds)

    def _forecast(self, tokens: tuple[int, ...], namespace: str) -> Forecast:
        own = list(tokens)
        sequence = Sequence(
            request=GenerationRequest(
                id="",
                prompt=tokens,
                boundaries=(),
                sampling=Sampling(),
                max_tokens=None,
                terms=CacheTerms(namespace=namespace),
            ),
            arrived_at=time.monotonic(),
            max_length=len(own),
            tokens=own,
            keys=self._cache.keys(own, namespace),
        )
        self._cache.look_up(sequence.keys, len(own) - 1)
        start = self._warm_start.find(sequence)
        restore_seconds: float | None = 0.0
        if start.match is not None and start.n_stored:
            restore_seconds = self._cache.gate.load_seconds(start.match, n_live=start.n_live)
        per_token = self._saver.prefill_seconds_per_token
        return Forecast(
            n_prompt=len(own),
            spans=_spans(start),
            restore_seconds=restore_seconds,
            prefill_seconds=None if per_token is None else per_token * (len(own) - start.n_tokens),
        )

    def _forget(self, key: str | None, namespace: str) -> int:
        n_gone, prefix = self._cache.forget(namespace, key)
        if prefix is None:
            return 0
        root = self._cache.root_of(namespace)
        for slot in self._slots.idle():
            assert slot.keys is not None
            held = slot.keys.between(0, slot.n_rows)
            if slot.keys.root == root and held.startswith(prefix):
                n_gone += key is None  # of a key, what is live is stored as well
                self._saver.clear(slot)
        return n_gone


def _spans(start: Start) -> tuple[CachedSpan, ...]:
    spans = [CachedSpan(CacheSource.LIVE, 0, start.n_live)] if start.n_live else []
    for source, stop in _stored(start.match, start.n_stored) if start.match else ():
        begin = spans[-1].stop if spans else 0
        if stop <= begin:
            continue
        if spans and spans[-1].source is source:
            begin = spans.pop().start
        spans.append(CachedSpan(source, begin, stop))
    return tuple(spans)


def _stored(match: Match, n_stored: int) -> list[tuple[CacheSource, int]]:
    """Where each of the entries is, and up to which position it would be used."""
    entries = [*match.blocks, *([match.checkpoint] if match.checkpoint else [])]
    return [(node.where.cheapest, min(node.stop, n_stored)) for node in entries]
