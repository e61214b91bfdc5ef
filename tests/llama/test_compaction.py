"""Rows that move to other cells: the same rows, and the same replies."""

import pytest

from rekindle.llama.compaction import PIECE_ROWS
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from tests.llama.driver import continue_greedily, make_backend, prefill, prompt, save
from tests.support.tiny_models import TinyArchitecture

N_CELLS = 3072
N_ROWS = 2 * PIECE_ROWS + 130  # some of a third piece

dense = pytest.mark.parametrize("model", [TinyArchitecture.LLAMA], indirect=True)


@pytest.fixture
def backend(model: GgufModel) -> LlamaBackend:
    return make_backend(model, n_cells=N_CELLS)


@dense
def test_rows_that_moved_down_are_the_rows_that_were(backend: LlamaBackend) -> None:
    tokens = prompt(N_ROWS)
    prefill(backend, 1, prompt(900, seed=2))
    prefill(backend, 0, tokens)
    before = save(backend, 0, N_ROWS)
    beside = save(backend, 1, 900)
    expected = continue_greedily(backend, 0, [*tokens, 7], n_tokens=4)
    backend.trim_slot(0, N_ROWS)
    assert backend.has_room_to_move
    for _ in range(2):
        backend.move_down(0)
        assert backend.n_positions(0) == N_ROWS
        assert save(backend, 0, N_ROWS) == before
        assert save(backend, 1, 900) == beside
    assert continue_greedily(backend, 0, [*tokens, 7], n_tokens=4) == expected
    backend.close()


@dense
def test_moving_into_holes_takes_no_cell_and_loses_none(backend: LlamaBackend) -> None:
    tokens = prompt(N_ROWS)
    prefill(backend, 1, prompt(1500, seed=2))
    prefill(backend, 0, tokens)
    before = save(backend, 0, N_ROWS)
    backend.clear_slot(1)
    backend.move_down(0)
    assert save(backend, 0, N_ROWS) == before
    prefill(backend, 1, prompt(N_CELLS - N_ROWS, seed=3))  # to the last cell
    assert save(backend, 0, N_ROWS) == before
    backend.close()


@dense
def test_a_context_without_a_free_cell_can_still_move(backend: LlamaBackend) -> None:
    tokens = prompt(N_ROWS)
    prefill(backend, 0, tokens)
    prefill(backend, 1, prompt(N_CELLS - N_ROWS, seed=3))
    before = save(backend, 0, N_ROWS)
    backend.move_down(0)
    assert save(backend, 0, N_ROWS) == before
    backend.close()
