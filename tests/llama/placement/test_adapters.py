"""LoRA adapters and RoPE settings change logits, and equal ones give equal logits."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.config.choices import RopeScaling
from rekindle.config.placement import PlacementSettings
from rekindle.errors import StartupError
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.embedder import LlamaEmbedder
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.rope import RopeParams, TrainedRope, rope_params
from tests.conftest import TinyModels
from tests.support.tiny_adapters import write_tiny_adapter
from tests.support.tiny_models import TinyArchitecture

TOKENS = list(range(20, 60))


@pytest.fixture(scope="module")
def model_file(tiny_models: TinyModels) -> Path:
    return tiny_models(TinyArchitecture.LLAMA)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    return write_tiny_adapter(folder / "a.gguf", task_name="rhymes")


def context_params(model: GgufModel, placement: PlacementSettings) -> ContextParams:
    return ContextParams(
        n_cells=65536 if placement.rope_scale else 512,
        n_slots=1,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        flash_attn="auto",
        type_k="f16",
        type_v="f16",
        swa_full=False,
        rope=rope_params(placement, model.facts.trained_rope),
    )


def logits(path: Path, placement: PlacementSettings) -> NDArray[np.float32]:
    model = GgufModel(path, gpu_layers=0, placement=placement)
    backend = LlamaBackend(model, context_params(model, placement))
    last = len(TOKENS) - 1
    backend.decode(TOKENS, list(range(len(TOKENS))), [0] * len(TOKENS), [last])
    found = backend._logits().copy()
    backend.close()
    model.close()
    return found


def test_an_adapter_changes_the_logits_and_a_second_load_repeats_them(
    model_file: Path, adapter: Path
) -> None:
    bare = logits(model_file, PlacementSettings())
    adapted = logits(model_file, PlacementSettings(lora=(str(adapter),)))
    again = logits(model_file, PlacementSettings(lora=(str(adapter),)))
    assert np.array_equal(adapted, again)
    assert np.abs(adapted - bare).max() > 0.1


def test_the_scale_of_an_adapter_counts(model_file: Path, adapter: Path) -> None:
    bare = logits(model_file, PlacementSettings())
    whole = logits(model_file, PlacementSettings(lora_scaled=(f"{adapter}:1.0",)))
    half = logits(model_file, PlacementSettings(lora_scaled=(f"{adapter}:0.5",)))
    none = logits(model_file, PlacementSettings(lora_scaled=(f"{adapter}:0",)))
    assert np.array_equal(whole, logits(model_file, PlacementSettings(lora=(str(adapter),))))
    assert np.array_equal(none, bare)
    assert np.abs(half - whole).max() > 0.1
    assert np.abs(half - bare).max() > 0.1


def test_embeddings_are_computed_with_the_adapter(model_file: Path, adapter: Path) -> None:
    vectors = []
    for placement in (PlacementSettings(), PlacementSettings(lora=(str(adapter),))):
        model = GgufModel(model_file, gpu_layers=0, placement=placement)
        embedder = LlamaEmbedder(model, max_cells=512, n_threads=1, flash_attn="auto")
        embedder.begin(TOKENS)
        data = embedder.advance()
        assert data is not None
        vectors.append(np.frombuffer(data, "<f4"))
        embedder.rest()
        model.close()
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01


def test_facts_about_an_adapter_are_read_from_its_file(model_file: Path, adapter: Path) -> None:
    placement = PlacementSettings(lora_scaled=(f"{adapter}:0.25",))
    model = GgufModel(model_file, gpu_layers=0, placement=placement)
    [facts] = model.adapters.facts
    model.close()
    assert (facts.path, facts.scale, facts.task_name) == (adapter, 0.25, "rhymes")


def test_an_adapter_that_does_not_fit_is_one_sentence(model_file: Path, tmp_path: Path) -> None:
    wrong = {
        str(tmp_path / "none.gguf"): "There is no LoRA adapter at",
        str(model_file): "expect general.type to be 'adapter'",
        str(write_tiny_adapter(tmp_path / "a.gguf", architecture="qwen2")): "arch mismatch",
        str(write_tiny_adapter(tmp_path / "b.gguf", layers=9)): "does not exist in base model",
        str(write_tiny_adapter(tmp_path / "c.gguf", invocation_tokens=[5, 6])): "activated LoRA",
    }
    for path, reason in wrong.items():
        with pytest.raises(StartupError) as caught:
            GgufModel(model_file, gpu_layers=0, placement=PlacementSettings(lora=(path,)))
        assert reason in caught.value.message
        assert path in caught.value.message


@pytest.mark.parametrize(
    "placement",
    [
        PlacementSettings(rope_scale=4.0),
        PlacementSettings(rope_freq_base=500_000.0),
        PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0),
        PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0, yarn_orig_ctx=64),
        PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0, yarn_ext_factor=0.0),
        PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0, yarn_beta_fast=1.0),
        PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0, yarn_beta_slow=9.0),
        PlacementSettings(yarn_attn_factor=2.0),
    ],
)
def test_rope_settings_change_the_logits_and_their_identity(
    model_file: Path, placement: PlacementSettings
) -> None:
    yarn = PlacementSettings(rope_scaling=RopeScaling.YARN, rope_scale=4.0)
    others = [PlacementSettings()] + (
        [yarn] if placement != yarn and placement.rope_scaling else []
    )
    for other in others:
        assert not np.array_equal(logits(model_file, placement), logits(model_file, other))
        trained = TrainedRope(orig_ctx=32768)
        assert rope_params(placement, trained) != rope_params(other, trained)


@pytest.mark.parametrize(
    ("placement", "same"),
    [
        (PlacementSettings(rope_freq_base=10000.0), PlacementSettings()),
        (PlacementSettings(rope_freq_scale=1.0), PlacementSettings()),
        (PlacementSettings(rope_scaling=RopeScaling.LINEAR), PlacementSettings()),
        (PlacementSettings(yarn_orig_ctx=32768), PlacementSettings()),
        (PlacementSettings(rope_freq_scale=0.25), PlacementSettings(rope_scale=4.0)),
        (
            PlacementSettings(rope_scaling=RopeScaling.NONE, rope_scale=4.0),
            PlacementSettings(rope_scaling=RopeScaling.NONE),
        ),
    ],
)
def test_two_ways_to_say_the_same_have_equal_logits_and_one_identity(
    model_file: Path, placement: PlacementSettings, same: PlacementSettings
) -> None:
    trained = TrainedRope(orig_ctx=32768)
    assert rope_params(placement, trained) == rope_params(same, trained)
    assert np.array_equal(logits(model_file, placement), logits(model_file, same))


@pytest.mark.parametrize(
    ("rope", "trained", "longest"),
    [
        (RopeParams(), TrainedRope(orig_ctx=4096), 4096),
        (RopeParams(freq_scale=0.25), TrainedRope(orig_ctx=4096), 16384),
        (RopeParams(freq_scale=0.25), TrainedRope(freq_scale=0.5, orig_ctx=4096), 8192),
        (RopeParams(scaling="yarn", freq_scale=0.25), TrainedRope(orig_ctx=4096), 16384),
        (
            RopeParams(scaling="yarn", freq_scale=0.25, yarn_orig_ctx=2048),
            TrainedRope(orig_ctx=4096),
            8192,
        ),
        (RopeParams(scaling="none"), TrainedRope(orig_ctx=4096), 4096),
        (RopeParams(freq_base=1e6), TrainedRope(orig_ctx=4096), None),
    ],
)
def test_scaling_raises_the_longest_context(
    rope: RopeParams, trained: TrainedRope, longest: int | None
) -> None:
    assert rope.longest_context(4096, trained) == longest
