"""Loads a GGUF file into llama.cpp: weights, context and embedder."""

import os
from collections.abc import Callable
from functools import partial

from rekindle.cache.fingerprint import Identity
from rekindle.config import EngineSettings, Speculate
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.generation.model_state import StateTraits
from rekindle.link.messages import Load, LoadedModel
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.embedder import LlamaEmbedder
from rekindle.llama.library import STATE_VERSION
from rekindle.llama.model import GgufModel, ModelFacts
from rekindle.llama.threads import physical_cores

N_DRAFT_ROWS = 64  # of a batch; each has a row of logits in memory. Picked.


def load(order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine:
    """Load the file. Raises StartupError."""
    settings = order.engine
    model = GgufModel(order.path, gpu_layers=settings.gpu_layers, on_progress=on_progress)
    params = _context_params(settings, model)
    backend = LlamaBackend(model, params)
    embedder = LlamaEmbedder(
        model,
        max_cells=params.n_cells,
        n_threads=params.n_threads,
        flash_attn=params.flash_attn,
    )
    return LoadedEngine(
        backend,
        embedder,
        _about(model.facts, backend, embedder),
        settings.queue_size,
        partial(_identity, model.facts, params),
    )


def _about(facts: ModelFacts, backend: LlamaBackend, embedder: LlamaEmbedder) -> LoadedModel:
    return LoadedModel(
        architecture=facts.architecture,
        quantization=facts.quantization,
        n_params=facts.n_params,
        size_bytes=facts.size_bytes,
        n_ctx_train=facts.n_ctx_train,
        n_embd=facts.n_embd,
        default_sampling=facts.default_sampling,
        n_slots=backend.n_slots,
        n_cells=backend.n_cells,
        n_ctx=backend.n_ctx,
        embedding_n_ctx=embedder.n_ctx,
        embedding_n_dimensions=embedder.n_dimensions,
        ranks=embedder.ranks,
    )


def _identity(
    facts: ModelFacts, params: ContextParams, weights: str, traits: StateTraits
) -> Identity:
    return Identity(
        weights=weights,
        model_class=traits.model_class,
        type_k=params.type_k,
        type_v=params.type_v,
        flash_attn=params.flash_attn,
        swa_full=params.swa_full,
        rope_n_ctx=params.n_cells if facts.rope_depends_on_n_ctx else None,
        attn_rot_disable=os.environ.get("LLAMA_ATTN_ROT_DISABLE"),
        state_version=STATE_VERSION,
    )


def _context_params(settings: EngineSettings, model: GgufModel) -> ContextParams:
    return ContextParams(
        n_cells=settings.ctx_size or model.facts.n_ctx_train,
        n_slots=settings.parallel,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        n_threads=settings.threads or physical_cores(),
        flash_attn=settings.flash_attn.value,
        type_k=settings.cache_type_k.value,
        type_v=settings.cache_type_v.value,
        swa_full=settings.swa_full,
        n_draft_rows=0 if settings.speculate is Speculate.OFF else N_DRAFT_ROWS,
    )
