"""A Backend without a model that checks every position and counts computed tokens.

The fake has all model classes and counts cells one by one. A mistake that llama.cpp would answer
with wrong logits (a missing checkpoint, rows of another prefix) is an AssertionError here.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from rekindle.engine.backend import Backend
from rekindle.errors import ContextFull, DecodeFailed, EngineError, InvalidRequest
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import ModelClass, Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling

END = 0  # the only end-of-generation token

ROWS, CHECKPOINT = b"rows", b"checkpoint"

_PREFIXES: dict[bytes, list[int]] = {}  # by digest

_STATE_ONLY = frozenset({ModelClass.RECURRENT, ModelClass.OPAQUE})  # no rows beside the state


def next_token(prefix: Sequence[int]) -> int:
    """Return a token that depends on the whole prefix, so that any wrong row changes it."""
    return 1 + zlib.crc32(b",".join(b"%d" % token for token in prefix)) % 9_999


class InspectedBackend(Backend, Protocol):
    """A backend whose slots a test can measure."""

    def clear_all(self) -> None: ...

    def n_positions(self, slot: int) -> int: ...


class FakeSampler:
    def __init__(
        self, *, n_left: int = 0, is_landing: bool = False, state: tuple[float, ...] = ()
    ) -> None:
        self.closed = False
        self.state = state  # with Mirostat: the number of tokens that were sampled
        self.n_left = n_left  # when it was made
        self.is_landing = is_landing

    def forced_tokens(self) -> list[int]:
        return []

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Transfer(NamedTuple):
    """An export or an import: of rows [start, stop), or of the checkpoint at `stop`."""

    kind: bytes
    slot: int
    start: int
    stop: int


@dataclass(slots=True)
class FakeSlot:
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)  # one per position, shared by copies
    window_start: int = 0
    lacks_checkpoint: bool = False
    is_in_disorder: bool = False  # a decode failed in the middle


class FakeBackend:
    eog_tokens = frozenset({END})
    logits_bytes = 8  # here, a digest of the tokens before them

    def __init__(
        self,
        *,
        model_class: ModelClass = ModelClass.DENSE,
        n_slots: int = 4,
        n_cells: int = 4096,
        n_ubatch: int = 512,
        window: int = 128,
        window_slack: int = 32,  # positions before the window that are still there
        off_because: str | None = None,
        reply: Callable[[Sequence[int]], int] = next_token,
        lands_at: int | None = None,  # this token and all after it are forced
        n_draft_rows: int = 0,
    ) -> None:
        self.n_slots = n_slots
        self.n_cells = n_cells
        self.n_draft_rows = n_draft_rows
        self.n_ctx = n_cells
        self.n_ubatch = n_ubatch
        self.traits = StateTraits(
            model_class,
            has_rows=model_class not in _STATE_ONLY,
            has_checkpoints=model_class is not ModelClass.DENSE,
            off_because=off_because,
        )
        self.slots: dict[int, FakeSlot] = {}  # those that are not empty
        self.samplers: list[FakeSampler] = []
        self.batches: list[list[int]] = []  # per decode: how many tokens each slot got
        self.exports: list[Transfer] = []
        self.imports: list[Transfer] = []
        self.copies: list[tuple[int, int]] = []  # source, target
        self.trims: list[tuple[int, int]] = []  # slot, n_keep
        self.n_times_cleared = 0  # all of it
        self.decode_failures: list[DecodeFailed | ContextFull] = []
        self.export_failures: list[EngineError] = []
        self.import_failures: list[EngineError] = []
        self.pays_for_holes = False
        self.on_gpu = False
        self.n_waits = 0
        self.n_sampled_from_stored = 0
        self.has_room_to_move = True
        self.moved: list[int] = []  # slots
        self.move_failures: list[DecodeFailed] = []
        self.lands_at = lands_at
        self.fail_sampling_of: set[int] = set()  # last tokens whose row cannot be sampled
        self._model_class = model_class
        self._window = window
        self._window_slack = window_slack
        self._reply = reply
        self._rows: list[list[int]] = []
        self._cell_names = count()
        self._cell_users: Counter[int] = Counter()

    @property
    def n_computed(self) -> int:
        return sum(sum(batch) for batch in self.batches)

    @property
    def n_cells_used(self) -> int:
        return len(self._cell_users)

    def tokens(self, slot: int) -> list[int]:
        return self.slots[slot].tokens if slot in self.slots else []

    def wait(self) -> None:
        self.n_waits += 1

    def decode(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> None:
        if self.decode_failures:
            failure = self.decode_failures.pop(0)
            if isinstance(failure, DecodeFailed) and not failure.rows_intact:
                self._bring_into_disorder(slots)
            raise failure
        for slot in set(slots):
            assert 0 <= slot < self.n_slots
            self._assert_usable(slot)
        cells = self._new_cells(len(tokens))
        self._rows = []
        for index, (token, position, slot) in enumerate(zip(tokens, positions, slots, strict=True)):
            held = self.slots.setdefault(slot, FakeSlot())
            n_held = len(held.tokens)
            assert position == n_held, f"slot {slot} expects position {n_held}"
            held.tokens.append(token)
            held.cells += cells[index : index + 1]
            held.window_start = max(
                held.window_start, n_held + 1 - self._window - self._window_slack
            )
            if index in outputs:
                self._rows.append(list(held.tokens))
        self.batches.append([list(slots).count(slot) for slot in dict.fromkeys(slots)])

    def sample(
        self, samplers: Sequence[FakeSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        assert not any(sampler.closed for sampler in samplers)
        return [self._sample(*each) for each in zip(samplers, rows, strict=True)]

    def logits(self, row: int) -> bytes:
        digest = _digest(self._rows[row])
        _PREFIXES[digest] = self._rows[row]
        return digest

    def sample_stored(self, sampler: FakeSampler, logits: Payload) -> TokenSampled | Exception:
        self.n_sampled_from_stored += 1
        return self._sample_after(sampler, _PREFIXES[bytes(logits)])

    def _sample(self, sampler: FakeSampler, row: int) -> TokenSampled | Exception:
        return self._sample_after(sampler, self._rows[row])

    def _sample_after(self, sampler: FakeSampler, held: list[int]) -> TokenSampled | Exception:
        if held[-1] in self.fail_sampling_of:
            return ValueError("no token fits")
        token = self._reply(held)
        sampler.is_landing |= token == self.lands_at
        sampler.state = tuple(n + 1 for n in sampler.state)
        return TokenSampled(token, lands=sampler.is_landing, sampler_state=sampler.state)

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
    ) -> FakeSampler:
        if sampling.grammar is not None:
            self.check_grammar(sampling.grammar)
        state = state or (0.0,) * bool(sampling.mirostat)
        self.samplers.append(FakeSampler(n_left=n_left, is_landing=is_landing, state=state))
        return self.samplers[-1]

    def check_grammar(self, grammar: Grammar) -> None:
        if grammar.source == "bad":
            raise InvalidRequest("bad grammar")

    def compiles_quickly(self, grammar: Grammar) -> bool:
        return not grammar.source.startswith("heavy")

    def prepare_grammars(self) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        if slot in self.slots:
            self._free(self.slots.pop(slot).cells)

    def clear_all(self) -> None:
        self.n_times_cleared += 1
        for slot in list(self.slots):
            self.clear_slot(slot)

    def can_trim(self, slot: int, n_keep: int) -> bool:
        self._assert_usable(slot)
        n_held = len(self.tokens(slot))
        assert 0 <= n_keep <= n_held
        if n_keep in (0, n_held) or self._model_class is ModelClass.DENSE:
            return True
        if self._model_class is not ModelClass.SLIDING_WINDOW:
            return False
        return self.slots[slot].window_start <= max(0, n_keep - self._window + 1)

    def trim_slot(self, slot: int, n_keep: int) -> None:
        assert self.can_trim(slot, n_keep)
        self.trims.append((slot, n_keep))
        if n_keep == 0:
            self.clear_slot(slot)
            return
        held = self.slots[slot]
        self._free(held.cells[n_keep:])
        del held.tokens[n_keep:], held.cells[n_keep:]

    def drop_draft(self, slot: int, n_keep: int) -> None:
        assert n_keep > 0
        self.trim_slot(slot, n_keep)

    def copy_slot(self, source: int, target: int) -> None:
        assert target not in self.slots
        self._assert_usable(source)
        held = self.slots[source]
        is_opaque = self._model_class is ModelClass.OPAQUE
        cells = self._new_cells(len(held.tokens)) if is_opaque else list(held.cells)
        if not is_opaque:
            self._cell_users.update(cells)
        self.slots[target] = FakeSlot(
            list(held.tokens), cells, max(0, len(held.tokens) - self._window)
        )
        self.copies.append((source, target))

    def expect_exports(self, n_rows: int) -> None:
        pass

    def export_rows(self, slot: int, start: int, stop: int) -> memoryview:
        assert self.traits.has_rows
        self._assert_usable(slot)
        tokens = self.tokens(slot)
        assert 0 <= start < stop <= len(tokens)
        if self.export_failures:
            raise self.export_failures.pop(0)
        self.exports.append(Transfer(ROWS, slot, start, stop))
        return self._pack(ROWS, tokens, start, stop)

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        assert self.traits.has_rows
        self._fail_import_if_told(slot)
        first, before, tokens = self._unpack(ROWS, rows)
        held = self.slots.get(slot, FakeSlot())
        assert not held.is_in_disorder
        assert len(held.tokens) == start, f"slot {slot} holds {len(held.tokens)}, not {start}"
        assert first <= start < stop <= first + len(tokens)
        assert _digest(held.tokens[:first]) == before, "these rows follow another prefix"
        assert held.tokens[first:] == tokens[: start - first], "these rows are of another prefix"
        # All of the block is in the context for a moment, also what is not taken from it.
        cells = self._new_cells(len(tokens), or_clear=slot)
        taken = slice(start - first, stop - first)
        self._free([*cells[: taken.start], *cells[taken.stop :]])
        held.tokens += tokens[taken]
        held.cells += cells[taken]
        held.lacks_checkpoint = self.traits.has_checkpoints
        self.slots[slot] = held
        self.imports.append(Transfer(ROWS, slot, start, stop))

    def export_checkpoint(self, slot: int) -> memoryview:
        assert self.traits.has_checkpoints
        self._assert_usable(slot)
        tokens = self.tokens(slot)
        assert tokens
        if self.export_failures:
            raise self.export_failures.pop(0)
        self.exports.append(Transfer(CHECKPOINT, slot, len(tokens), len(tokens)))
        return self._pack(CHECKPOINT, tokens, 0, len(tokens))

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        assert self.traits.has_checkpoints
        self._fail_import_if_told(slot)
        _, _, tokens = self._unpack(CHECKPOINT, checkpoint)
        if self._model_class in _STATE_ONLY:
            self.clear_slot(slot)
            self.slots[slot] = FakeSlot(tokens, self._new_cells(len(tokens), or_clear=slot))
        held = self.slots.get(slot, FakeSlot())
        assert not held.is_in_disorder
        assert held.tokens == tokens, "this checkpoint is of another prefix"
        held.lacks_checkpoint = False
        held.window_start = max(0, len(tokens) - self._window)
        self.imports.append(Transfer(CHECKPOINT, slot, len(tokens), len(tokens)))

    def move_down(self, slot: int, start: int = 0) -> None:
        """Check that the cells belong to this slot alone. Their order does not matter here."""
        others = [cell for id, other in self.slots.items() if id != slot for cell in other.cells]
        assert not set(self.slots[slot].cells[start:]) & set(others)
        if self.move_failures:
            self._bring_into_disorder([slot])
            raise self.move_failures.pop(0)
        self.moved.append(slot)

    def n_positions(self, slot: int) -> int:
        # llama.cpp does not know before: it may say 0, or where the window ended.
        assert slot not in self.slots or not self.slots[slot].lacks_checkpoint
        return len(self.tokens(slot))

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        held = Counter(cell for slot in self.slots.values() for cell in slot.cells)
        assert held == self._cell_users, "cells are lost"

    def _assert_usable(self, slot: int) -> None:
        if held := self.slots.get(slot):
            assert not held.lacks_checkpoint, f"slot {slot} has rows without their checkpoint"
            assert not held.is_in_disorder, f"slot {slot} was not cleared after a failed decode"

    def _bring_into_disorder(self, slots: Iterable[int]) -> None:
        """Mark slots as unusable. With a recurrent state, all other slots become so too."""
        is_local = self._model_class in (ModelClass.DENSE, ModelClass.SLIDING_WINDOW)
        for slot in slots if is_local else list(self.slots):
            self.slots.setdefault(slot, FakeSlot()).is_in_disorder = True

    def _fail_import_if_told(self, slot: int) -> None:
        if self.import_failures:
            self.clear_slot(slot)
            raise self.import_failures.pop(0)

    def _new_cells(self, n_cells: int, *, or_clear: int | None = None) -> list[int]:
        if self._model_class is ModelClass.RECURRENT:
            return []  # a state is of one size, however long the slot
        if self.n_cells_used + n_cells > self.n_cells:
            if or_clear is not None:
                self.clear_slot(or_clear)
            raise ContextFull("fake context is full")
        cells = [next(self._cell_names) for _ in range(n_cells)]
        self._cell_users.update(cells)
        return cells

    def _free(self, cells: Sequence[int]) -> None:
        for cell in cells:
            self._cell_users[cell] -= 1
            if not self._cell_users[cell]:
                del self._cell_users[cell]

    def _pack(self, kind: bytes, tokens: list[int], start: int, stop: int) -> memoryview:
        words = np.array([start, *tokens[start:stop]], dtype="<u4").tobytes()
        label = b"|".join(
            (kind, self._model_class.encode(), _digest(tokens[:start]).hex().encode())
        )
        return memoryview(label + b"|" + words)

    def _unpack(self, kind: bytes, payload: Payload) -> tuple[int, bytes, list[int]]:
        packed_kind, model_class, before, words = bytes(payload).split(b"|", 3)
        assert (packed_kind, model_class) == (kind, self._model_class.encode())
        start, *tokens = np.frombuffer(words, dtype="<u4").tolist()
        return start, bytes.fromhex(before.decode()), tokens


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(np.array(tokens, dtype="<u4").tobytes(), digest_size=8).digest()


def expected_reply(
    prompt: Sequence[int], n_tokens: int, reply: Callable[[Sequence[int]], int] = next_token
) -> list[int]:
    """Return the reply of a request that runs alone."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        tokens.append(reply(tokens))
    return tokens[len(prompt) :]
