"""Subjects of fidelity tests: fakes of every model class, and tiny real models."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from rekindle.generation.events import StopCause
from rekindle.generation.model_state import ModelClass, Payload
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel
from tests.support.audited_backend import AuditedBackend, Ledger, Scored
from tests.support.fake_backend import CHECKPOINT, END, FakeBackend, expected_reply, next_token
from tests.support.fidelity_setup import Setup
from tests.support.state_blobs import in_order_of_positions
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

# With weights and rows of 32 bits, a run whose chunks are cut differently has logits that differ
# by up to 4e-6; one token that is another, 800 positions before, changes them by 1e-4 and more.
TOLERANCE = 3e-5
# Rounding may choose another expert: 3e-4 was the most on ARM.
EXPERTS_TOLERANCE = 1e-3
# llama.cpp looks GELU up in a table of 16 bits, so that rounding may step over to the next line:
# 1.3e-4 was the most in 300 prompts. A window that lacks a row makes 5e-3.
GELU_TOLERANCE = 1e-3
TOLERANCES = {
    TinyArchitecture.GEMMA3: GELU_TOLERANCE,
    TinyArchitecture.QWEN3_MOE: EXPERTS_TOLERANCE,
}
MAX_COLD_RUNS = 500  # that are remembered
N_SPARE_CELLS = 256  # of a block
FIRST_TOKEN, N_TOKENS = 3, 500  # of the tiny vocabulary, those that are text


class FakeSubject:
    entry_bytes = 1200

    def __init__(self, model_class: ModelClass) -> None:
        self._model_class = model_class

    def new_backend(self, setup: Setup, ledger: Ledger) -> AuditedBackend:
        backend = FakeBackend(
            model_class=self._model_class,
            n_slots=setup.n_slots,
            n_cells=setup.n_cells,
            n_ubatch=setup.n_ubatch,
            reply=_reply,
        )
        return AuditedBackend(backend, ledger)

    def text(self, seed: int, n_tokens: int) -> list[int]:
        return list(range(10_000 * (seed + 1), 10_000 * (seed + 1) + n_tokens))

    def check_reply(
        self, prompt: list[int], reply: list[int], end: StopCause | None, scored: list[Scored]
    ) -> None:
        expected = expected_reply(prompt, len(reply) + 1, _reply)
        assert reply == expected[:-1]
        assert END not in reply
        assert end is None or (expected[-1] == END) >= (end is StopCause.END_OF_TURN)


def _reply(prefix: Sequence[int]) -> int:
    token = next_token(prefix)
    return END if token % 50 == 0 else token


class LlamaSubject:
    """A tiny real model; replies and logits are compared with those of a context of its own."""

    def __init__(self, architecture: TinyArchitecture, folder: Path) -> None:
        half = write_tiny_model(folder / f"{architecture}.gguf", architecture)
        self._model = GgufModel(_in_full_precision(half), gpu_layers=0)
        self._cold = ColdRuns(self._backend(n_slots=1, n_cells=4096, n_ubatch=256))
        self.entry_bytes = self._cold.entry_bytes()
        self.worst_difference = 0.0
        self._tolerance = TOLERANCES.get(architecture, TOLERANCE)
        self._n_cell_bytes = 24 if architecture is TinyArchitecture.QWEN35 else 12  # M-RoPE or not

    def close(self) -> None:
        self._cold.close()
        self._model.close()

    def new_backend(self, setup: Setup, ledger: Ledger) -> AuditedBackend:
        backend = self._backend(
            n_slots=setup.n_slots + 1,
            n_cells=setup.n_cells + N_SPARE_CELLS,
            n_ubatch=setup.n_ubatch,
        )
        return AuditedBackend(
            backend,
            ledger,
            spare_slot=setup.n_slots,
            n_spare_cells=N_SPARE_CELLS,
            read_logits=backend._logits,
            canonical=self._canonical,
        )

    def _canonical(self, kind: bytes, payload: Payload) -> bytes:
        if kind == CHECKPOINT and not self._model.facts.n_swa:
            return bytes(payload)
        return in_order_of_positions(payload, n_cell_bytes=self._n_cell_bytes)

    def text(self, seed: int, n_tokens: int) -> list[int]:
        return Random(seed).choices(range(FIRST_TOKEN, N_TOKENS), k=n_tokens)

    def check_reply(
        self, prompt: list[int], reply: list[int], end: StopCause | None, scored: list[Scored]
    ) -> None:
        n_scored = len(reply) + (end is StopCause.END_OF_TURN)
        if not n_scored:
            return
        cold = self._cold.logits(prompt, reply[: n_scored - 1])
        expected = [int(token) for token in cold.argmax(axis=1)]
        tokens = tuple(prompt + reply)
        for each in scored:
            place = len(each.tokens) - len(prompt)
            if 0 <= place < n_scored and each.tokens == tokens[: len(each.tokens)]:
                difference = float(np.abs(each.logits - cold[place]).max())
                self.worst_difference = max(self.worst_difference, difference)
                assert difference <= self._tolerance, f"logits {place} differ by {difference}"
        if end is StopCause.END_OF_TURN:
            assert expected.pop() in self._model.vocabulary.eog_tokens
        assert reply == expected

    def _backend(self, *, n_slots: int, n_cells: int, n_ubatch: int) -> LlamaBackend:
        backend = LlamaBackend(
            self._model,
            ContextParams(
                n_cells=n_cells,
                n_slots=n_slots,
                n_batch=512,
                n_ubatch=n_ubatch,
                n_threads=1,
                flash_attn="off",
                type_k="f32",
                type_v="f32",
                swa_full=False,
            ),
        )
        backend.warm_up()
        return backend


class ColdRuns:
    """Computes everything from the first token on, each time in an empty context."""

    _CHUNK = 256

    def __init__(self, backend: LlamaBackend) -> None:
        self._backend = backend
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def close(self) -> None:
        self._backend.close()

    def entry_bytes(self) -> int:
        backend = self._backend
        self._decode(list(range(FIRST_TOKEN, FIRST_TOKEN + 256)), 0)
        has_rows, has_states = backend.traits.has_rows, backend.traits.has_checkpoints
        return max(
            len(backend.export_rows(0, 0, 256)) if has_rows else 0,
            len(backend.export_checkpoint(0)) if has_states else 0,
        )

    def logits(self, prompt: list[int], reply: list[int]) -> NDArray[np.float32]:
        """One row for each token of the reply, and one more."""
        key = (len(prompt), *prompt, *reply)
        if key not in self._known:
            if len(self._known) == MAX_COLD_RUNS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._run(prompt, reply)
        return self._known[key]

    def _run(self, prompt: list[int], reply: list[int]) -> NDArray[np.float32]:
        self._backend.clear_all()
        for start in range(0, len(prompt) - 1, self._CHUNK):
            self._decode(prompt[: len(prompt) - 1][start : start + self._CHUNK], start)
        rows = []
        for place, token in enumerate([prompt[-1], *reply]):
            self._decode([token], len(prompt) - 1 + place)
            rows.append(self._backend._logits()[0].copy())
        return np.stack(rows)

    def _decode(self, tokens: list[int], start: int) -> None:
        n_tokens = len(tokens)
        positions = list(range(start, start + n_tokens))
        self._backend.decode(tokens, positions, [0] * n_tokens, [n_tokens - 1])


def _in_full_precision(half: Path) -> Path:
    """Weights of 16 bits would have activations rounded to 16, and differently for each chunk."""
    path = half.with_suffix(".f32.gguf")
    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    params.output_tensor_type = params.token_embedding_type = lib.GGML_TYPE_F32
    status = lib.llama_model_quantize(str(half).encode(), str(path).encode(), ctypes.byref(params))
    assert status == 0
    return path
