"""Writes one block of a slot's rows, its state, or the end of its prompt to the cache."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.entry_writer import Export, Saved
from rekindle.cache.policy import Speed
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.slots import Slot
from rekindle.errors import EngineError
from rekindle.generation.model_state import Payload

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SlotWriter:
    _backend: Backend
    _cache: PrefixCache
    _compute_seconds: Callable[[int], float]  # of a prefill of that many tokens
    speed: Speed = field(default_factory=Speed)
    fastest: float = 0.0  # bytes per second

    def save_rows(self, slot: Slot, stop: int, reason: Reason) -> Saved:
        """Store the block of the first row that is not saved, up to `stop`."""
        assert slot.keys is not None
        start = slot.n_saved // BLOCK_TOKENS * BLOCK_TOKENS
        export = self._export(
            slot, lambda: self._export_rows(slot, start, stop), reason, stop - start
        )
        try:
            saved = self._cache.writer.save_rows(slot.keys, start, stop, export)
        except EngineError as error:
            saved = _not_exported(error)
        if saved is not Saved.LATER:
            slot.n_saved = stop
        return saved

    def save_checkpoint(self, slot: Slot, reason: Reason) -> Saved:
        assert slot.keys is not None
        n_new = max(slot.n_rows - slot.n_checkpoint, 1)
        export = self._export(slot, lambda: self._backend.export_checkpoint(slot.id), reason, n_new)
        try:
            saved = self._cache.writer.save_checkpoint(slot.keys, slot.n_rows, export)
        except EngineError as error:
            saved = _not_exported(error)
        if saved is not Saved.LATER:
            slot.n_checkpoint = slot.n_rows
        return saved

    def save_end(self, slot: Slot, n_prompt: int) -> Saved:
        """Store the logits after a prompt, as a checkpoint: they are a state at one position."""
        assert slot.keys is not None
        end = slot.ends[n_prompt]
        export = self._export(slot, lambda: end.logits, Reason.PREFILL, n_tokens=1)
        saved = self._cache.writer.save_checkpoint(slot.keys, n_prompt, export)
        end.is_saved = saved is not Saved.LATER
        return saved

    def _export(
        self, slot: Slot, run: Callable[[], Payload], reason: Reason, n_tokens: int
    ) -> Export:
        return Export(
            run=run,
            reason=reason,
            compute_seconds=self._compute_seconds(n_tokens),
            was_reused=slot.was_reused,
            terms=slot.terms,
        )

    def _export_rows(self, slot: Slot, start: int, stop: int) -> Payload:
        """Return the rows, or an empty payload for a model without rows.

        An empty block is still stored: the index needs it to reach the checkpoints after it.
        """
        if not self._backend.traits.has_rows:
            return b""
        began = time.perf_counter()
        rows = self._backend.export_rows(slot.id, start, stop)
        seconds = time.perf_counter() - began
        self.speed.observe(len(rows), seconds)
        self.fastest = max(self.fastest, len(rows) / seconds)
        return rows


def _not_exported(error: EngineError) -> Saved:
    """Log a failed export. The request continues: the rows in the slot are intact."""
    _log.warning("engine: slot export failed: %s", error.message)
    return Saved.REFUSED
