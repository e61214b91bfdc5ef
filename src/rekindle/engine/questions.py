"""Questions about live and stored prefixes, answered on the engine thread between two steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from rekindle.cache.index import Match
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.prefix_finder import PrefixFinder, Start
from rekindle.engine.sequence import new_sequence
from rekindle.engine.slots import Slots
from rekindle.generation.events import NO_SPANS, CacheSource, Spans
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix

T = TypeVar("T")


class EngineView(NamedTuple):
    """Objects of the engine thread that an answer is read from."""

    cache: PrefixCache
    slots: Slots
    saver: SlotSaver
    finder: PrefixFinder


class Question(ABC, Generic[T]):
    @abstractmethod
    def answer(self, engine: EngineView) -> T: ...


@dataclass(frozen=True, slots=True)
class LookUp(Question[Forecast]):
    tokens: tuple[int, ...]
    namespace: str

    def answer(self, engine: EngineView) -> Forecast:
        n_prompt = len(self.tokens)
        request = GenerationRequest(
            id="",
            prompt=self.tokens,
            boundaries=(),
            sampling=Sampling(),
            max_tokens=None,
            terms=CacheTerms(namespace=self.namespace),
        )
        sequence = new_sequence(request, engine.cache, n_ctx=n_prompt)
        engine.cache.look_up(sequence.keys, n_prompt - 1)
        start = engine.finder.find(sequence)
        restore_seconds: float | None = 0.0
        if start.match is not None and start.n_stored:
            restore_seconds = engine.cache.gate.load_seconds(start.match, n_live=start.n_live)
        per_token = engine.saver.prefill_seconds_per_token
        return Forecast(
            n_prompt=n_prompt,
            spans=_spans(start),
            restore_seconds=restore_seconds,
            prefill_seconds=None if per_token is None else per_token * (n_prompt - start.n_tokens),
        )


@dataclass(frozen=True, slots=True)
class ListStored(Question[list[StoredPrefix]]):
    namespace: str
    limit: int

    def answer(self, engine: EngineView) -> list[StoredPrefix]:
        engine.cache.wait_for_index()
        return engine.cache.contents.listed(engine.cache.root_of(self.namespace), self.limit)


@dataclass(frozen=True, slots=True)
class ListBranches(Question[list[StoredBranch]]):
    namespace: str
    limit: int

    def answer(self, engine: EngineView) -> list[StoredBranch]:
        engine.cache.wait_for_index()
        return engine.cache.contents.forest(engine.cache.root_of(self.namespace), self.limit)


@dataclass(frozen=True, slots=True)
class ReadTokens(Question[tuple[int, ...] | None]):
    key: str
    namespace: str

    def answer(self, engine: EngineView) -> tuple[int, ...] | None:
        engine.cache.wait_for_index()
        return engine.cache.contents.tokens(engine.cache.root_of(self.namespace), self.key)


@dataclass(frozen=True, slots=True)
class PinStored(Question[bool]):
    key: str
    namespace: str
    seconds: float  # 0: unpin

    def answer(self, engine: EngineView) -> bool:
        engine.cache.wait_for_index()
        return engine.cache.pin_stored(self.namespace, self.key, self.seconds)


@dataclass(frozen=True, slots=True)
class Forget(Question[int]):
    key: str | None  # None: every entry of the namespace
    namespace: str

    def answer(self, engine: EngineView) -> int:
        engine.cache.wait_for_index()
        n_dropped, prefix = engine.cache.forget(self.namespace, self.key)
        if prefix is None:
            return 0
        root = engine.cache.root_of(self.namespace)
        for slot in engine.slots.idle():
            assert slot.keys is not None
            held = slot.keys.between(0, slot.n_rows)
            if slot.keys.root == root and held.startswith(prefix):
                # With a key, the live rows are those of stored entries, counted already.
                n_dropped += self.key is None
                engine.saver.clear(slot)
        return n_dropped


def _spans(start: Start) -> Spans:
    spans = NO_SPANS.extended(CacheSource.LIVE, start.n_live)
    for source, stop in _stored(start.match, start.n_stored) if start.match else ():
        spans = spans.extended(source, stop)
    return spans


def _stored(match: Match, n_stored: int) -> list[tuple[CacheSource, int]]:
    """Return for each entry its nearest tier and the position up to which it would be used."""
    entries = [*match.blocks, *([match.checkpoint] if match.checkpoint else [])]
    return [(node.where.cheapest, min(node.stop, n_stored)) for node in entries]
