"""The struct that reaches llama.cpp, and what llama.cpp does with it."""

import ctypes
from pathlib import Path

import pytest

from rekindle.config.choices import SplitMode
from rekindle.config.placement import PlacementSettings
from rekindle.errors import StartupError
from rekindle.llama.devices import buffer_types
from rekindle.llama.library import lib, listen_to_log
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.model_params import BufferOverride, ModelParams
from tests.conftest import TinyModels
from tests.support.tiny_models import N_LAYER, TinyArchitecture


def overrides(params: ModelParams) -> list[tuple[bytes, int]]:
    """Read the array as llama.cpp does: from its address, up to an empty pattern."""
    address, found = params.native.tensor_buft_overrides, []
    while (each := BufferOverride.from_address(address)).pattern is not None:
        found.append((each.pattern, each.buffer_type))
        address += ctypes.sizeof(BufferOverride)
    return found


def test_overrides_are_an_array_that_ends_with_an_empty_pattern() -> None:
    settings = PlacementSettings(override_tensor=("attn=CPU,norm=CPU",), cpu_moe=True, n_cpu_moe=2)
    cpu = buffer_types()["CPU"]
    assert overrides(ModelParams(settings, -1)) == [
        (b"attn", cpu),
        (b"norm", cpu),
        (rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps", cpu),
        (rb"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps", cpu),
        (rb"blk\.1\.ffn_(up|down|gate|gate_up)_(ch|)exps", cpu),
    ]


def test_defaults_change_nothing_of_llama_cpps_own_struct() -> None:
    made, own = ModelParams(PlacementSettings(), 3).native, lib.llama_model_default_params()
    own.n_gpu_layers = 3
    for name, _ in lib.llama_model_params._fields_:
        mine, theirs = getattr(made, name), getattr(own, name)
        assert (bool(mine), bool(theirs)) == (False, False) or mine == theirs, name


def test_settings_arrive_in_their_fields() -> None:
    settings = PlacementSettings(
        split_mode=SplitMode.ROW, tensor_split="3", device="none", mmap=False, mlock=True
    )
    native = ModelParams(settings, 7).native
    assert (native.n_gpu_layers, native.split_mode) == (7, lib.LLAMA_SPLIT_MODE_ROW)
    assert native.load_mode == lib.LLAMA_LOAD_MODE_MLOCK
    assert native.tensor_split[0] == 3.0
    assert ctypes.c_void_p.from_address(native.devices).value is None  # an empty list


@pytest.mark.parametrize(
    ("mmap", "mlock", "mode"),
    [
        (True, True, lib.LLAMA_LOAD_MODE_MMAP_MLOCK),
        (False, False, lib.LLAMA_LOAD_MODE_NONE),
        (True, False, lib.llama_model_default_params().load_mode),
    ],
)
def test_mapping_and_locking_are_one_load_mode(*, mmap: bool, mlock: bool, mode: int) -> None:
    assert ModelParams(PlacementSettings(mmap=mmap, mlock=mlock), 0).native.load_mode == mode


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (PlacementSettings(device="CUDA7"), "There is no GPU named CUDA7. GPUs: "),
        (PlacementSettings(main_gpu=99), "main_gpu is 99, but "),
        (PlacementSettings(tensor_split=",".join("1" * 99)), "tensor_split has 99 shares, but "),
        (PlacementSettings(override_tensor=("a=Moon",)), "There is no buffer type Moon"),
    ],
)
def test_what_the_machine_lacks_is_refused_in_words(
    settings: PlacementSettings, sentence: str
) -> None:
    with pytest.raises(StartupError) as caught:
        ModelParams(settings, -1)
    assert sentence in caught.value.message


def loaded_log(path: Path, placement: PlacementSettings) -> str:
    lines: list[str] = []
    with listen_to_log(lines.append):
        GgufModel(path, gpu_layers=0, placement=placement).close()
    return "".join(lines)


def test_llama_cpp_places_the_tensors_that_a_pattern_names(tiny_models: TinyModels) -> None:
    path = tiny_models(TinyArchitecture.LLAMA)
    log = loaded_log(path, PlacementSettings(override_tensor=("attn_k=CPU",)))
    moved = [line for line in log.splitlines() if "buffer type overridden to" in line]
    # A CPU with AMX has a buffer type of its own.
    assert len(moved) == N_LAYER
    assert all("attn_k.weight" in line and line.endswith(("CPU", "AMX")) for line in moved)


def test_faulty_kernels_for_amx_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ModelParams(PlacementSettings(), 0).native.use_extra_bufts
    module = "rekindle.llama.placement.model_params"
    monkeypatch.setattr(f"{module}.has_faulty_amx", lambda: True)
    assert not ModelParams(PlacementSettings(), 0).native.use_extra_bufts


def test_llama_cpp_keeps_the_experts_of_the_first_layers_on_the_cpu(
    tiny_models: TinyModels,
) -> None:
    log = loaded_log(tiny_models(TinyArchitecture.QWEN3_MOE), PlacementSettings(n_cpu_moe=2))
    moved = {line for line in log.splitlines() if "overridden to CPU" in line}
    assert {name for line in moved for name in ("blk.0", "blk.1", "blk.2") if name in line} == {
        "blk.0",
        "blk.1",
    }
    assert all("exps" in line for line in moved)
