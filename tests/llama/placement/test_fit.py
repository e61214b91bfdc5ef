"""What `--fit` chooses for a given amount of memory."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.config.choices import Fit, FlashAttn, KvType, Speculate
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.placement import PlacementSettings, tensor_shares
from rekindle.generation.model_state import ModelClass
from rekindle.llama.placement import fitting
from rekindle.llama.placement.fit import Choice, Fitted, Memory, Wishes, fit, needs_of
from rekindle.llama.placement.fitting import available_host_bytes, fitted, row_format, wishes
from rekindle.llama.placement.footprint import Footprint, Layer, RowFormat, footprint
from rekindle.llama.placement.gguf_header import read_header
from tests.conftest import TinyModels
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

GIB = 2**30
ROWS = RowFormat(KvType.F16, KvType.F16, swa_full=False, n_sequences=5, n_ubatch=512)
OPEN = Wishes(n_ctx=0, min_ctx=4096, gpu_layers=-1)
# As Llama 3.1 8B in Q4_K: 32 layers of 140 MiB, rows of 128 KiB.
MODEL = Footprint(
    model_class=ModelClass.DENSE,
    n_ctx_train=131072,
    window=0,
    layers=(Layer(140 * 2**20, n_k=1024, n_v=1024),) * 32,
    input_bytes=280 * 2**20,
    output_bytes=410 * 2**20,
    n_vocab=128256,
    n_embd=4096,
    n_ff=14336,
    n_heads=32,
    rope_depends_on_n_ctx=False,
)
EXPERTS = replace(
    MODEL, layers=(Layer(1000 * 2**20, expert_bytes=900 * 2**20, n_k=512, n_v=512),) * 32
)
DEFAULTS = EngineSettings()
ON_A_CPU = replace(DEFAULTS, ubatch_size=512)
HOST_ONLY = Memory(64 * GIB)


def chosen(memory: Memory, wishes: Wishes = OPEN, model: Footprint = MODEL) -> tuple[int, int, int]:
    found = fit(model, ROWS, wishes, memory)
    _assert_within(found, memory)
    return found.choice.n_ctx, found.choice.gpu_layers, found.choice.n_cpu_moe


def _assert_within(found: Fitted, memory: Memory) -> None:
    held = found.needs.gpu_bytes(memory)
    within = found.needs.host <= memory.host and held <= sum(memory.gpus)
    assert found.fits == within


def test_with_memory_for_all_nothing_is_changed() -> None:
    assert chosen(HOST_ONLY) == (131072, 0, 0)
    assert chosen(Memory(64 * GIB, (80 * GIB,))) == (131072, 33, 0)


def test_without_a_gpu_the_context_is_what_memory_allows() -> None:
    n_ctx, gpu_layers, _ = chosen(Memory(16 * GIB))
    assert gpu_layers == 0
    assert 4096 < n_ctx < 131072
    assert n_ctx % 1024 == 0
    more = needs_of(MODEL, ROWS, OPEN, fit(MODEL, ROWS, OPEN, HOST_ONLY).choice)
    assert more.host > 16 * GIB


def test_one_step_more_would_not_fit() -> None:
    memory = Memory(16 * GIB)
    choice = fit(MODEL, ROWS, OPEN, memory).choice
    longer = replace(choice, n_ctx=choice.n_ctx + 1024)
    assert needs_of(MODEL, ROWS, OPEN, longer).host > memory.host


def test_the_context_never_falls_below_the_minimum() -> None:
    found = fit(MODEL, ROWS, OPEN, Memory(2 * GIB))
    assert (found.fits, found.choice.n_ctx) == (False, 4096)
    small = replace(MODEL, n_ctx_train=2048)
    assert fit(small, ROWS, OPEN, Memory(0)).choice.n_ctx == 2048


def test_a_context_that_was_asked_for_is_kept() -> None:
    found = fit(MODEL, ROWS, replace(OPEN, n_ctx=131072), Memory(16 * GIB))
    assert (found.fits, found.choice.n_ctx) == (False, 131072)


def test_a_gpu_gets_a_shorter_context_before_it_gets_fewer_layers() -> None:
    n_ctx, gpu_layers, _ = chosen(Memory(64 * GIB, (8 * GIB,)))
    assert gpu_layers == 33
    assert 4096 <= n_ctx < 131072


def test_layers_that_do_not_fit_stay_on_the_host() -> None:
    n_ctx, gpu_layers, _ = chosen(Memory(64 * GIB, (3 * GIB,)))
    assert n_ctx == 4096
    assert 0 < gpu_layers < 33


def test_layers_that_were_asked_for_are_kept() -> None:
    assert chosen(Memory(64 * GIB, (8 * GIB,)), replace(OPEN, gpu_layers=10))[1] == 10
    found = fit(MODEL, ROWS, replace(OPEN, gpu_layers=33), Memory(64 * GIB, (3 * GIB,)))
    assert (found.fits, found.choice.gpu_layers) == (False, 33)


def test_experts_move_to_the_host_before_layers_do() -> None:
    n_ctx, gpu_layers, n_cpu_moe = chosen(Memory(64 * GIB, (16 * GIB,)), model=EXPERTS)
    assert (n_ctx, gpu_layers) == (4096, 33)
    assert 0 < n_cpu_moe < 32


def test_two_gpus_hold_what_one_cannot() -> None:
    one = chosen(Memory(64 * GIB, (6 * GIB,)))
    two = chosen(Memory(64 * GIB, (6 * GIB, 6 * GIB)))
    assert two[:2] > one[:2]


def test_every_gpu_has_buffers_of_its_own() -> None:
    """Eight small GPUs hold less than one of the same size: each needs its buffers."""
    one = fit(MODEL, ROWS, OPEN, Memory(64 * GIB, (16 * GIB,)))
    eight = fit(MODEL, ROWS, OPEN, Memory(64 * GIB, (2 * GIB,) * 8))
    assert eight.choice.n_ctx < one.choice.n_ctx
    assert eight.needs.gpu + 8 * eight.needs.buffers <= 16 * GIB


def test_a_gpu_without_room_for_buffers_and_a_layer_gets_nothing() -> None:
    alone = fit(MODEL, ROWS, OPEN, Memory(64 * GIB, (8 * GIB,)))
    beside = fit(MODEL, ROWS, OPEN, Memory(64 * GIB, (8 * GIB, 2**28)))
    assert beside.choice == alone.choice
    assert beside.shares[1] == 0 < beside.shares[0]


@pytest.mark.parametrize(("gpu", "least", "most"), [(3 * GIB, 1, 32), (2**29, 0, 0), (0, 0, 0)])
def test_where_nothing_fits_the_gpu_still_gets_no_more_than_it_holds(
    gpu: int, least: int, most: int
) -> None:
    """llama.cpp cannot start beyond a GPU's memory; beyond the host's it swaps."""
    memory = Memory(2**20, (gpu,))
    found = fit(MODEL, ROWS, OPEN, memory)
    assert (found.fits, found.choice.n_ctx) == (False, 4096)
    assert least <= found.choice.gpu_layers <= most
    assert not found.choice.gpu_layers or found.needs.gpu_bytes(memory) <= gpu
    more = replace(found.choice, gpu_layers=found.choice.gpu_layers + 1)
    assert needs_of(MODEL, ROWS, OPEN, more).gpu_bytes(memory) > gpu


def test_rows_on_the_host_leave_the_gpu_to_the_weights() -> None:
    wishes = replace(OPEN, kv_offload=False)
    assert chosen(Memory(64 * GIB, (6 * GIB,)), wishes) == (131072, 33, 0)


def test_a_model_whose_rope_depends_on_the_context_gets_halves_only() -> None:
    """Its stored rows would be lost at every small change of the free memory."""
    model = replace(MODEL, rope_depends_on_n_ctx=True)
    sizes = {fit(model, ROWS, OPEN, Memory(n * GIB)).choice.n_ctx for n in range(6, 40)}
    assert sizes <= {131072 >> halvings for halvings in range(6)}
    assert len(sizes) > 2


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m.gguf", TinyArchitecture.LLAMA, context_length=32768)


def settings_after(
    path: Path, placement: PlacementSettings, engine: EngineSettings = DEFAULTS
) -> EngineSettings:
    return fitted(path, engine, placement, n_draft_rows=0, reserved_bytes=0)[0]


def test_a_machine_with_room_leaves_the_settings_alone(model_file: Path) -> None:
    assert settings_after(model_file, PlacementSettings()) == ON_A_CPU


def test_a_margin_that_leaves_nothing_gives_the_smallest_context(
    model_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = PlacementSettings(fit_target=Bytes(2**40), fit_ctx=2048)
    with caplog.at_level(logging.INFO, logger="rekindle.llama"):
        assert settings_after(model_file, placement).ctx_size == 2048
    [line] = [each for each in caplog.messages if each.startswith("fit: ")]
    assert line.startswith("fit: context=2048: nothing fits, this is the smallest choice")


def test_a_margin_that_leaves_a_little_gives_a_context_between(model_file: Path) -> None:
    # Rows of 1 KiB and the mask of 512 tokens: about 4 KiB for each token of context.
    margin = available_host_bytes() - 64 * 2**20
    placement = PlacementSettings(fit_target=Bytes(margin), fit_ctx=1024)
    n_ctx = settings_after(model_file, placement).ctx_size
    assert 1024 < n_ctx < 32768


def test_memory_for_stored_prefixes_is_not_given_to_the_context(model_file: Path) -> None:
    engine, _ = fitted(
        model_file,
        EngineSettings(),
        PlacementSettings(),
        n_draft_rows=0,
        reserved_bytes=2**40,
    )
    assert engine.ctx_size == 4096


@pytest.mark.parametrize(
    ("placement", "engine"),
    [
        (PlacementSettings(fit=Fit.OFF, fit_target=Bytes(2**40)), ON_A_CPU),
        (PlacementSettings(fit_target=Bytes(2**40)), replace(ON_A_CPU, ctx_size=9000)),
    ],
)
def test_off_or_with_a_given_context_nothing_is_fitted(
    model_file: Path, placement: PlacementSettings, engine: EngineSettings
) -> None:
    assert settings_after(model_file, placement, engine) == engine


def test_every_class_of_models_can_be_fitted(tiny_models: TinyModels) -> None:
    placement = PlacementSettings(fit_target=Bytes(2**40))
    for architecture in TinyArchitecture:
        assert settings_after(tiny_models(architecture), placement).ctx_size == 4096


@pytest.mark.parametrize(("free", "gpu_layers"), [(2**40, -1), (600_000, 3), (0, 0)])
def test_all_layers_stay_all_layers_and_fewer_are_a_number(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, free: int, gpu_layers: int
) -> None:
    """With a GPU that this machine need not have."""
    monkeypatch.setattr(fitting, "chosen_gpus", lambda _: [1])
    monkeypatch.setattr(fitting, "free_bytes", lambda _: free)
    engine = EngineSettings(ctx_size=256, ubatch_size=32, speculate=Speculate.OFF)
    placement = PlacementSettings(fit_target=Bytes(0))
    path = tiny_models(TinyArchitecture.LLAMA)
    found = settings_after(path, placement, engine).gpu_layers
    assert found == gpu_layers


def test_before_a_batch_size_is_chosen_the_usual_one_counts() -> None:
    """`rekindle models check` asks so."""
    assert row_format(DEFAULTS).n_ubatch == 512
    assert row_format(replace(DEFAULTS, batch_size=100)).n_ubatch == 100


@pytest.mark.parametrize(("n_fits", "n_smaller"), [(2048, 1024), (1024, 512)])
def test_memory_that_is_left_on_a_gpu_goes_to_wider_batches(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, n_fits: int, n_smaller: int
) -> None:
    """With a GPU that this machine need not have."""
    engine = EngineSettings(speculate=Speculate.OFF)
    placement = PlacementSettings(fit_target=Bytes(0))
    model = footprint(read_header(model_file))
    wanted = wishes(engine, placement, n_draft_rows=0)
    rows = row_format(replace(engine, ubatch_size=n_fits))
    whole = Choice(model.n_ctx_train, len(model.layers) + 1, 0)
    needed = needs_of(model, rows, wanted, whole).gpu_bytes(Memory(0, (2**40,)))
    monkeypatch.setattr(fitting, "chosen_gpus", lambda _: [0])

    def found(n_free: int, engine: EngineSettings = engine) -> tuple[int, int, int]:
        monkeypatch.setattr(fitting, "free_bytes", lambda _: n_free)
        settings = settings_after(model_file, placement, engine)
        return settings.ubatch_size, settings.ctx_size, settings.gpu_layers

    assert found(needed) == (n_fits, 0, -1)
    assert found(needed - 1) == (n_smaller, 0, -1)
    assert found(needed, replace(engine, ubatch_size=64)) == (64, 0, -1)
    assert found(needed, replace(engine, batch_size=700)) == (512, 0, -1)
    given = replace(engine, ctx_size=model.n_ctx_train, gpu_layers=len(model.layers) + 1)
    assert found(needed, given) == (n_fits, given.ctx_size, given.gpu_layers)
    # Without flash attention, a wide batch takes far more than the estimate.
    assert found(2**40, replace(engine, flash_attn=FlashAttn.OFF))[0] == 512
    monkeypatch.setattr(fitting, "chosen_gpus", lambda _: [0, 1])
    assert found(2**40)[0] == 512


@pytest.mark.parametrize(
    ("free", "device", "split"),
    [
        ([0, 0], "none", []),  # llama.cpp would need buffers there, even without a layer
        ([2**40, 0], None, [1, 0]),
        ([2**40, 2**40], None, [1, 1]),
        ([2**40], None, []),
    ],
)
def test_gpus_get_layers_by_the_room_beside_their_buffers(
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    free: list[int],
    device: str | None,
    split: list[float],
) -> None:
    """With GPUs that this machine need not have."""
    monkeypatch.setattr(fitting, "chosen_gpus", lambda _: list(range(len(free))))
    monkeypatch.setattr(fitting, "free_bytes", free.__getitem__)
    engine = EngineSettings(ctx_size=256, ubatch_size=32, speculate=Speculate.OFF)
    asked = PlacementSettings(fit_target=Bytes(0))
    path = tiny_models(TinyArchitecture.LLAMA)

    def placed(asked: PlacementSettings, engine: EngineSettings) -> PlacementSettings:
        return fitted(path, engine, asked, n_draft_rows=0, reserved_bytes=0)[1]

    chosen = placed(asked, engine)
    shares = tensor_shares(chosen)
    assert chosen.device == device
    assert [share / max(shares) for share in shares] == split
    own = replace(asked, tensor_split="1")
    assert placed(own, engine) == own
    assert placed(asked, replace(engine, gpu_layers=2)) == asked
