"""Loads a GGUF file into llama.cpp: weights, context and embedder."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rekindle.cache.fingerprint import Identity
from rekindle.config.choices import Speculate
from rekindle.config.engine import EngineSettings
from rekindle.config.placement import PlacementSettings
from rekindle.engine_process.loaded import LoadedEngine
from rekindle.errors import StartupError
from rekindle.generation.model_state import StateTraits
from rekindle.link.messages import Load, LoadedAdapter, LoadedModel
from rekindle.llama.context import N_DRAFT_ROWS, ContextParams, LlamaBackend
from rekindle.llama.embedder import LlamaEmbedder
from rekindle.llama.library import STATE_VERSION
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.fitting import USUAL_BATCH, fitted
from rekindle.llama.placement.model_params import set_numa
from rekindle.llama.placement.rope import rope_params
from rekindle.llama.threads import physical_cores

_log = logging.getLogger("rekindle.llama")


def load(order: Load, *, on_progress: Callable[[float], bool]) -> LoadedEngine:
    """Load the file. Raises StartupError."""
    n_draft_rows = 0 if order.engine.speculate is Speculate.OFF else N_DRAFT_ROWS
    settings, placement = fitted(
        order.path,
        order.engine,
        order.placement,
        n_draft_rows=n_draft_rows,
        reserved_bytes=order.reserved_bytes,
    )
    if placement.numa is not None:
        set_numa(placement.numa)
    model = GgufModel(
        order.path,
        gpu_layers=settings.gpu_layers,
        placement=placement,
        on_progress=on_progress,
    )
    params = _context_params(settings, placement, model, n_draft_rows)
    try:
        backend = LlamaBackend(model, params)
    except StartupError as error:
        if order.engine.ubatch_size or settings.ubatch_size <= USUAL_BATCH:
            raise
        # The estimate of `--fit` was too low, and nobody asked for wide batches.
        _log.warning("fit: batches of %d tokens: %s", settings.ubatch_size, error.message)
        settings = replace(settings, ubatch_size=USUAL_BATCH)
        params = _context_params(settings, placement, model, n_draft_rows)
        backend = LlamaBackend(model, params)
    embedder = LlamaEmbedder(
        model,
        max_cells=params.n_cells,
        n_threads=params.n_threads_batch or params.n_threads,
        flash_attn=params.flash_attn,
        rope=params.rope,
        kv_offload=params.kv_offload,
    )
    return LoadedEngine(
        backend,
        embedder,
        _about(settings, placement, model, backend, embedder),
        settings.queue_size,
        partial(_identity, model, params),
    )


def _about(
    settings: EngineSettings,
    placement: PlacementSettings,
    model: GgufModel,
    backend: LlamaBackend,
    embedder: LlamaEmbedder,
) -> LoadedModel:
    facts = model.facts
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
        ctx_size=settings.ctx_size,
        ubatch_size=settings.ubatch_size,
        gpu_layers=settings.gpu_layers,
        n_cpu_moe=placement.n_cpu_moe,
        device=placement.device,
        tensor_split=placement.tensor_split,
        adapters=tuple(
            LoadedAdapter(each.path, each.scale, each.task_name, each.prompt_prefix)
            for each in model.adapters.facts
        ),
    )


def _identity(
    model: GgufModel,
    params: ContextParams,
    weights: str,
    adapters: tuple[str, ...],
    traits: StateTraits,
) -> Identity:
    rope = params.rope
    scales = [each.scale for each in model.adapters.facts]
    return Identity(
        weights=weights,
        model_class=traits.model_class,
        type_k=params.type_k,
        type_v=params.type_v,
        flash_attn=params.flash_attn,
        swa_full=params.swa_full,
        rope_n_ctx=params.n_cells if model.facts.rope_depends_on_n_ctx else None,
        attn_rot_disable=os.environ.get("LLAMA_ATTN_ROT_DISABLE"),
        state_version=STATE_VERSION,
        rope_scaling=rope.scaling,
        rope_freq_base=rope.freq_base,
        rope_freq_scale=rope.freq_scale,
        yarn=rope.yarn,
        # llama.cpp leaves out an adapter with scale 0, and adds up the others in any order.
        adapters=tuple(sorted(pair for pair in zip(adapters, scales, strict=True) if pair[1])),
    )


def _context_params(
    settings: EngineSettings, placement: PlacementSettings, model: GgufModel, n_draft_rows: int
) -> ContextParams:
    return ContextParams(
        n_cells=settings.ctx_size or model.facts.n_ctx_train,
        n_slots=settings.parallel,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        n_threads=settings.threads or physical_cores(),
        n_threads_batch=settings.threads_batch,
        flash_attn=settings.flash_attn.value,
        type_k=settings.cache_type_k.value,
        type_v=settings.cache_type_v.value,
        swa_full=settings.swa_full,
        rope=rope_params(placement, model.facts.trained_rope),
        kv_offload=placement.kv_offload,
        n_draft_rows=n_draft_rows,
    )
