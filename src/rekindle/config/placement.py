"""Settings of the weights: where they are placed, how positions are rotated, which adapters apply.

The names are llama.cpp's. Functions of this module read the values that have a syntax of their own.
"""

# ruff: noqa: FBT003, RUF009 - `setting` declares a dataclass field, and a default may be a bool.

import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rekindle.config.choices import Fit, Numa, RopeScaling, SplitMode
from rekindle.config.declare import GIB, MIB, TIB, Bytes, setting
from rekindle.errors import StartupError

_FLOAT_MAX = 1e9  # of RoPE frequencies; picked, far above every model
NO_DEVICE = "none"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    fit: Fit = setting(
        Fit.ON,
        "Choose what --ctx-size 0 and --gpu-layers -1 leave open so that the model fits in memory.",
        words={
            **dict.fromkeys(("1", "true", "enabled"), Fit.ON),
            **dict.fromkeys(("0", "false", "disabled"), Fit.OFF),
        },
    )
    fit_ctx: int = setting(4096, "Smallest context that --fit chooses.", minimum=1)
    fit_target: Bytes = setting(
        Bytes(GIB),
        "Memory that --fit leaves free on the host and on each GPU.",
        maximum=TIB,
        unit=MIB,
    )
    device: str | None = setting(
        None, "GPUs to use, by name and separated by commas; none: no GPU. Default: all."
    )
    split_mode: SplitMode = setting(
        SplitMode.LAYER,
        "Several GPUs. none: use one; layer: split layers and their rows; row, tensor: split"
        " the weights of each layer.",
    )
    tensor_split: str | None = setting(
        None, "Share of the model for each GPU, such as 3,1. Default: by free memory."
    )
    main_gpu: int = setting(0, "Number of the GPU for --split-mode none and row.")
    cpu_moe: bool = setting(False, "Keep all expert weights (MoE) in the CPU's memory.")
    n_cpu_moe: int = setting(
        0, "Keep the expert weights (MoE) of the first N layers in the CPU's memory."
    )
    override_tensor: tuple[str, ...] = setting(
        (),
        "PATTERN=BUFFER: place the weights whose names match the pattern in that buffer type,"
        " such as CPU; may be repeated.",
    )
    kv_offload: bool = setting(True, "Keep the rows of layers on a GPU on that GPU.")
    mmap: bool = setting(True, "Map the file of weights into memory instead of reading it.")
    mlock: bool = setting(False, "Lock the weights in memory, so that they are never swapped out.")
    numa: Numa | None = setting(None, "Placement of threads on a machine with several NUMA nodes.")
    rope_scaling: RopeScaling | None = setting(
        None, "RoPE scaling for contexts longer than the trained one. Default: the model's own."
    )
    rope_scale: float = setting(
        0.0,
        "Factor by which RoPE stretches the context; 0: the model's own.",
        maximum=_FLOAT_MAX,
        metavar="N",
    )
    rope_freq_base: float = setting(
        0.0, "Base frequency of RoPE; 0: the model's own.", maximum=_FLOAT_MAX, metavar="N"
    )
    rope_freq_scale: float = setting(
        0.0,
        "Frequency scale of RoPE, 1 divided by --rope-scale; 0: the model's own.",
        maximum=_FLOAT_MAX,
        metavar="N",
    )
    yarn_orig_ctx: int = setting(
        0, "Context that a YaRN model was trained with; 0: the model's own."
    )
    yarn_ext_factor: float = setting(
        -1.0, "Extrapolation of YaRN; -1: the model's own.", minimum=-1, metavar="N"
    )
    yarn_attn_factor: float = setting(
        -1.0, "Attention magnitude of YaRN; -1: the model's own.", minimum=-1, metavar="N"
    )
    yarn_beta_slow: float = setting(
        -1.0, "High correction dimension of YaRN; -1: the model's own.", minimum=-1, metavar="N"
    )
    yarn_beta_fast: float = setting(
        -1.0, "Low correction dimension of YaRN; -1: the model's own.", minimum=-1, metavar="N"
    )
    lora: tuple[str, ...] = setting((), "LoRA adapter, a GGUF file; may be repeated.")
    lora_scaled: tuple[str, ...] = setting(
        (), "FILE:SCALE, a LoRA adapter with its scale; may be repeated."
    )


@dataclass(frozen=True, slots=True)
class AdapterFile:
    path: Path
    scale: float


@dataclass(frozen=True, slots=True)
class TensorOverride:
    pattern: str  # a regular expression that is searched in names of tensors
    buffer_type: str


def adapter_files(settings: PlacementSettings) -> tuple[AdapterFile, ...]:
    """Return the adapters in the order that they were given. Raises StartupError."""
    plain = [AdapterFile(_path(name), 1.0) for name in _items(settings.lora)]
    return (*plain, *map(_scaled, _items(settings.lora_scaled)))


def tensor_overrides(settings: PlacementSettings) -> tuple[TensorOverride, ...]:
    """Return what --override-tensor says. Raises StartupError."""
    text = ",".join(settings.override_tensor)
    # A pattern may contain commas and equal signs; the name of a buffer type contains neither.
    found = re.findall(r"(.+?)=([^=,]+)(?:,|$)", text)
    if ",".join(f"{pattern}={name}" for pattern, name in found) != text:
        raise StartupError(f"override_tensor must be PATTERN=BUFFER, but it is {text!r}.")
    overrides = [TensorOverride(pattern.strip(), name.strip()) for pattern, name in found]
    for override in overrides:
        try:
            re.compile(override.pattern)
        except re.error as error:
            raise StartupError(
                f"The pattern {override.pattern!r} of override_tensor is not a regular"
                f" expression: {error}."
            ) from error
    return tuple(overrides)


def tensor_shares(settings: PlacementSettings) -> tuple[float, ...]:
    """Return the shares of --tensor-split; empty: not given. Raises StartupError."""
    if settings.tensor_split is None:
        return ()
    parts = re.split(r"[,/]", settings.tensor_split)
    shares = [float(part) for part in parts if re.fullmatch(rf"\s*{_NUMBER}\s*", part)]
    if len(shares) < len(parts) or min(shares) < 0 or not isfinite(sum(shares)) or not sum(shares):
        raise StartupError(
            "tensor_split must be numbers that are not negative, separated by commas, such as"
            f" 3,1, but it is {settings.tensor_split!r}."
        )
    return tuple(shares)


def device_names(settings: PlacementSettings) -> tuple[str, ...] | None:
    """Return the names of --device. Empty: no GPU; None: all GPUs. Raises StartupError."""
    if settings.device is None:
        return None
    names = tuple(name.strip() for name in settings.device.split(","))
    if names == (NO_DEVICE,):
        return ()
    if not all(names) or NO_DEVICE in names or len(set(names)) < len(names):
        raise StartupError(
            "device must be names of GPUs separated by commas, or none, but it is"
            f" {settings.device!r}."
        )
    return names


def check_placement(settings: PlacementSettings) -> None:
    """Raise StartupError for a value that no machine can have."""
    adapter_files(settings)
    tensor_overrides(settings)
    tensor_shares(settings)
    device_names(settings)
    if settings.rope_scale and settings.rope_freq_scale:
        raise StartupError(
            "rope_scale and rope_freq_scale say the same thing (one is 1 divided by the other)."
            " Give one of them."
        )


def _items(values: tuple[str, ...]) -> list[str]:
    return [item.strip() for value in values for item in value.split(",") if item.strip()]


def _path(name: str) -> Path:
    return Path(name).expanduser()


def _scaled(text: str) -> AdapterFile:
    name, _, scale = text.rpartition(":")
    if not name or not re.fullmatch(_NUMBER, scale.strip()):
        raise StartupError(f"lora_scaled must be FILE:SCALE, but it is {text!r}.")
    return AdapterFile(_path(name), float(scale))
