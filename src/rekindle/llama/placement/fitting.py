"""Fits an order to load a model to the memory of this machine, and says so in the log."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rekindle.config.choices import Fit, FlashAttn, SplitMode
from rekindle.config.engine import EngineSettings
from rekindle.config.placement import (
    NO_DEVICE,
    PlacementSettings,
    adapter_files,
    device_names,
    tensor_overrides,
)
from rekindle.llama.devices import chosen_gpus, free_bytes
from rekindle.llama.placement.fit import Fitted, Memory, Wishes, fit
from rekindle.llama.placement.footprint import Footprint, RowFormat, footprint
from rekindle.llama.placement.gguf_header import read_header

_log = logging.getLogger("rekindle.llama")

_GB = 10**9
DEFAULT_MARGIN = PlacementSettings().fit_target
USUAL_BATCH = 512  # tokens computed at once; as in llama-server
_WIDE_BATCHES = (2048, 1024)  # GPUs compute them faster
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def fitted(
    path: Path,
    engine: EngineSettings,
    placement: PlacementSettings,
    *,
    n_draft_rows: int,
    reserved_bytes: int,
) -> tuple[EngineSettings, PlacementSettings]:
    """Return the settings with the choices of `--fit`. Raises StartupError."""
    is_batch_open = engine.ubatch_size == 0
    engine = replace(engine, ubatch_size=_n_ubatch(engine))
    if placement.fit is Fit.OFF:
        return engine, placement
    gpus = used_gpus(placement)
    is_open = engine.ctx_size == 0 or (bool(gpus) and engine.gpu_layers < 0)
    # Several GPUs work on the parts of a prompt at once, and wide parts are fewer.
    may_widen = is_batch_open and len(gpus) == 1 and engine.flash_attn is not FlashAttn.OFF
    if not (is_open or may_widen):
        return engine, placement
    try:
        model = footprint(read_header(path), tensor_overrides(placement))
    except (ValueError, OverflowError):  # numbers that no model has
        return engine, placement  # llama.cpp will say what is wrong with the file
    if not model.n_ctx_train or not model.layers:
        return engine, placement
    memory = free_memory(placement, gpus, reserved_bytes)
    wanted = wishes(engine, placement, n_draft_rows=n_draft_rows)
    found = fit(model, row_format(engine), wanted, memory)
    if may_widen and found.fits and found.choice.gpu_layers:
        engine, found = _widened(model, engine, wanted, memory, found)
    if is_open or engine.ubatch_size > USUAL_BATCH:
        _tell(model, engine, found, memory)
    choice = found.choice
    may_move = engine.gpu_layers < 0 and not _places_tensors(placement)
    if may_move and len(gpus) > 1 and choice.gpu_layers:
        placement = _split(placement, found.shares)
    elif may_move and gpus and not choice.gpu_layers and not placement.main_gpu:
        # With a GPU, llama.cpp computes prompts there even without a layer, and needs its buffers.
        placement = replace(placement, device=NO_DEVICE)
    is_shorter = engine.ctx_size == 0 and choice.n_ctx < model.n_ctx_train
    # -1 stays -1: llama.cpp may count layers that the header does not show.
    has_fewer = bool(gpus) and choice.gpu_layers <= len(model.layers)
    return (
        replace(
            engine,
            ctx_size=choice.n_ctx if is_shorter else engine.ctx_size,
            gpu_layers=choice.gpu_layers if has_fewer else engine.gpu_layers,
        ),
        replace(placement, n_cpu_moe=choice.n_cpu_moe),
    )


def _widened(
    model: Footprint, engine: EngineSettings, wanted: Wishes, memory: Memory, found: Fitted
) -> tuple[EngineSettings, Fitted]:
    """Use the memory that is left for wider batches. The choice stays as it was."""
    for n_tokens in _WIDE_BATCHES:
        if n_tokens <= engine.batch_size:
            wide = replace(engine, ubatch_size=n_tokens)
            fitted_wide = fit(model, row_format(wide), wanted, memory)
            if fitted_wide.fits and fitted_wide.choice == found.choice:
                return wide, fitted_wide
    return engine, found


def row_format(engine: EngineSettings) -> RowFormat:
    return RowFormat(
        engine.cache_type_k,
        engine.cache_type_v,
        engine.swa_full,
        n_sequences=engine.parallel + 1,  # one more for the scratch sequence
        n_ubatch=_n_ubatch(engine),
    )


def _n_ubatch(engine: EngineSettings) -> int:
    return engine.ubatch_size or min(USUAL_BATCH, engine.batch_size)


def wishes(engine: EngineSettings, placement: PlacementSettings, *, n_draft_rows: int) -> Wishes:
    adapters = {each.path for each in adapter_files(placement)}
    return Wishes(
        n_ctx=engine.ctx_size,
        min_ctx=placement.fit_ctx,
        gpu_layers=engine.gpu_layers,
        n_cpu_moe=placement.n_cpu_moe,
        cpu_moe=placement.cpu_moe,
        kv_offload=placement.kv_offload,
        n_outputs=engine.parallel + 1 + n_draft_rows,
        places_tensors=_places_tensors(placement),
        extra_bytes=sum(path.stat().st_size for path in adapters if path.is_file()),
    )


def _places_tensors(placement: PlacementSettings) -> bool:
    return bool(tensor_overrides(placement) or placement.tensor_split)


def _split(placement: PlacementSettings, shares: Sequence[int]) -> PlacementSettings:
    """Give each GPU layers by the room that it has beside its buffers.

    llama.cpp divides by free memory alone, and a GPU with little of it gets more than it can hold.
    """
    if placement.split_mode is not SplitMode.LAYER or not any(shares):
        return placement
    return replace(placement, tensor_split=",".join(map(str, shares)))


def free_memory(placement: PlacementSettings, gpus: list[int], reserved_bytes: int) -> Memory:
    """Return what a model may take: free bytes less the margin, and less what is reserved."""
    margin: int = placement.fit_target
    available = available_host_bytes()
    # On a small machine the default margin shall not take what the model needs.
    if margin == DEFAULT_MARGIN:
        margin = min(margin, available // 4)
    host = available - reserved_bytes - margin
    return Memory(max(host, 0), tuple(max(free_bytes(gpu) - margin, 0) for gpu in gpus))


def used_gpus(placement: PlacementSettings) -> list[int]:
    """Return the GPUs that llama.cpp will use."""
    gpus = chosen_gpus(device_names(placement))
    if placement.split_mode is SplitMode.NONE:
        return gpus[placement.main_gpu : placement.main_gpu + 1]
    return gpus


def available_host_bytes() -> int:
    """Return the memory that programs could allocate now, in this container."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int((_CGROUP / "memory.max").read_text("ascii"))
        used = int((_CGROUP / "memory.current").read_text("ascii"))
        pairs = (_CGROUP / "memory.stat").read_text("ascii").splitlines()
        cached = dict(pair.split() for pair in pairs).get("inactive_file", "0")
        return min(available, max(limit - used + int(cached), 0))
    except (OSError, ValueError):
        return available


def _tell(model: Footprint, engine: EngineSettings, found: Fitted, memory: Memory) -> None:
    choice, needs = found.choice, found.needs
    parts = [f"fit: context={choice.n_ctx}"]
    if memory.gpus:
        parts.append(f"gpu_layers={choice.gpu_layers} of {len(model.layers) + 1}")
        if choice.n_cpu_moe:
            parts.append(f"n_cpu_moe={choice.n_cpu_moe}")
        parts.append(f"ubatch={engine.ubatch_size}")
    budget = f"{needs.host / _GB:.1f} of {memory.host / _GB:.1f} GB on the host"
    if memory.gpus:
        on_gpus = needs.gpu_bytes(memory)
        budget += f", {on_gpus / _GB:.1f} of {sum(memory.gpus) / _GB:.1f} GB on the GPU"
    n_wanted = engine.ctx_size or model.n_ctx_train
    is_smaller = choice.n_ctx < n_wanted
    why = f"the trained {n_wanted} tokens do not fit" if is_smaller else "as wanted"
    if not found.fits:
        why = "nothing fits, this is the smallest choice; expect swapping or a failed start"
    level = logging.INFO if found.fits and not is_smaller else logging.WARNING
    _log.log(level, "%s: %s (%s)", " ".join(parts), why, budget)
