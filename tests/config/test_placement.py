"""Settings of weights, RoPE and adapters: what their texts mean, and which are refused."""

from pathlib import Path
from typing import Any

import pytest

from rekindle.config.choices import Fit, Numa, RopeScaling, SplitMode
from rekindle.config.placement import (
    AdapterFile,
    PlacementSettings,
    TensorOverride,
    adapter_files,
    device_names,
    tensor_overrides,
    tensor_shares,
)
from rekindle.config.sources import resolve
from rekindle.errors import StartupError


def placement(**flags: object) -> PlacementSettings:
    return resolve(flags, {}, {}).settings.placement


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("fit", "off", Fit.OFF),
        ("split_mode", "row", SplitMode.ROW),
        ("numa", "isolate", Numa.ISOLATE),
        ("rope_scaling", "yarn", RopeScaling.YARN),
        ("rope_scale", "4", 4.0),
        ("yarn_ext_factor", "-1.0", -1.0),
        ("n_cpu_moe", "12", 12),
        ("kv_offload", "false", False),
        ("lora", "a.gguf,b.gguf", ("a.gguf", "b.gguf")),
    ],
)
def test_a_variable_has_the_meaning_of_its_flag(name: str, text: str, value: object) -> None:
    settings = resolve({}, {f"REKINDLE_{name.upper()}": text}, {}).settings.placement
    assert getattr(settings, name) == value


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), []),
        (("exps=CPU",), [("exps", "CPU")]),
        (("a=CPU,b=CUDA0", "c=CPU"), [("a", "CPU"), ("b", "CUDA0"), ("c", "CPU")]),
        ((r"blk\.\d{1,2}\.=CPU",), [(r"blk\.\d{1,2}\.", "CPU")]),
        ((r"blk\.\d{1", r"2}\.=CPU"), [(r"blk\.\d{1,2}\.", "CPU")]),  # from the environment
        (("a=b=CPU",), [("a=b", "CPU")]),
    ],
)
def test_overrides_are_pairs_of_pattern_and_buffer(
    values: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    overrides = tensor_overrides(PlacementSettings(override_tensor=values))
    assert overrides == tuple(TensorOverride(*pair) for pair in expected)


def test_adapters_keep_their_order_and_scales() -> None:
    files = adapter_files(placement(lora=["a.gguf,b.gguf"], lora_scaled=["c:d.gguf:-0.5"]))
    assert files == (
        AdapterFile(Path("a.gguf"), 1.0),
        AdapterFile(Path("b.gguf"), 1.0),
        AdapterFile(Path("c:d.gguf"), -0.5),
    )


def test_shares_may_be_separated_as_in_llama_cpp() -> None:
    assert tensor_shares(placement(tensor_split="3,1")) == (3.0, 1.0)
    assert tensor_shares(placement(tensor_split="0.5/.5")) == (0.5, 0.5)
    assert tensor_shares(placement()) == ()


def test_none_is_no_gpu_and_nothing_is_every_gpu() -> None:
    assert device_names(placement(device="none")) == ()
    assert device_names(placement()) is None
    assert device_names(placement(device="CUDA0, CUDA1")) == ("CUDA0", "CUDA1")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"override_tensor": ["exps"]}, "override_tensor must be PATTERN=BUFFER, but it is"),
        ({"override_tensor": ["=CPU"]}, "override_tensor must be PATTERN=BUFFER"),
        ({"override_tensor": ["a=CPU,b"]}, "override_tensor must be PATTERN=BUFFER"),
        ({"override_tensor": ["(=CPU"]}, "is not a regular expression"),
        ({"tensor_split": "3,x"}, "tensor_split must be numbers"),
        ({"tensor_split": "0,0"}, "tensor_split must be numbers"),
        ({"tensor_split": "3,-1"}, "tensor_split must be numbers"),
        ({"device": "CUDA0,,CUDA1"}, "device must be names of GPUs"),
        ({"device": "CUDA0,none"}, "device must be names of GPUs"),
        ({"lora_scaled": ["a.gguf"]}, "lora_scaled must be FILE:SCALE, but it is 'a.gguf'"),
        ({"lora_scaled": ["a.gguf:big"]}, "lora_scaled must be FILE:SCALE"),
        ({"rope_scale": "2", "rope_freq_scale": "0.5"}, "say the same thing"),
        ({"rope_scaling": "ntk"}, "rope_scaling must be one of none, linear, yarn"),
        ({"rope_scale": "-2"}, "rope_scale must be a number from 0"),
        ({"split_mode": "column"}, "split_mode must be one of none, layer, row, tensor"),
        ({"numa": "on"}, "numa must be one of distribute, isolate, numactl"),
        ({"fit_target": "10 B"}, "fit_target must be 0 or at least 1MiB"),
        ({"n_cpu_moe": "-1"}, "n_cpu_moe must be a whole number from 0"),
    ],
)
def test_a_wrong_value_is_refused_in_words(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve(flags, {}, {})
    assert sentence in caught.value.message
