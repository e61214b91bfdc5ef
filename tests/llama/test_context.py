"""Decoding, forking and cutting slots, on one tiny random model per class of memory."""

from contextlib import closing
from pathlib import Path

import pytest

from rekindle.errors import ContextFull, DecodeFailed
from rekindle.generation.model_state import ModelClass
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.llama.quantize import quantize
from tests.conftest import TinyModels
from tests.llama.driver import (
    continue_greedily,
    continue_together,
    make_backend,
    prefill,
    prompt,
    restore,
    save,
)
from tests.support.tiny_models import SLIDING_WINDOW, TinyArchitecture

N_PROMPT = 320  # beyond every tiny model's window, and not a multiple of 64 blocks alone

only_dense = pytest.mark.parametrize("model", [TinyArchitecture.LLAMA], indirect=True)
only_sliding = pytest.mark.parametrize("model", [TinyArchitecture.GEMMA3], indirect=True)
all_with_a_window = pytest.mark.parametrize(
    "model", [TinyArchitecture.GEMMA3, TinyArchitecture.LFM2_SWA], indirect=True
)


def test_a_copy_goes_on_without_disturbing_its_source(backend: LlamaBackend) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:-1])
    before = save(backend, 0, N_PROMPT - 1)
    for target in (1, 2):
        backend.copy_slot(0, target)
        assert backend.n_positions(target) == N_PROMPT - 1
        assert save(backend, target, N_PROMPT - 1) == before
    first = continue_greedily(backend, 1, tokens)
    assert save(backend, 0, N_PROMPT - 1) == before
    backend.copy_slot(0, 3)
    # The source decodes in the same batch as its copies, and then leaves before them.
    together, *_ = continue_together(backend, [0, 2, 3], tokens)
    assert continue_greedily(backend, 1, [*tokens, *first], n_tokens=4)
    backend.clear_slot(0)
    assert continue_together(backend, [2, 3], [*tokens, *together], n_tokens=4)


@all_with_a_window
@pytest.mark.parametrize("swa_full", [False, True])
def test_copies_of_a_long_slot_do_not_use_up_the_window_ring(
    model: GgufModel, *, swa_full: bool
) -> None:
    backend = make_backend(model, swa_full=swa_full)
    tokens = prompt(1500)
    prefill(backend, 0, tokens[:-1])
    for target in (1, 2, 3):
        backend.copy_slot(0, target)
    if backend.traits.model_class is ModelClass.SLIDING_WINDOW:
        assert backend.can_trim(1, 64) == swa_full  # a ring as large as the context is shared
    replies = continue_together(backend, [0, 1, 2, 3], tokens, n_tokens=130)
    assert replies[1] == replies[2] == replies[3]
    for target in (1, 2, 3):
        backend.clear_slot(target)
        backend.copy_slot(0, target)
    prefill(backend, 1, prompt(1499 + 130 + 64), start=1499 + 130)
    backend.close()


def test_trim_keeps_exactly_the_prefix(backend: LlamaBackend) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:192])  # whole chunks: shorter ones give other rounding
    expected = continue_greedily(backend, 0, tokens[:193])
    backend.clear_slot(0)
    prefill(backend, 0, tokens)
    if backend.can_trim(0, 192):
        backend.trim_slot(0, 192)
        assert backend.n_positions(0) == 192
        assert continue_greedily(backend, 0, tokens[:193]) == expected
    else:
        with pytest.raises(AssertionError):
            backend.trim_slot(0, 192)
        assert backend.n_positions(0) == N_PROMPT


def test_what_can_be_trimmed_depends_on_the_class(backend: LlamaBackend) -> None:
    prefill(backend, 0, prompt(N_PROMPT))
    whole = save(backend, 0, N_PROMPT)
    # As long as its ring is not full, a window of the past is still there.
    is_free = backend.traits.model_class in (ModelClass.DENSE, ModelClass.SLIDING_WINDOW)
    trims = {n_keep: backend.can_trim(0, n_keep) for n_keep in (0, 1, 192, 319, N_PROMPT)}
    assert trims == {0: True, 1: is_free, 192: is_free, 319: is_free, N_PROMPT: True}
    backend.trim_slot(0, N_PROMPT)
    assert save(backend, 0, N_PROMPT) == whole
    backend.trim_slot(0, 0)
    assert backend.n_positions(0) == 0
    assert backend.can_trim(0, 0)


@only_sliding
@pytest.mark.parametrize("swa_full", [False, True])
def test_a_restored_window_lets_go_of_one_position(model: GgufModel, *, swa_full: bool) -> None:
    backend = make_backend(model, swa_full=swa_full)
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens)
    restore(backend, 1, N_PROMPT, save(backend, 0, N_PROMPT))
    assert [backend.can_trim(1, n_keep) for n_keep in (320, 319, 318, 1)] == [1, 1, 0, 0]
    backend.trim_slot(1, 319)
    backend.trim_slot(0, 319)
    assert save(backend, 1, 319).blocks == save(backend, 0, 319).blocks
    assert continue_greedily(backend, 1, tokens) == continue_greedily(backend, 0, tokens)
    backend.close()


@only_sliding
def test_a_full_ring_bounds_what_can_be_trimmed(model: GgufModel, backend: LlamaBackend) -> None:
    tokens = prompt(1600)
    prefill(backend, 0, tokens)
    n_keep = next(n for n in range(1, 1600) if backend.can_trim(0, n))
    assert SLIDING_WINDOW < n_keep < 1600 - SLIDING_WINDOW
    assert all(backend.can_trim(0, n) for n in range(n_keep, 1601))
    n_keep = -(-n_keep // 64) * 64
    backend.trim_slot(0, n_keep)
    other = make_backend(model, swa_full=True)
    prefill(other, 0, tokens[:n_keep])
    assert continue_greedily(backend, 0, tokens[: n_keep + 1], 4) == continue_greedily(
        other, 0, tokens[: n_keep + 1], 4
    )
    other.close()


@only_dense
def test_more_tokens_than_cells_is_context_full_and_changes_nothing(model: GgufModel) -> None:
    backend = make_backend(model, n_cells=256)
    prefill(backend, 0, prompt(249))
    before = save(backend, 0, 249)
    with pytest.raises(ContextFull):
        backend.decode(prompt(64, seed=2), list(range(64)), [1] * 64, [63])
    assert save(backend, 0, 249) == before
    backend.clear_slot(0)
    backend.decode(prompt(64, seed=2), list(range(64)), [1] * 64, [63])
    backend.close()


def test_a_batch_that_is_refused_leaves_the_rows_intact(backend: LlamaBackend) -> None:
    tokens = prompt(128)
    prefill(backend, 0, tokens)
    before = save(backend, 0, 128)
    with pytest.raises(DecodeFailed) as failure:
        backend.decode([2**30], [128], [0], [0])
    assert failure.value.rows_intact
    assert save(backend, 0, 128) == before
    backend.decode([5], [128], [0], [0])


@only_dense
def test_clear_all_frees_cells_that_no_slot_owns(model: GgufModel) -> None:
    backend = make_backend(model, n_cells=256)
    prefill(backend, 0, prompt(64))
    rows = bytearray(backend.export_rows(0, 0, 64))
    first_position = 16  # behind the header, the number of streams and of cells
    assert int.from_bytes(rows[first_position : first_position + 4], "little") == 0
    rows[first_position : first_position + 4] = (-5).to_bytes(4, "little", signed=True)
    backend.import_rows(1, 0, 64, bytes(rows))
    for slot in (0, 1):
        backend.clear_slot(slot)
    with pytest.raises(ContextFull):
        prefill(backend, 0, prompt(256))
    backend.clear_all()
    assert backend.n_positions(0) == 0
    prefill(backend, 0, prompt(256))
    backend.close()


def test_two_slots_in_one_batch_do_not_see_each_other(backend: LlamaBackend) -> None:
    check_two_slots(backend)


@pytest.mark.parametrize("architecture", [TinyArchitecture.QWEN35, TinyArchitecture.LFM2_SWA])
def test_two_slots_of_a_quantised_hybrid_do_not_see_each_other(
    tiny_models: TinyModels, tmp_path: Path, architecture: TinyArchitecture
) -> None:
    """CPUs with AMX have other kernels for quantised weights: see scripts/llama_cpp/amx.patch."""
    path = tmp_path / "quantised.gguf"
    quantize(tiny_models(architecture), path, lambda done, total: None)
    with closing(GgufModel(path, gpu_layers=0)) as model, closing(make_backend(model)) as backend:
        check_two_slots(backend)


def check_two_slots(backend: LlamaBackend) -> None:
    first, second = prompt(64, seed=1), prompt(64, seed=2)
    positions = list(range(64))
    backend.decode(first + second, positions * 2, [0] * 64 + [1] * 64, [63, 127])
    for slot, tokens in ((0, first), (1, second)):
        mixed = continue_greedily(backend, slot, [*tokens, 9], n_tokens=4)
        backend.clear_slot(slot)
        prefill(backend, slot, tokens)
        assert continue_greedily(backend, slot, [*tokens, 9], n_tokens=4) == mixed


@only_dense
def test_copies_of_logits_share_no_memory(backend: LlamaBackend) -> None:
    backend.on_gpu = True  # memory for the next copy is allocated during the wait
    copies: list[tuple[memoryview, bytes]] = []
    for slot in range(3):
        tokens = prompt(8 + slot)
        backend.decode(tokens, list(range(len(tokens))), [slot] * len(tokens), [len(tokens) - 1])
        backend.wait()
        for _ in range(2):
            copy = backend.logits(0)
            copies.append((copy, bytes(copy)))
    assert all(bytes(copy) == before for copy, before in copies)
    assert len({before for _, before in copies}) == 3
