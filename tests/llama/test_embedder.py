"""Vectors of every memory class, against llama.cpp's own pooling, and beside a conversation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from rekindle.errors import EngineError
from rekindle.llama.context import LlamaBackend
from rekindle.llama.embedder import CPU_PART_TOKENS, LlamaEmbedder
from rekindle.llama.library import lib
from rekindle.llama.model import GgufModel, Pooling
from tests.llama.driver import continue_greedily, prefill, prompt
from tests.support.tiny_models import (
    N_EMBD,
    TinyArchitecture,
    write_tiny_model,
    write_tiny_reranker,
)

Vector = NDArray[np.float32]
LENGTHS = [1, CPU_PART_TOKENS - 1, CPU_PART_TOKENS, CPU_PART_TOKENS + 1, 300]


def make_embedder(model: GgufModel, *, max_cells: int = 512) -> LlamaEmbedder:
    return LlamaEmbedder(model, max_cells=max_cells, n_threads=1, flash_attn="auto")


@pytest.fixture
def embedder(model: GgufModel) -> Iterator[LlamaEmbedder]:
    embedder = make_embedder(model)
    yield embedder
    embedder.rest()


def embed(embedder: LlamaEmbedder, tokens: list[int]) -> Vector:
    embedder.begin(tokens)
    while (data := embedder.advance()) is None:
        pass
    return np.frombuffer(data, "<f4")


def pooled_by_llama(
    model: GgufModel, pooling: Pooling, tokens: list[int], *, n_outputs: int = N_EMBD
) -> Vector:
    """The whole input in one batch, pooled in the graph."""
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.embeddings = True
    params.pooling_type = pooling
    context = lib.llama_init_from_model(model.handle, params)
    ids: Any = (lib.llama_token * len(tokens))(*tokens)
    assert lib.llama_decode(context, lib.llama_batch_get_one(ids, len(tokens))) == 0
    row = lib.llama_get_embeddings_seq(context, 0)
    vector: Vector = np.ctypeslib.as_array(row, (n_outputs,)).copy()
    lib.llama_free(context)
    return vector if pooling is Pooling.RANK else vector / np.linalg.norm(vector)


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_the_vector_is_the_mean_that_llama_cpp_makes(
    model: GgufModel, embedder: LlamaEmbedder, n_tokens: int
) -> None:
    vector = embed(embedder, prompt(n_tokens))
    assert vector.shape == (embedder.n_dimensions,) == (N_EMBD,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    wanted = pooled_by_llama(model, Pooling.MEAN, prompt(n_tokens))
    assert np.abs(vector - wanted).max() < 2e-3


def test_equal_inputs_have_equal_vectors_whatever_came_between(embedder: LlamaEmbedder) -> None:
    inputs = [prompt(n_tokens, seed) for seed, n_tokens in enumerate(LENGTHS, start=1)]
    first = [embed(embedder, tokens) for tokens in inputs]
    again = [embed(embedder, tokens) for tokens in reversed(inputs)]
    for one, two in zip(first, reversed(again), strict=True):
        assert np.array_equal(one, two)
    embedder.rest()
    assert np.array_equal(embed(embedder, inputs[-1]), first[-1])
    for index, one in enumerate(first):
        assert all(np.abs(one - other).max() > 1e-3 for other in first[index + 1 :])


def test_an_input_that_is_given_up_halfway_leaves_nothing_behind(embedder: LlamaEmbedder) -> None:
    wanted = embed(embedder, prompt(100, seed=2))
    embedder.begin(prompt(300))
    assert embedder.advance() is None
    assert np.array_equal(embed(embedder, prompt(100, seed=2)), wanted)


def test_an_input_may_fill_the_context_and_resting_twice_is_harmless(model: GgufModel) -> None:
    embedder = make_embedder(model, max_cells=256)
    assert embedder.n_ctx == 256
    embed(embedder, prompt(256))
    embed(embedder, prompt(256, seed=2))
    embedder.rest()
    embedder.rest()


def test_embeddings_do_not_affect_a_conversation(
    model: GgufModel, backend: LlamaBackend, embedder: LlamaEmbedder
) -> None:
    """Rows and replies of a slot while inputs are embedded between its steps."""
    tokens = prompt(200)
    prefill(backend, 0, tokens[:-1])
    wanted = continue_greedily(backend, 0, tokens)
    backend.clear_slot(0)
    embedder.begin(prompt(300, seed=3))
    embedder.advance()
    prefill(backend, 0, tokens[:-1])
    embedder.advance()
    embed(embedder, tokens)
    assert continue_greedily(backend, 0, tokens) == wanted
    assert backend.n_positions(0) == len(tokens) + 11


def test_a_model_that_gives_no_finite_vector_is_an_error_of_that_input_only(
    model: GgufModel, embedder: LlamaEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = embed(embedder, prompt(10))
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "_compute", lambda *_: np.full((1, N_EMBD), np.nan))
        embedder.begin(prompt(10))
        with pytest.raises(EngineError, match="finite"):
            embedder.advance()
    assert np.array_equal(embed(embedder, prompt(10)), wanted)


def pooling_model(path: Path, monkeypatch: pytest.MonkeyPatch, pooling: int) -> GgufModel:
    build = GGUFWriter.add_chat_template

    def add(writer: GGUFWriter, template: str) -> None:
        build(writer, template)
        writer.add_uint32("llama.pooling_type", pooling)

    monkeypatch.setattr(GGUFWriter, "add_chat_template", add)
    return GgufModel(write_tiny_model(path / "pooling.gguf", TinyArchitecture.LLAMA), gpu_layers=0)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.FIRST, Pooling.LAST])
def test_the_pooling_that_the_file_names_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    model = pooling_model(tmp_path, monkeypatch, pooling)
    embedder = make_embedder(model)
    wanted = pooled_by_llama(model, pooling, prompt(150))
    assert np.abs(embed(embedder, prompt(150)) - wanted).max() < 2e-3
    embedder.rest()
    model.close()


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_a_score_is_the_one_of_the_whole_text_in_one_batch(tmp_path: Path, n_tokens: int) -> None:
    model = GgufModel(write_tiny_reranker(tmp_path / "rank.gguf"), gpu_layers=0)
    embedder = make_embedder(model)
    assert embedder.ranks
    score = embed(embedder, prompt(n_tokens))
    whole = pooled_by_llama(model, Pooling.RANK, prompt(n_tokens), n_outputs=2)
    assert score.shape == (1,)
    assert abs(score[0] - whole[0]) < 2e-3
    assert whole.sum() == pytest.approx(1.0)
    embedder.rest()
    model.close()


def test_a_pooling_that_nobody_knows_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pooling_model(tmp_path, monkeypatch, 77)
    assert model.facts.pooling is Pooling.NONE
    model.close()
