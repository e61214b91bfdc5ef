"""Embeddings of texts, computed in a second llama.cpp context on the same weights.

The context is created for the first input and freed when idle. The decoding thread owns it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import EngineError, InvalidRequest
from rekindle.llama.context import FLASH_ATTENTION, Batch
from rekindle.llama.library import first_error, lib, recent_errors
from rekindle.llama.model import GgufModel, Pooling
from rekindle.llama.placement.rope import RopeParams

MAX_TOKENS = 8192  # of one input, as in OpenAI's models

# Computing a part delays running replies. llama.cpp also computes unused logits for each token,
# which take memory: 40 MB for 64 tokens of a large vocabulary. The size of a part never changes,
# so that equal texts have equal vectors, bit for bit.
CPU_PART_TOKENS, GPU_PART_TOKENS = 64, 512


class LlamaEmbedder:
    """Implements `engine.backend.Embedder`."""

    def __init__(
        self,
        model: GgufModel,
        *,
        max_cells: int,
        n_threads: int,
        flash_attn: str,
        rope: RopeParams = RopeParams(),  # noqa: B008 - frozen
        kv_offload: bool = True,
    ) -> None:
        self.n_ctx = min(MAX_TOKENS, max_cells, model.facts.n_ctx_train)
        self.n_dimensions: int = lib.llama_model_n_embd_out(model.handle)
        self.ranks = model.facts.pooling is Pooling.RANK
        self._model = model
        self._n_threads = n_threads
        self._flash_attn = flash_attn
        self._rope = rope
        self._kv_offload = kv_offload
        self._n_part = GPU_PART_TOKENS if lib.llama_supports_gpu_offload() else CPU_PART_TOKENS
        self._batch = Batch(self._n_part)
        self._context: Any = None
        self._tokens: list[int] = []
        self._n_done = 0
        self._pooled: NDArray[np.float64] = np.zeros(0)

    def begin(self, tokens: Sequence[int]) -> None:
        assert 0 < len(tokens) <= self.n_ctx
        if self._context is None:
            self._context = self._make_context()
        # The old rows stay, unreachable: zeroing a gigabyte would take longer than the input.
        with_data = False
        lib.llama_memory_clear(lib.llama_get_memory(self._context), with_data)
        self._tokens = list(tokens)
        self._n_done = 0
        self._pooled = np.zeros(self.n_dimensions)

    def advance(self) -> bytes | None:
        start, stop = self._n_done, min(self._n_done + self._n_part, len(self._tokens))
        self._n_done = stop
        if self.ranks:
            self._decode(start, stop)
            return self._score() if stop == len(self._tokens) else None
        self._pool(self._compute(start, stop), is_first=start == 0)
        if stop < len(self._tokens):
            return None
        length = float(np.linalg.norm(self._pooled))
        if not np.isfinite(length) or length == 0:
            self.rest()  # a NaN in a row would spoil the next input
            raise EngineError("The model computed a vector that is not finite.")
        return (self._pooled / length).astype("<f4").tobytes()

    def rest(self) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None

    def _compute(self, start: int, stop: int) -> NDArray[np.float32]:
        """Decode a part of the input. Return a row for each token."""
        self._decode(start, stop)
        rows = lib.llama_get_embeddings(self._context)
        return np.ctypeslib.as_array(rows, (stop - start, self.n_dimensions))

    def _score(self) -> bytes:
        """Return the first output of the model's head, at the last token."""
        score: float = lib.llama_get_embeddings_seq(self._context, 0)[0]
        if not np.isfinite(score):
            self.rest()
            raise EngineError("The model computed a score that is not finite.")
        return np.array([score], "<f4").tobytes()

    def _decode(self, start: int, stop: int) -> None:
        n_tokens = stop - start
        status = lib.llama_decode(
            self._context,
            self._batch.fill(
                self._tokens[start:stop],
                list(range(start, stop)),
                [0] * n_tokens,
                list(range(n_tokens)),
            ),
        )
        if status != 0:
            self.rest()
            raise EngineError(f"llama.cpp could not embed an input (code {status}).")

    def _pool(self, rows: NDArray[np.float32], *, is_first: bool) -> None:
        match self._model.facts.pooling:
            case Pooling.FIRST:
                if is_first:
                    self._pooled[:] = rows[0]
            case Pooling.LAST:
                self._pooled[:] = rows[-1]
            case _:  # the sum has the same direction as the mean
                self._pooled += rows.sum(axis=0, dtype=np.float64)

    def _make_context(self) -> Any:
        native = lib.llama_context_default_params()
        native.n_ctx = self.n_ctx
        native.n_batch = native.n_ubatch = self._n_part
        native.n_seq_max = 1
        native.n_threads = native.n_threads_batch = self._n_threads
        native.flash_attn_type = FLASH_ATTENTION[self._flash_attn]
        native.swa_full = False
        native.offload_kqv = self._kv_offload
        self._rope.fill(native)
        native.no_perf = True
        native.embeddings = True
        # Pooling is done here: llama.cpp would have to compute each input in one batch. A score
        # comes from the last token alone, which sees all earlier parts.
        none, rank = lib.LLAMA_POOLING_TYPE_NONE, lib.LLAMA_POOLING_TYPE_RANK
        native.pooling_type = rank if self.ranks else none
        recent_errors.clear()
        context = lib.llama_init_from_model(self._model.handle, native)
        if not context:
            raise EngineError(f"llama.cpp could not make a context for embeddings: {first_error()}")
        if not lib.llama_get_memory(context):  # such a model needs a whole text in one batch
            lib.llama_free(context)
            raise InvalidRequest("This server cannot make embeddings with this model.")
        self._model.adapters.apply(context)
        return context
