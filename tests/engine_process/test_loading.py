"""Which settings make stored rows unusable, for each one; and what the server is told."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rekindle.cache.fingerprint import fingerprint
from rekindle.config.choices import Fit, Numa, RopeScaling, SplitMode
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.placement import PlacementSettings
from rekindle.engine_process import loading
from rekindle.engine_process.loading import load
from rekindle.errors import StartupError
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.link.encoding import decode_order, encode
from rekindle.link.messages import Load, LoadedModel
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.fitting import fitted
from rekindle.models.llama_model import _as_loaded
from tests.conftest import TinyModels
from tests.support.tiny_adapters import write_tiny_adapter
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

TRAITS = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False)
ADAPTER = "adapter.gguf"
OTHER_ADAPTER = "other.gguf"

# A value of each setting that is not the default, and whether rows mean something else with it.
CHANGES: dict[str, tuple[Any, bool]] = {
    "fit": (Fit.OFF, False),
    "fit_ctx": (512, False),
    "fit_target": (Bytes(2**40), False),
    "device": ("none", False),
    "split_mode": (SplitMode.NONE, False),
    "tensor_split": ("1", False),
    "main_gpu": (0, False),  # another one does not exist here
    "cpu_moe": (True, False),
    "n_cpu_moe": (2, False),
    "override_tensor": (("attn=CPU",), False),
    "kv_offload": (False, False),
    "mmap": (False, False),
    "mlock": (True, False),
    "numa": (Numa.DISTRIBUTE, False),
    "rope_scaling": (RopeScaling.YARN, True),
    "rope_scale": (2.0, True),
    "rope_freq_base": (20000.0, True),
    "rope_freq_scale": (0.5, True),
    "yarn_orig_ctx": (4096, True),
    "yarn_ext_factor": (1.0, True),
    "yarn_attn_factor": (2.0, True),
    "yarn_beta_slow": (2.0, True),
    "yarn_beta_fast": (2.0, True),
    "lora": ((ADAPTER,), True),
    "lora_scaled": ((f"{ADAPTER}:0.5",), True),
}

Loaded = Callable[..., tuple[bytes, LoadedModel]]


@pytest.fixture
def loaded(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Load a tiny model. Return the fingerprint of its rows, and what the server is told."""
    write_tiny_adapter(tmp_path / ADAPTER, task_name="rhymes")
    write_tiny_adapter(tmp_path / OTHER_ADAPTER, seed=2)
    monkeypatch.chdir(tmp_path)

    def get(**placement: Any) -> tuple[bytes, LoadedModel]:
        engine = EngineSettings(ctx_size=placement.pop("ctx_size", 512), parallel=1)
        settings = replace(PlacementSettings(), **placement)
        path = tiny_models(TinyArchitecture.LLAMA)
        found = load(Load(path, engine, 0, settings), on_progress=lambda _: True)
        digests = tuple(f"digest of {each.path}" for each in found.about.adapters)
        key = fingerprint(found.identity("weights", digests, TRAITS))
        found.backend.close()
        return key, found.about

    return get


def test_every_setting_is_in_the_table() -> None:
    assert list(CHANGES) == [field.name for field in fields(PlacementSettings)]


@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_used_under_another_value_if_and_only_if_they_mean_the_same(
    loaded: Loaded, name: str
) -> None:
    value, changes_rows = CHANGES[name]
    default, _ = loaded()
    changed, _ = loaded(**{name: value})
    again, _ = loaded(**{name: value})
    assert changed == again
    assert (changed != default) == changes_rows


def test_content_and_scale_of_an_adapter_count_and_its_absence_is_scale_0(loaded: Loaded) -> None:
    keys = [
        loaded(lora_scaled=value)[0]
        for value in [
            (),
            (f"{ADAPTER}:1",),
            (f"{ADAPTER}:0.5",),
            (f"{OTHER_ADAPTER}:1",),
            (f"{ADAPTER}:1", f"{OTHER_ADAPTER}:1"),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert loaded(lora_scaled=(f"{ADAPTER}:0",))[0] == keys[0]
    assert loaded(lora=(ADAPTER,))[0] == keys[1]
    assert loaded(lora_scaled=(f"{OTHER_ADAPTER}:1", f"{ADAPTER}:1"))[0] == keys[4]


def test_the_server_is_told_about_adapters(loaded: Loaded) -> None:
    _, about = loaded(lora=(ADAPTER,), lora_scaled=(f"{OTHER_ADAPTER}:0.5",))
    assert [(str(each.path), each.scale, each.task_name) for each in about.adapters] == [
        (ADAPTER, 1.0, "rhymes"),
        (OTHER_ADAPTER, 0.5, ""),
    ]


def test_the_server_is_told_what_was_fitted(loaded: Loaded) -> None:
    _, about = loaded(ctx_size=0, fit_target=Bytes(2**40), fit_ctx=1024)
    assert (about.ctx_size, about.n_cells, about.n_ctx) == (1024, 1024, 1024)
    _, about = loaded(ctx_size=0)
    assert (about.ctx_size, about.ubatch_size) == (0, 512)


def test_a_context_that_is_too_large_with_wide_batches_is_made_with_usual_ones(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the estimate of `--fit` was too low. What an operator asks for is not changed."""
    tried: list[int] = []

    def make(model: GgufModel, params: ContextParams) -> LlamaBackend:
        tried.append(params.n_ubatch)
        if params.n_ubatch > 512:
            raise StartupError("out of memory")
        return LlamaBackend(model, params)

    def widened(_: Path, engine: EngineSettings, placement: PlacementSettings, **__: int) -> Any:
        return replace(engine, ubatch_size=engine.ubatch_size or 2048), placement

    monkeypatch.setattr(loading, "LlamaBackend", make)
    monkeypatch.setattr(loading, "fitted", widened)
    path = tiny_models(TinyArchitecture.LLAMA)
    engine = EngineSettings(ctx_size=256, parallel=1)
    order = Load(path, engine, 0, PlacementSettings())
    with caplog.at_level(logging.WARNING, logger="rekindle.llama"):
        found = load(order, on_progress=lambda _: True)
    found.backend.close()
    assert (tried, found.about.ubatch_size) == ([2048, 512], 512)
    assert caplog.messages == ["fit: batches of 2048 tokens: out of memory"]
    asked = Load(path, replace(engine, ubatch_size=1024), 0, PlacementSettings())
    with pytest.raises(StartupError, match="out of memory"):
        load(asked, on_progress=lambda _: True)


def test_the_next_process_loads_with_the_choices_of_the_first(tiny_models: TinyModels) -> None:
    order = Load(tiny_models(TinyArchitecture.LLAMA), EngineSettings(), 0, PlacementSettings())
    found = load(order, on_progress=lambda _: True)
    found.backend.close()
    chosen = structs.replace(found.about, ctx_size=512, ubatch_size=2048, gpu_layers=3)
    again = _as_loaded(order, chosen)
    engine, _ = fitted(
        again.path, again.engine, again.placement, n_draft_rows=0, reserved_bytes=2**60
    )
    assert (engine.ctx_size, engine.ubatch_size, engine.gpu_layers) == (512, 2048, 3)


def test_a_stretched_context_may_be_longer_than_the_trained_one(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyArchitecture.LLAMA, context_length=1024)
    engine = EngineSettings(ctx_size=4096, parallel=1)
    lengths = {}
    for name, placement in {
        "plain": PlacementSettings(),
        "linear": PlacementSettings(rope_scale=2.0),
        "yarn": PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0),
        "base": PlacementSettings(rope_freq_base=1e6),
    }.items():
        found = load(Load(path, engine, 0, placement), on_progress=lambda _: True)
        lengths[name] = found.about.n_ctx
        found.backend.close()
    assert lengths == {"plain": 1024, "linear": 2048, "yarn": 4096, "base": 4096}


def test_an_order_with_every_setting_survives_the_link() -> None:
    placement = replace(
        PlacementSettings(), **{name: value for name, (value, _) in CHANGES.items()}
    )
    order = Load(Path("m.gguf"), EngineSettings(), 20, placement, 2**40)
    assert decode_order(encode(order)) == order
