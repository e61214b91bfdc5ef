"""A wrapper of any Backend that tracks the tokens of each slot and checks restored state.

A restored slot is exported again and compared with what was put into it, byte for byte.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.backend import Sampler
from rekindle.errors import EngineError
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling
from tests.support.fake_backend import CHECKPOINT, ROWS, InspectedBackend

LOGITS = b"logits"


class Origin(NamedTuple):
    """Names some state bytes: rows [start, len(tokens)), or the checkpoint behind them."""

    start: int
    tokens: tuple[int, ...]


class Ledger:
    """All exports so far. A ledger outlives backends, as a cache directory does."""

    def __init__(self) -> None:
        # A set: rows without a layer that they belong to are equal for all tokens.
        self._origins: defaultdict[tuple[bytes, bytes], set[Origin]] = defaultdict(set)

    def note(self, kind: bytes, payload: Payload, origin: Origin) -> None:
        self._origins[kind, _digest(payload)].add(origin)

    def origins(self, kind: bytes, payload: Payload) -> set[Origin]:
        return self._origins[kind, _digest(payload)]


class Piece(NamedTuple):
    start: int
    stop: int
    payload: Payload
    origin: Origin


class Scored(NamedTuple):
    """The logits that a token was sampled from, and all that came before it."""

    tokens: tuple[int, ...]
    logits: NDArray[np.float32]


class WatchedSampler:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.is_closed = False

    def forced_tokens(self) -> Sequence[int]:
        forced: Sequence[int] = self.inner.forced_tokens()
        return forced

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.inner.close()


class Witness(Protocol):
    """A view of the engine."""

    def wanted(self, slot: int) -> Sequence[int]:
        """Return the tokens that the slot should hold, now or later."""
        ...

    def may_export(self, slot: int) -> bool: ...

    def on_decode(self, n_tokens: int) -> None: ...


class AuditedBackend:
    """`spare_slot` and `n_spare_cells` are kept from the engine, to hold one payload alone."""

    def __init__(
        self,
        inner: InspectedBackend,
        ledger: Ledger,
        *,
        spare_slot: int | None = None,
        n_spare_cells: int = 0,
        read_logits: Callable[[], NDArray[np.float32]] | None = None,
        canonical: Callable[[bytes, Payload], bytes] = lambda kind, payload: bytes(payload),
    ) -> None:
        self.inner = inner
        self.n_slots = inner.n_slots if spare_slot is None else spare_slot
        self.n_cells = inner.n_cells - n_spare_cells
        self.n_ctx = min(inner.n_ctx, self.n_cells)
        self.n_ubatch = inner.n_ubatch
        self.n_draft_rows = inner.n_draft_rows
        self.eog_tokens = inner.eog_tokens
        self.on_gpu = inner.on_gpu
        self.logits_bytes = inner.logits_bytes
        self.traits: StateTraits = inner.traits
        self.samplers: list[WatchedSampler] = []
        self.scored: list[Scored] = []
        self.export_failures: list[EngineError] = []
        self.n_pieces_compared = 0
        self.witness: Witness  # set by the code that makes the engine
        self._ledger = ledger
        self._spare_slot = spare_slot
        self._read_logits = read_logits
        self._canonical = canonical
        self._held: defaultdict[int, list[int]] = defaultdict(list)
        self._pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        self._output_slots: list[int] = []

    def tokens(self, slot: int) -> list[int]:
        return self._held[slot]

    def decode(
        self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
    ) -> None:
        self.inner.decode(list(tokens), list(positions), list(slots), list(outputs))
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            assert not self._pieces[slot], f"slot {slot} has rows without their checkpoint"
            assert position == len(self._held[slot])
            self._held[slot].append(token)
        self._output_slots = [slots[index] for index in outputs]
        self.witness.on_decode(len(tokens))

    def sample(
        self, samplers: Sequence[WatchedSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        assert not any(sampler.is_closed for sampler in samplers)
        if self._read_logits is not None:
            logits = self._read_logits()
            for row in rows:
                held = tuple(self._held[self._output_slots[row]])
                self.scored.append(Scored(held, logits[row].copy()))
        return self.inner.sample([sampler.inner for sampler in samplers], rows)

    def logits(self, row: int) -> Payload:
        payload = self.inner.logits(row)
        held = tuple(self._held[self._output_slots[row]])
        return self._note(LOGITS, payload, Origin(len(held), held))

    def sample_stored(self, sampler: WatchedSampler, logits: Payload) -> TokenSampled | Exception:
        assert not sampler.is_closed
        origins = self._ledger.origins(LOGITS, logits)
        assert origins, "these logits were never computed"
        if self._read_logits is not None:
            [tokens] = {origin.tokens for origin in origins}
            self.scored.append(Scored(tokens, np.frombuffer(logits, np.float32).copy()))
        return self.inner.sample_stored(sampler.inner, logits)

    def new_sampler(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        n_reply: int,
        n_top_logprobs: int | None,
        *,
        n_left: int = 0,
        is_landing: bool = False,
        state: tuple[float, ...] = (),
    ) -> Sampler:
        sampler = self.inner.new_sampler(
            sampling,
            tokens,
            n_reply,
            n_top_logprobs,
            n_left=n_left,
            is_landing=is_landing,
            state=state,
        )
        self.samplers.append(WatchedSampler(sampler))
        return self.samplers[-1]

    def check_grammar(self, grammar: Grammar) -> None:
        self.inner.check_grammar(grammar)

    def compiles_quickly(self, grammar: Grammar) -> bool:
        return self.inner.compiles_quickly(grammar)

    def prepare_grammars(self) -> None:
        self.inner.prepare_grammars()

    def clear_slot(self, slot: int) -> None:
        self.inner.clear_slot(slot)
        self._forget(slot)

    def clear_all(self) -> None:
        self.inner.clear_all()
        for slot in range(self.n_slots):
            self._forget(slot)

    def can_trim(self, slot: int, n_keep: int) -> bool:
        return self.inner.can_trim(slot, n_keep)

    def trim_slot(self, slot: int, n_keep: int) -> None:
        self.inner.trim_slot(slot, n_keep)
        del self._held[slot][n_keep:]

    def drop_draft(self, slot: int, n_keep: int) -> None:
        self.inner.drop_draft(slot, n_keep)
        del self._held[slot][n_keep:]

    def copy_slot(self, source: int, target: int) -> None:
        assert not self._held[target]
        self.inner.copy_slot(source, target)
        self._held[target] = list(self._held[source])

    def expect_exports(self, n_rows: int) -> None:
        self.inner.expect_exports(n_rows)

    def export_rows(self, slot: int, start: int, stop: int) -> Payload:
        self._begin_export(slot)
        payload = self.inner.export_rows(slot, start, stop)
        return self._note(ROWS, payload, Origin(start, tuple(self._held[slot][:stop])))

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        wanted = list(self.witness.wanted(slot)[:stop])
        origins = self._ledger.origins(ROWS, rows)
        fitting = [each for each in origins if _has(each, start, wanted)]
        assert fitting, "these rows were never exported of this prefix"
        assert self._held[slot] == wanted[:start]
        self._import(slot, lambda: self.inner.import_rows(slot, start, stop, rows))
        self._held[slot] = wanted
        self._pieces[slot].append(Piece(start, stop, bytes(rows), fitting[0]))
        if not self.traits.has_checkpoints:
            self._audit(slot)

    def export_checkpoint(self, slot: int) -> Payload:
        self._begin_export(slot)
        held = tuple(self._held[slot])
        return self._note(CHECKPOINT, self.inner.export_checkpoint(slot), Origin(len(held), held))

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        wanted = tuple(self.witness.wanted(slot))
        origins = self._ledger.origins(CHECKPOINT, checkpoint)
        fitting = [tokens for _, tokens in origins if wanted[: len(tokens)] == tokens]
        assert fitting, "this checkpoint was never exported of this prefix"
        [tokens] = map(list, fitting)
        assert not self.traits.has_rows or self._held[slot] == tokens
        self._import(slot, lambda: self.inner.import_checkpoint(slot, checkpoint))
        self._held[slot] = tokens
        assert self.inner.n_positions(slot) == len(tokens)
        assert self._are_equal(CHECKPOINT, self.inner.export_checkpoint(slot), checkpoint)
        self.n_pieces_compared += 1
        self._audit(slot)

    @property
    def pays_for_holes(self) -> bool:
        return self.inner.pays_for_holes

    def wait(self) -> None:
        self.inner.wait()

    @property
    def has_room_to_move(self) -> bool:
        return self.inner.has_room_to_move

    def move_down(self, slot: int, start: int = 0) -> None:
        self.inner.move_down(slot, start)
        self._audit(slot)

    def n_positions(self, slot: int) -> int:
        return self.inner.n_positions(slot)

    def warm_up(self) -> None:
        self.inner.warm_up()
        self.traits = self.inner.traits

    def close(self) -> None:
        self.inner.close()

    def _begin_export(self, slot: int) -> None:
        assert self.witness.may_export(slot)
        if self.export_failures:
            raise self.export_failures.pop(0)

    def _note(self, kind: bytes, payload: Payload, origin: Origin) -> Payload:
        self._ledger.note(kind, payload, origin)
        return payload

    def _import(self, slot: int, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception:
            self._forget(slot)
            raise

    def _audit(self, slot: int) -> None:
        for piece in self._pieces.pop(slot, []):
            held = self.inner.export_rows(slot, piece.start, piece.stop)
            expected = self._rows_alone(piece)
            if expected is not None:
                assert self._are_equal(ROWS, held, expected), f"rows of {piece[:2]} changed"
                self.n_pieces_compared += 1

    def _rows_alone(self, piece: Piece) -> Payload | None:
        """Return the rows as exported by a slot that holds only this payload."""
        first, last = piece.origin.start, len(piece.origin.tokens)
        if (piece.start, piece.stop) == (first, last):
            return piece.payload
        if self._spare_slot is None:
            return None
        self.inner.import_rows(self._spare_slot, first, last, piece.payload)
        rows = bytes(self.inner.export_rows(self._spare_slot, piece.start, piece.stop))
        self.inner.clear_slot(self._spare_slot)
        return rows

    def _are_equal(self, kind: bytes, one: Payload, two: Payload) -> bool:
        return one == two or self._canonical(kind, one) == self._canonical(kind, two)

    def _forget(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._pieces.pop(slot, None)


def _has(origin: Origin, start: int, tokens: list[int]) -> bool:
    """Whether it covers positions [start, len(tokens)) of these tokens."""
    return origin.start <= start and list(origin.tokens[: len(tokens)]) == tokens


def _digest(payload: Payload) -> bytes:
    return blake2b(payload, digest_size=16).digest()
