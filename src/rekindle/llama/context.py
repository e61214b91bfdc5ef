"""A llama.cpp context as the engine's backend: decode a batch, sample rows, manage slots.

One thread owns it; others may only make samplers and check grammars. The batch is allocated
once and filled through numpy arrays.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import ContextFull, DecodeFailed, StartupError
from rekindle.generation.events import TokenSampled
from rekindle.generation.model_state import ModelClass, Payload, StateTraits
from rekindle.generation.request import Grammar, Sampling
from rekindle.llama.compaction import Compactor
from rekindle.llama.grammar.compiler import GrammarCompiler
from rekindle.llama.grammar.lazy import LazyGrammar
from rekindle.llama.grammar.matcher import Matcher
from rekindle.llama.library import first_error, lib, logits_address, recent_errors
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.rope import RopeParams
from rekindle.llama.probe import NOT_PROBED, probe
from rekindle.llama.sampling.dry import DrySamplers
from rekindle.llama.sampling.sampler import LlamaSampler, Logits, RowPlace, greedy_tokens
from rekindle.llama.state import SlotMemory, StateAccess

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

# Enough to save rows in two pieces. Decoding them costs little more than decoding one.
PROBE_TOKENS = 4

N_DRAFT_ROWS = 64  # of a batch, with drafts; each has a row of logits in memory. Picked.


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    n_cells: int  # shared by all slots
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int | None = None  # for several tokens at once; None: as `n_threads`
    flash_attn: str  # auto, on, off
    type_k: str  # f16, q8_0, ...
    type_v: str
    swa_full: bool
    n_draft_rows: int = 0  # the most drafted tokens of one batch
    rope: RopeParams = RopeParams()  # noqa: RUF009 - frozen
    kv_offload: bool = True


class LlamaBackend:
    """Implements `engine.backend.Backend`; the two packages share only that protocol."""

    def __init__(self, model: GgufModel, params: ContextParams) -> None:
        self._model = model
        self._vocabulary = model.vocabulary
        self._grammars = GrammarCompiler(model.vocabulary)
        self._dry_samplers = DrySamplers(model.vocabulary)
        self._context = _make_context(model, params)
        self._memory = SlotMemory(self._context, scratch=params.n_slots)
        self._state = StateAccess(self._memory, ModelClass.OPAQUE)
        self.traits: StateTraits = NOT_PROBED
        self._compactor: Compactor | None = None
        self.pays_for_holes = False
        self._batch = Batch(params.n_batch)
        self.on_gpu = model.has_gpu
        self._output_indices: list[int] = []
        self._logits_place = (0, 0)
        self._logits_view: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)
        self._spare_row: bytearray | None = None  # memory for the next copy of logits
        facts = model.facts
        # llama.cpp never recycles shared cells outside a window, so each slot needs its own
        # window, unless the context keeps every position of the window layers.
        self._has_private_window = facts.n_swa > 0 and not params.swa_full
        self.n_slots = params.n_slots
        self.n_draft_rows = params.n_draft_rows
        self.n_cells: int = lib.llama_n_ctx(self._context)
        longest = params.rope.longest_context(facts.n_ctx_train, facts.trained_rope)
        self.n_ctx = min(self.n_cells, longest or self.n_cells)
        self.n_batch: int = lib.llama_n_batch(self._context)
        self.n_ubatch: int = lib.llama_n_ubatch(self._context)
        self.eog_tokens = self._vocabulary.eog_tokens
        self.logits_bytes = self._vocabulary.n_vocab * np.dtype(np.float32).itemsize

    def decode(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> None:
        """Decode a batch. `outputs` are the batch indices that need logits, ascending."""
        self._memory.empty_spent_scratch()
        status = lib.llama_decode(
            self._context, self._batch.fill(tokens, positions, slots, outputs)
        )
        if status == 1:
            raise ContextFull(f"No room for {len(tokens)} more positions in the context.")
        if status != 0:
            raise DecodeFailed(
                f"llama.cpp could not decode a batch (code {status}).", rows_intact=status == -1
            )
        self._output_indices = outputs

    def wait(self) -> None:
        """Wait for a GPU, where decode returns early. Reading logits would wait with the GIL."""
        if not self.on_gpu:
            return
        if self._spare_row is None and self._output_indices:
            # New memory makes a copy slow. The GPU computes meanwhile.
            self._spare_row = bytearray(self.logits_bytes)
        lib.llama_synchronize(self._context)

    def sample(
        self, samplers: Sequence[LlamaSampler], rows: Sequence[int]
    ) -> list[TokenSampled | Exception]:
        """Sample one token per sampler. A row is an index into the last decode's `outputs`.

        If a sampler fails, its result is the exception; the others continue.
        """
        logits = self._logits()
        if all(sampler.is_plain_greedy for sampler in samplers):
            best = greedy_tokens(logits, rows)
            for sampler, token in zip(samplers, best, strict=True):
                sampler.accept(token)
            return [TokenSampled(token) for token in best]
        results: list[TokenSampled | Exception] = []
        for sampler, row in zip(samplers, rows, strict=True):
            try:
                place = RowPlace(self._context, self._output_indices[row])
                results.append(_sampled(sampler, logits[row], place))
            except Exception as error:  # one reply must not fail another
                results.append(error)
        return results

    def logits(self, row: int) -> memoryview:
        copy, self._spare_row = self._spare_row or bytearray(self.logits_bytes), None
        np.frombuffer(copy, np.float32)[:] = self._logits()[row]
        return memoryview(copy).toreadonly()

    def sample_stored(self, sampler: LlamaSampler, logits: Payload) -> TokenSampled | Exception:
        try:
            return _sampled(sampler, np.frombuffer(logits, np.float32).copy(), None)
        except Exception as error:  # one reply must not fail another
            return error

    def _logits(self) -> NDArray[np.float32]:
        """Return a view of the last decode's logits. Their address rarely changes."""
        place = (logits_address(self._context), len(self._output_indices))
        if place != self._logits_place:
            address, n_rows = place
            n_vocab = self._vocabulary.n_vocab
            buffer = (ctypes.c_float * (n_rows * n_vocab)).from_address(address)
            self._logits_view = np.frombuffer(memoryview(buffer), np.float32).reshape(n_rows, -1)
            self._logits_place = place
        return self._logits_view

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
    ) -> LlamaSampler:
        if not 0 <= sampling.repeat_last_n <= self.n_ctx:
            sampling = replace(sampling, repeat_last_n=self.n_ctx)
        if not 0 <= sampling.dry_penalty_last_n <= self.n_ctx:
            sampling = replace(sampling, dry_penalty_last_n=self.n_ctx)
        grammar = sampling.grammar
        lands = grammar is not None and grammar.landing is not None
        return LlamaSampler(
            sampling,
            self._vocabulary,
            self._dry_samplers,
            grammar=self._grammar(grammar) if grammar else None,
            finder=self._grammars.end_finder(grammar) if grammar and lands else None,
            n_top_logprobs=n_top_logprobs,
            tokens=tokens,
            n_reply=n_reply,
            n_left=n_left,
            is_landing=is_landing,
            state=state,
        )

    def _grammar(self, grammar: Grammar) -> Matcher | LazyGrammar:
        matcher, start = self._grammars.matcher(grammar), grammar.start
        waits = bool(start.triggers) or start.begins_quiet
        return LazyGrammar(matcher, start, self._vocabulary) if waits else matcher

    def check_grammar(self, grammar: Grammar) -> None:
        self._grammars.check(grammar)

    def compiles_quickly(self, grammar: Grammar) -> bool:
        return self._grammars.is_quick(grammar)

    def prepare_grammars(self) -> None:
        self._grammars.prepare()

    def clear_slot(self, slot: int) -> None:
        self._memory.clear(slot)

    def clear_all(self) -> None:
        self._memory.clear_all()

    def can_trim(self, slot: int, n_keep: int) -> bool:
        n_held = self.n_positions(slot)
        assert 0 <= n_keep <= n_held
        if n_keep in (0, n_held) or self.traits.model_class is ModelClass.DENSE:
            return True
        if self.traits.model_class is not ModelClass.SLIDING_WINDOW:
            return False
        # llama.cpp would trim even if the window before the cut is gone.
        window_start = n_keep - self._model.facts.n_swa + 1
        return self._memory.first_position(slot) <= max(0, window_start)

    def trim_slot(self, slot: int, n_keep: int) -> None:
        assert self.can_trim(slot, n_keep)
        is_done = self._memory.clear(slot, n_keep)
        assert is_done

    def drop_draft(self, slot: int, n_keep: int) -> None:
        # A decode reuses only cells outside the window of its first position, so the window before
        # the cut is whole.
        is_done = self._memory.clear(slot, n_keep)
        assert is_done

    def copy_slot(self, source: int, target: int) -> None:
        """Copy `source` into the empty `target`. Only an opaque model's rows are duplicated."""
        if self.traits.model_class is ModelClass.OPAQUE:
            self._state.import_checkpoint(target, self._state.export_checkpoint(source))
            return
        has_window = self._has_private_window and self._state.has_checkpoints
        window = self._state.export_checkpoint(source) if has_window else None
        self._memory.copy(source, target)
        if window is not None:
            self._state.import_checkpoint(target, window)

    def expect_exports(self, n_rows: int) -> None:
        self._state.expect_exports(n_rows)

    def export_rows(self, slot: int, start: int, stop: int) -> memoryview:
        return self._state.export_rows(slot, start, stop)

    def import_rows(self, slot: int, start: int, stop: int, rows: Payload) -> None:
        self._state.import_rows(slot, start, stop, rows)

    def export_checkpoint(self, slot: int) -> memoryview:
        return self._state.export_checkpoint(slot)

    def import_checkpoint(self, slot: int, checkpoint: Payload) -> None:
        self._state.import_checkpoint(slot, checkpoint)

    @property
    def has_room_to_move(self) -> bool:
        return self._compactor is not None and self._compactor.has_room

    def move_down(self, slot: int, start: int = 0) -> None:
        assert self._compactor is not None
        self._compactor.move_down(slot, start)
        lib.llama_synchronize(self._context)

    def n_positions(self, slot: int) -> int:
        return self._memory.n_positions(slot)

    def warm_up(self) -> None:
        """Read every weight once, so that the first request does not wait for it, and probe.

        Call it on the thread that will decode. OpenMP keeps a pool of threads for each thread
        that ever decoded. With more threads than cores they stop spinning, and every decode is
        a third slower.
        """
        n_tokens = min(PROBE_TOKENS, self.n_batch, self.n_ctx)
        tokens = [index % self._vocabulary.n_vocab for index in range(n_tokens)]
        self._state, self.traits = probe(self._memory, self._model.facts, tokens, self._fill)
        if self.traits.model_class is ModelClass.DENSE:
            self._compactor = Compactor(self._memory, self.traits.row_bytes)
            self.pays_for_holes = self.on_gpu

    def _fill(self, tokens: list[int]) -> None:
        self.decode(tokens, list(range(len(tokens))), [0] * len(tokens), [len(tokens) - 1])
        self.wait()

    def close(self) -> None:
        lib.llama_free(self._context)
        self._memory.host_memory.close()


def _sampled(sampler: LlamaSampler, logits: Logits, place: RowPlace | None) -> TokenSampled:
    token, logprobs = sampler.sample(logits, place)
    return TokenSampled(token, logprobs, sampler.is_landing, None, sampler.state)


class Batch:
    """llama.cpp's batch struct over numpy arrays: filling it is a few slice assignments."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._n_slots = np.ones(capacity, dtype=np.int32)
        self._slots = np.zeros(capacity, dtype=np.int32)
        self._wants_logits = np.zeros(capacity, dtype=np.int8)
        # seq_id[i] always points at slots[i]: each token is in exactly one slot.
        base, step = self._slots.ctypes.data, self._slots.itemsize
        self._slot_pointers = np.arange(base, base + capacity * step, step, dtype=np.uint64)
        self._last_slots: list[int] = []
        self._last_outputs: list[int] = []
        self._struct = lib.llama_batch()
        self._point("token", self._tokens)
        self._point("pos", self._positions)
        self._point("n_seq_id", self._n_slots)
        self._point("seq_id", self._slot_pointers)
        self._point("logits", self._wants_logits)

    def fill(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        outputs: list[int],
    ) -> Any:
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        # While the same sequences decode, only tokens and positions change between steps.
        if slots != self._last_slots or outputs != self._last_outputs:
            self._slots[:count] = slots
            self._wants_logits[:count] = 0
            self._wants_logits[outputs] = 1
            self._struct.n_tokens = count
            self._last_slots, self._last_outputs = slots, outputs
        return self._struct

    def _point(self, field: str, array: np.ndarray[Any, Any]) -> None:
        pointer_type = dict(lib.llama_batch._fields_)[field]
        setattr(self._struct, field, ctypes.cast(array.ctypes.data, pointer_type))


def _make_context(model: GgufModel, params: ContextParams) -> Any:
    native = lib.llama_context_default_params()
    native.n_ctx = params.n_cells
    native.n_batch = params.n_batch
    native.n_ubatch = params.n_ubatch
    native.n_seq_max = params.n_slots + 1  # one more for the scratch sequence
    native.n_outputs_max = params.n_slots + 1 + params.n_draft_rows
    native.n_threads = params.n_threads
    native.n_threads_batch = params.n_threads_batch or params.n_threads
    native.flash_attn_type = FLASH_ATTENTION[params.flash_attn]
    native.type_k = getattr(lib, f"GGML_TYPE_{params.type_k.upper()}")
    native.type_v = getattr(lib, f"GGML_TYPE_{params.type_v.upper()}")
    native.swa_full = params.swa_full
    native.offload_kqv = params.kv_offload
    params.rope.fill(native)
    # One buffer for all slots: slots can share prefixes, and one slot may use all of it.
    native.kv_unified = True
    native.no_perf = True
    recent_errors.clear()
    context = lib.llama_init_from_model(model.handle, native)
    if not context:
        raise StartupError(
            f"llama.cpp could not make a context of {params.n_cells} cells: {first_error()}"
        )
    model.adapters.apply(context)
    return context
