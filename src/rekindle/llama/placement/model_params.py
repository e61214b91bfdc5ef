"""The settings of a model's weights as the C struct that llama.cpp reads."""

import ctypes
import logging
from typing import Any

from rekindle.config.choices import Numa, SplitMode
from rekindle.config.placement import (
    PlacementSettings,
    TensorOverride,
    device_names,
    tensor_overrides,
    tensor_shares,
)
from rekindle.errors import StartupError
from rekindle.llama.devices import buffer_types, chosen_gpus, device_name
from rekindle.llama.library import has_faulty_amx, lib
from rekindle.llama.placement.gguf_header import MAX_LAYERS

_log = logging.getLogger(__name__)

_SPLIT_MODES = {
    SplitMode.NONE: lib.LLAMA_SPLIT_MODE_NONE,
    SplitMode.LAYER: lib.LLAMA_SPLIT_MODE_LAYER,
    SplitMode.ROW: lib.LLAMA_SPLIT_MODE_ROW,
    SplitMode.TENSOR: lib.LLAMA_SPLIT_MODE_TENSOR,
}
_NUMA_STRATEGIES = {Numa.DISTRIBUTE: 1, Numa.ISOLATE: 2, Numa.NUMACTL: 3}
CPU_BUFFER = "CPU"
# The names of expert weights, as in llama.cpp's --cpu-moe.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


class BufferOverride(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`, which the bindings leave out."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class ModelParams:
    """The struct, and the arrays that it points at. Keep it as long as the model."""

    def __init__(self, settings: PlacementSettings, gpu_layers: int) -> None:
        """Raise StartupError for a device or a buffer type that this machine does not have."""
        self.native: Any = lib.llama_model_default_params()
        self.native.n_gpu_layers = gpu_layers
        if has_faulty_amx():
            _log.warning("llama: this build of llama.cpp has faulty AMX kernels, not using them")
            self.native.use_extra_bufts = False
        self.native.split_mode = _SPLIT_MODES[settings.split_mode]
        self._place_on_devices(settings)
        self.overrides = _overrides(settings)
        if self.overrides is not None:
            self.native.tensor_buft_overrides = ctypes.addressof(self.overrides)
        if not settings.mmap or settings.mlock:
            self.native.load_mode = _load_mode(settings)

    def _place_on_devices(self, settings: PlacementSettings) -> None:
        names = device_names(settings)
        gpus = chosen_gpus(names)
        self.has_gpu = bool(gpus)
        if names is not None:
            self._devices = (ctypes.c_void_p * (len(gpus) + 1))(*gpus, None)
            self.native.devices = ctypes.addressof(self._devices)
        if settings.main_gpu and settings.main_gpu >= len(gpus):
            raise StartupError(f"main_gpu is {settings.main_gpu}, but {_there_are(gpus)}.")
        self.native.main_gpu = settings.main_gpu
        shares = tensor_shares(settings)
        if len(shares) > max(len(gpus), 1):
            raise StartupError(f"tensor_split has {len(shares)} shares, but {_there_are(gpus)}.")
        if shares:
            # llama.cpp reads a share for every device that could exist.
            self._shares = (ctypes.c_float * max(lib.llama_max_devices(), len(shares)))(*shares)
            self.native.tensor_split = self._shares


def set_numa(strategy: Numa) -> None:
    """Set the strategy for this process, before it loads a model."""
    lib.llama_numa_init(_NUMA_STRATEGIES[strategy])


def _there_are(gpus: list[int]) -> str:
    if not gpus:
        return "no GPU is used"
    names = ", ".join(map(device_name, gpus))
    return f"there {'is one GPU' if len(gpus) == 1 else f'are {len(gpus)} GPUs'} ({names})"


def _overrides(settings: PlacementSettings) -> Any:
    """Return the overrides as an array that ends with an empty one; None: there are none."""
    # The operator's own patterns first: llama.cpp takes the first that matches.
    wanted = [*tensor_overrides(settings)]
    if settings.cpu_moe:
        wanted.append(TensorOverride(_EXPERTS, CPU_BUFFER))
    wanted += [
        TensorOverride(rf"blk\.{layer}{_EXPERTS}", CPU_BUFFER)
        for layer in range(min(settings.n_cpu_moe, MAX_LAYERS))
    ]
    if not wanted:
        return None
    limit = lib.llama_max_tensor_buft_overrides() - 1
    if len(wanted) > limit:
        raise StartupError(f"{len(wanted)} tensor overrides are more than llama.cpp's {limit}.")
    known = buffer_types()
    native = (BufferOverride * (len(wanted) + 1))()
    for place, override in zip(native, wanted, strict=False):
        if override.buffer_type not in known:
            raise StartupError(
                f"There is no buffer type {override.buffer_type} for override_tensor. Buffer"
                f" types: {', '.join(known)}."
            )
        place.pattern = override.pattern.encode()
        place.buffer_type = known[override.buffer_type]
    return native


def _load_mode(settings: PlacementSettings) -> int:
    modes: dict[tuple[bool, bool], int] = {
        (False, False): lib.LLAMA_LOAD_MODE_NONE,
        (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
        (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }
    return modes[settings.mmap, settings.mlock]
