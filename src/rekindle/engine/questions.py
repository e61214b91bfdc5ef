"""Answers to questions about live and stored prefixes, given on the engine thread between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.prefix_finder import PrefixFinder, Start
from rekindle.engine.sequence import new_sequence
from rekindle.engine.slots import Slots
from rekindle.generation.events import NO_SPANS, CacheSource, Spans
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix


@dataclass(frozen=True, slots=True)
class EnginePrefixes:
    """The `generation.PrefixStore` of the engine thread."""

    _cache: PrefixCache
    _slots: Slots
    _saver: SlotSaver
    _finder: PrefixFinder

    def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        n_prompt = len(tokens)
        request = GenerationRequest(
            id="",
            prompt=tuple(tokens),
            boundaries=(),
            sampling=Sampling(),
            max_tokens=None,
            terms=CacheTerms(namespace=namespace),
        )
        sequence = new_sequence(request, self._cache, n_ctx=n_prompt)
        self._cache.look_up(sequence.keys, n_prompt - 1)
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

    def list_stored(self, *, namespace: str, limit: int) -> list[StoredPrefix]:
        return self._cache.contents.listed(self._indexed_root(namespace), limit)

    def forest(self, *, namespace: str, limit: int) -> list[StoredBranch]:
        return self._cache.contents.forest(self._indexed_root(namespace), limit)

    def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        return self._cache.contents.tokens(self._indexed_root(namespace), key)

    def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        self._cache.wait_for_index()
        return self._cache.pin_stored(namespace, key, seconds)

    def forget(self, key: str | None, *, namespace: str) -> int:
        root = self._indexed_root(namespace)
        n_dropped, prefix = self._cache.forget(namespace, key)
        if prefix is None:
            return 0
        for slot in self._slots.idle():
            assert slot.keys is not None
            held = slot.keys.between(0, slot.n_rows)
            if slot.keys.root == root and held.startswith(prefix):
                # With a key, the live rows are those of stored entries, counted already.
                n_dropped += key is None
                self._saver.clear(slot)
        return n_dropped

    def _indexed_root(self, namespace: str) -> bytes:
        """Return the namespace's root, once the index knows every entry on disk."""
        self._cache.wait_for_index()
        return self._cache.root_of(namespace)


def _spans(start: Start) -> Spans:
    """Return each source up to where its rows would be used; for an entry, its nearest tier."""
    spans = NO_SPANS.extended(CacheSource.LIVE, start.n_live)
    for node in start.match.nodes if start.match else ():
        spans = spans.extended(node.where.cheapest, min(node.stop, start.n_stored))
    return spans
