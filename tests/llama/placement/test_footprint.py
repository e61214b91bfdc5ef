"""What the header says about memory is what llama.cpp allocates, for every class of models."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle.config.choices import KvType
from rekindle.config.placement import TensorOverride
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.library import listen_to_log
from rekindle.llama.model import GgufModel
from rekindle.llama.placement.footprint import Footprint, RowFormat, footprint
from rekindle.llama.placement.gguf_header import GgufHeader, Value, read_header
from tests.conftest import TinyModels
from tests.support.tiny_models import SLIDING_WINDOW, TinyArchitecture

MIB = 2**20
N_CELLS, N_SLOTS, N_UBATCH = 16384, 4, 128
F16 = RowFormat(KvType.F16, KvType.F16, swa_full=False, n_sequences=N_SLOTS + 1, n_ubatch=N_UBATCH)


def allocated_mib(path: Path, *, swa_full: bool = False) -> tuple[float, LlamaBackend, GgufModel]:
    """The sizes that llama.cpp logs for rows and recurrent states."""
    model = GgufModel(path, gpu_layers=0)
    params = ContextParams(
        n_cells=N_CELLS,
        n_slots=N_SLOTS,
        n_batch=N_UBATCH,
        n_ubatch=N_UBATCH,
        n_threads=1,
        flash_attn="auto",
        type_k="f16",
        type_v="f16",
        swa_full=swa_full,
    )
    lines: list[str] = []
    with listen_to_log(lines.append):
        backend = LlamaBackend(model, params)
    sizes = [re.search(r"\w: size = +([\d.]+) MiB", line) for line in lines]
    return sum(float(match[1]) for match in sizes if match), backend, model


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("architecture", list(TinyArchitecture))
def test_rows_weights_and_class_are_those_of_llama_cpp(
    tiny_models: TinyModels, architecture: TinyArchitecture, *, swa_full: bool
) -> None:
    path = tiny_models(architecture)
    found = footprint(read_header(path))
    mib, backend, model = allocated_mib(path, swa_full=swa_full)
    backend.warm_up()
    traits, size_bytes = backend.traits, model.facts.size_bytes
    backend.close()
    model.close()
    rows = RowFormat(KvType.F16, KvType.F16, swa_full, N_SLOTS + 1, N_UBATCH)
    n_bytes = sum(found.context_bytes(layer, N_CELLS, rows) for layer in found.layers)
    assert n_bytes / MIB == pytest.approx(mib, abs=0.02)
    assert found.weight_bytes == size_bytes
    assert found.n_ctx_train == model.facts.n_ctx_train
    assert found.model_class == traits.model_class


def test_the_embedded_model_takes_what_the_capacity_page_says(embedded_model: Path) -> None:
    found = footprint(read_header(embedded_model))
    q8 = RowFormat(KvType.Q8_0, KvType.Q8_0, swa_full=False, n_sequences=5, n_ubatch=512)
    assert (found.row_bytes(F16), found.row_bytes(q8)) == (23_040, 12_240)
    assert found.n_vocab == 49_152


def test_a_window_is_kept_in_checkpoints_and_not_in_rows(tiny_models: TinyModels) -> None:
    found = footprint(read_header(tiny_models(TinyArchitecture.GEMMA3)))
    one_layer = found.row_bytes(F16)  # one of four layers has no window
    assert found.checkpoint_bytes(F16) == 3 * one_layer * SLIDING_WINDOW
    full = RowFormat(KvType.F16, KvType.F16, swa_full=True, n_sequences=5, n_ubatch=128)
    assert (found.row_bytes(full), found.checkpoint_bytes(full)) == (4 * one_layer, 0)


def published(architecture: str, n_layers: int, **values: Value) -> Footprint:
    keys = {"block_count": n_layers, "context_length": 131072, "embedding_length": 4096}
    named = {key.replace("__", "."): value for key, value in (keys | values).items()}
    pairs = {f"{architecture}.{key}": value for key, value in named.items()}
    return footprint(GgufHeader({"general.architecture": architecture, **pairs}, {}, {}))


@pytest.mark.parametrize(
    ("model", "row_bytes", "checkpoint_bytes"),
    [  # the table in docs/capacity.md
        (
            published("llama", 32, attention__head_count=32, attention__head_count_kv=8),
            131_072,
            0,
        ),
        (
            published(
                "gpt-oss",
                24,
                attention__head_count=64,
                attention__head_count_kv=8,
                attention__key_length=64,
                attention__value_length=64,
                attention__sliding_window=128,
            ),
            24_576,
            128 * 24_576,
        ),
        (
            published(
                "gemma3",
                48,
                attention__head_count=16,
                attention__head_count_kv=8,
                attention__key_length=256,
                attention__value_length=256,
                attention__sliding_window=1024,
            ),
            65_536,
            1024 * 327_680,
        ),
        (
            published(
                "deepseek2",
                61,
                attention__head_count=128,
                attention__head_count_kv=1,
                attention__key_length=576,
                attention__value_length=512,
                attention__key_length_mla=192,
            ),
            61 * 576 * 2,
            0,
        ),
    ],
)
def test_published_models_take_what_is_known_of_them(
    model: Footprint, row_bytes: int, checkpoint_bytes: int
) -> None:
    assert model.row_bytes(F16) == row_bytes
    assert model.checkpoint_bytes(F16) == checkpoint_bytes


@pytest.mark.parametrize(
    ("overrides", "has_experts", "on_host"),
    [
        ([], True, False),
        ([TensorOverride("exps", "CPU")], False, True),
        ([TensorOverride("exps", "CUDA0")], False, False),
        ([TensorOverride("exps", "CUDA0"), TensorOverride("exps", "CPU")], False, False),
    ],
)
def test_experts_that_the_operator_places_are_not_placed_again(
    tiny_models: TinyModels,
    overrides: Sequence[TensorOverride],
    *,
    has_experts: bool,
    on_host: bool,
) -> None:
    found = footprint(read_header(tiny_models(TinyArchitecture.QWEN3_MOE)), overrides)
    assert found.has_experts == has_experts
    assert all(bool(layer.host_bytes) == on_host for layer in found.layers)
