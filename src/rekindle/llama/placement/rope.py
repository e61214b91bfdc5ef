"""RoPE and YaRN: the operator's values, for a context and for the fingerprint of its rows.

None stands for the model's own value, so that equal rows have equal fingerprints: a value that
the model has anyway is None too.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from rekindle.config.choices import RopeScaling
from rekindle.config.placement import PlacementSettings
from rekindle.llama.library import lib

_SCALING_TYPES = {
    "none": lib.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": lib.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": lib.LLAMA_ROPE_SCALING_TYPE_YARN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRope:
    """What the model's file says."""

    scaling: str = "linear"  # llama.cpp's default
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    orig_ctx: int = 0  # the context before YaRN


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    scaling: str | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None

    @property
    def yarn(self) -> dict[str, float]:
        """The values of YaRN that are not the model's own, by name."""
        values = {
            "orig_ctx": self.yarn_orig_ctx,
            "ext_factor": self.yarn_ext_factor,
            "attn_factor": self.yarn_attn_factor,
            "beta_slow": self.yarn_beta_slow,
            "beta_fast": self.yarn_beta_fast,
        }
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, native: Any) -> None:
        """Set the fields of llama.cpp's context parameters that are not the model's own."""
        if self.scaling is not None:
            native.rope_scaling_type = _SCALING_TYPES[self.scaling]
        if self.freq_base is not None:
            native.rope_freq_base = self.freq_base
        if self.freq_scale is not None:
            native.rope_freq_scale = self.freq_scale
        for name, value in self.yarn.items():
            setattr(native, f"yarn_{name}", value)

    def longest_context(self, n_ctx_train: int, trained: TrainedRope) -> int | None:
        """Return the context that positions are rotated for. None: no limit is known."""
        if self.freq_base is not None:
            return None  # another base stretches the context by an amount that only tests show
        scaling = self.scaling or trained.scaling
        if self.freq_scale is None or scaling == RopeScaling.NONE.value:
            return n_ctx_train
        if scaling == RopeScaling.YARN.value:
            return round((self.yarn_orig_ctx or trained.orig_ctx) / self.freq_scale)
        return round(n_ctx_train * trained.freq_scale / self.freq_scale)


def rope_params(settings: PlacementSettings, trained: TrainedRope) -> RopeParams:
    """Return the settings that differ from what the model has anyway."""
    freq_scale = settings.rope_freq_scale
    if settings.rope_scale:
        freq_scale = 1.0 / settings.rope_scale
    scaling = settings.rope_scaling.value if settings.rope_scaling is not None else None
    if scaling == RopeScaling.NONE.value:
        freq_scale = 0.0  # llama.cpp ignores it
    orig_ctx = settings.yarn_orig_ctx
    return RopeParams(
        scaling=scaling if scaling != trained.scaling else None,
        freq_base=_changed(settings.rope_freq_base, trained.freq_base),
        freq_scale=_changed(freq_scale, trained.freq_scale),
        yarn_orig_ctx=orig_ctx if orig_ctx not in (0, trained.orig_ctx) else None,
        yarn_ext_factor=_given(settings.yarn_ext_factor),
        yarn_attn_factor=_given(settings.yarn_attn_factor),
        yarn_beta_slow=_given(settings.yarn_beta_slow),
        yarn_beta_fast=_given(settings.yarn_beta_fast),
    )


def _changed(value: float, own: float) -> float | None:
    """Return the value as llama.cpp stores it; None: it is not given, or the model's own."""
    value, own = _single(value), _single(own)
    return None if value in (0, own) else value


def _given(value: float) -> float | None:
    return None if value < 0 else _single(value)


def _single(value: float) -> float:
    return ctypes.c_float(value).value
