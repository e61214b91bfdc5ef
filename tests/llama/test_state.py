"""Rows and checkpoints out of a slot and into another, for every class of memory."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.errors import ContextFull, EngineError
from rekindle.generation.model_state import ModelClass
from rekindle.llama import probe
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from tests.llama.driver import (
    BLOCK,
    Saved,
    continue_greedily,
    make_backend,
    prefill,
    prompt,
    restore,
    save,
)
from tests.support.tiny_models import MEMORY_CLASSES, TinyArchitecture

N_PROMPT = 320  # beyond every tiny model's window, and not a whole number of blocks

all_with_rows = pytest.mark.parametrize(
    "model", [one for one in MEMORY_CLASSES if one is not TinyArchitecture.MAMBA2], indirect=True
)


def test_a_restored_slot_is_byte_equal_and_continues_as_the_original(
    model: GgufModel, backend: LlamaBackend
) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:-1])
    saved = save(backend, 0, N_PROMPT - 1)
    expected = continue_greedily(backend, 0, tokens)

    restore(backend, 1, N_PROMPT - 1, saved)
    assert backend.n_positions(1) == N_PROMPT - 1
    assert save(backend, 1, N_PROMPT - 1) == saved
    assert continue_greedily(backend, 1, tokens) == expected

    # In a context that never saw the prompt, too, and from plain bytes.
    other = make_backend(model)
    restore(other, 2, N_PROMPT - 1, saved.as_bytes())
    assert save(other, 2, N_PROMPT - 1) == saved
    assert continue_greedily(other, 2, tokens) == expected
    other.close()


@all_with_rows
@pytest.mark.parametrize("n_live", [BLOCK, 192])
def test_stored_rows_go_behind_rows_that_are_live(backend: LlamaBackend, n_live: int) -> None:
    tokens = prompt(N_PROMPT + 1)
    # In this order all rows lie at multiples of 64 cells: elsewhere attention rounds otherwise.
    prefill(backend, 1, tokens[:n_live])
    prefill(backend, 0, tokens[:N_PROMPT])
    saved = save(backend, 0, N_PROMPT)
    restore(backend, 1, N_PROMPT, saved, n_live=n_live)
    assert backend.n_positions(1) == N_PROMPT
    assert save(backend, 1, N_PROMPT) == saved
    assert continue_greedily(backend, 1, tokens) == continue_greedily(backend, 0, tokens)


@all_with_rows
def test_the_size_of_a_block_is_known_before_the_first(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[int] = []
    monkeypatch.setattr(backend._memory.host_memory, "expect", expected.append)
    backend.expect_exports(BLOCK)
    prefill(backend, 0, prompt(N_PROMPT))
    asked: list[int] = []

    def allocate(n_bytes: int) -> NDArray[np.uint8]:
        asked.append(n_bytes)
        return np.empty(n_bytes, dtype=np.uint8)

    monkeypatch.setattr(backend._memory.host_memory, "allocate", allocate)
    backend.export_rows(0, 0, BLOCK)
    assert expected == [asked[-1]]


@all_with_rows
def test_a_restore_may_end_inside_a_block(backend: LlamaBackend) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:192])
    at_192 = save(backend, 0, 192)
    expected = continue_greedily(backend, 0, tokens[:193])
    backend.clear_slot(0)
    prefill(backend, 0, tokens)
    blocks = save(backend, 0, N_PROMPT).blocks
    restore(backend, 1, 192, Saved(blocks, at_192.checkpoint))
    assert save(backend, 1, 192) == at_192
    assert continue_greedily(backend, 1, tokens[:193]) == expected


@all_with_rows
def test_rows_carry_nothing_but_rows(backend: LlamaBackend) -> None:
    """Neither the window nor the recurrent state goes with a block, whose bytes are final."""
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:BLOCK])
    fresh = backend.export_rows(0, 0, BLOCK)
    prefill(backend, 0, tokens, start=BLOCK)
    assert backend.export_rows(0, 0, BLOCK) == fresh
    assert len(backend.export_rows(0, N_PROMPT - BLOCK, N_PROMPT)) == len(fresh)
    backend.copy_slot(0, 3)
    assert backend.export_rows(3, 0, BLOCK) == fresh
    assert fresh.readonly
    backend.import_rows(2, 0, BLOCK, fresh)
    assert backend.n_positions(2) == (0 if backend.traits.has_checkpoints else BLOCK)


def test_bytes_that_llama_refuses_leave_an_empty_slot_and_no_cell_taken(model: GgufModel) -> None:
    backend = make_backend(model, n_cells=512)
    prefill(backend, 0, prompt(BLOCK))
    before = save(backend, 0, BLOCK)
    good = before.as_bytes()
    for rows in good.blocks:
        assert isinstance(rows, bytes)
        for bad in (rows[:-40], rows[: len(rows) // 2], rows + b"\0", b"\1" + rows[1:], b""):
            prefill(backend, 1, prompt(64, seed=2))
            with pytest.raises(EngineError):
                backend.import_rows(1, 64, BLOCK, bad)
            assert backend.n_positions(1) == 0
    if checkpoint := good.checkpoint:
        assert isinstance(checkpoint, bytes)
        for bad in (checkpoint[:-4], checkpoint[:20], checkpoint + b"\0", b""):
            restore(backend, 1, BLOCK, Saved(good.blocks, None))
            with pytest.raises(EngineError):
                backend.import_checkpoint(1, bad)
            assert backend.n_positions(1) == 0
    # The other slot is unharmed, and the rest of the context is free.
    assert save(backend, 0, BLOCK) == before
    prefill(backend, 1, prompt(512 - BLOCK))
    backend.close()


@all_with_rows
def test_rows_that_find_no_room_are_context_full(model: GgufModel) -> None:
    backend = make_backend(model, n_cells=512)
    prefill(backend, 0, prompt(320))
    before = save(backend, 0, 320)
    prefill(backend, 1, prompt(96))
    # Room for the 32 rows that are wanted, but not for the block they come in.
    with pytest.raises(ContextFull):
        backend.import_rows(1, 96, BLOCK, before.blocks[0])
    assert backend.n_positions(1) == 0
    assert save(backend, 0, 320) == before
    restore(backend, 1, BLOCK, Saved(before.blocks[:1], None))
    backend.close()


def test_an_opaque_state_is_stored_whole(model: GgufModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_classify", lambda *_: ModelClass.OPAQUE)
    backend = make_backend(model)
    assert backend.traits.model_class is ModelClass.OPAQUE
    assert backend.traits.off_because is None
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:-1])
    saved = save(backend, 0, N_PROMPT - 1)
    assert saved.blocks == []
    backend.copy_slot(0, 2)
    expected = continue_greedily(backend, 0, tokens)
    backend.clear_slot(0)
    restore(backend, 0, N_PROMPT - 1, saved)
    assert save(backend, 0, N_PROMPT - 1) == saved
    assert not backend.can_trim(0, N_PROMPT - 2)
    restore(backend, 1, N_PROMPT - 1, saved)
    for slot in (0, 1, 2):
        assert continue_greedily(backend, slot, tokens) == expected
    backend.close()


@pytest.mark.parametrize("model", [TinyArchitecture.LLAMA], indirect=True)
def test_a_block_that_was_cut_on_the_way_takes_no_more_cells_than_are_used(
    model: GgufModel,
) -> None:
    backend = make_backend(model, n_cells=512)
    tokens = prompt(512)
    prefill(backend, 0, tokens[:BLOCK])
    rows = backend.export_rows(0, 0, BLOCK)
    backend.clear_slot(0)
    backend.import_rows(1, 0, 8, rows)
    prefill(backend, 1, tokens, start=8)
    assert backend.n_positions(1) == 512
    backend.close()
