"""Vectors of texts, from a llama.cpp context of its own on the same weights.

Made for the first input and freed when it rests. Owned by the thread that decodes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import EngineError, InvalidRequest
from rekindle.llama.context import FLASH_ATTENTION, Batch
from rekindle.llama.library import first_error, lib, recent_errors
from rekindle.llama.model import GgufModel, Pooling

MAX_TOKENS = 8192  # of one input: what OpenAI's models take

# A part of an input holds up the streams that run beside it. llama.cpp makes logits for each of
# its tokens too, whether anyone wants them or not, which takes memory: 40 MB for 64 tokens of a
# large vocabulary. The size never changes, so that equal texts have equal vectors, bit for bit.
CPU_PART_TOKENS, GPU_PART_TOKENS = 64, 512


class LlamaEmbedder:
    """Satisfies `engine.backend.Embedder`."""

    def __init__(
        self, model: GgufModel, *, max_cells: int, n_threads: int, flash_attn: str
    ) -> None:
        self.n_ctx = min(MAX_TOKENS, max_cells, model.facts.n_ctx_train)
        self.n_dimensions: int = lib.llama_model_n_embd_out(model.handle)
        self._model = model
        self._n_threads = n_threads
        self._flash_attn = flash_attn
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
        # The rows stay, unreachable: zeroing a gigabyte for each input would take longer than it.
        with_data = False
        lib.llama_memory_clear(lib.llama_get_memory(self._context), with_data)
        self._tokens = list(tokens)
        self._n_done = 0
        self._pooled = np.zeros(self.n_dimensions)

    def advance(self) -> bytes | None:
        start, stop = self._n_done, min(self._n_done + self._n_part, len(self._tokens))
        self._pool(self._compute(start, stop), is_first=start == 0)
        self._n_done = stop
        if stop < len(self._tokens):
            return None
        length = float(np.linalg.norm(self._pooled))
        if not np.isfinite(length) or length == 0:
            self.rest()  # a NaN that stays in a row spoils the next input
            raise EngineError("The model gave no finite vector.")
        return (self._pooled / length).astype("<f4").tobytes()

    def rest(self) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None

    def _compute(self, start: int, stop: int) -> NDArray[np.float32]:
        """A row for each token of the part."""
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
        rows = lib.llama_get_embeddings(self._context)
        return np.ctypeslib.as_array(rows, (n_tokens, self.n_dimensions))

    def _pool(self, rows: NDArray[np.float32], *, is_first: bool) -> None:
        match self._model.facts.pooling:
            case Pooling.FIRST:
                if is_first:
                    self._pooled[:] = rows[0]
            case Pooling.LAST:
                self._pooled[:] = rows[-1]
            case _:  # the sum points where the mean does
                self._pooled += rows.sum(axis=0, dtype=np.float64)

    def _make_context(self) -> Any:
        if self._model.facts.pooling is Pooling.RANK:
            raise InvalidRequest("This model ranks texts, it makes no embeddings.")
        native = lib.llama_context_default_params()
        native.n_ctx = self.n_ctx
        native.n_batch = native.n_ubatch = self._n_part
        native.n_seq_max = 1
        native.n_threads = native.n_threads_batch = self._n_threads
        native.flash_attn_type = FLASH_ATTENTION[self._flash_attn]
        native.swa_full = False
        native.no_perf = True
        native.embeddings = True
        # We pool ourselves: llama.cpp would have to compute each input in one go.
        native.pooling_type = lib.LLAMA_POOLING_TYPE_NONE
        recent_errors.clear()
        context = lib.llama_init_from_model(self._model.handle, native)
        if not context:
            raise EngineError(f"llama.cpp could not make a context for embeddings: {first_error()}")
        if not lib.llama_get_memory(context):  # it sees a whole text at once, or nothing
            lib.llama_free(context)
            raise InvalidRequest("This model makes no embeddings here.")
        return context
