"""The fake backend that other tests rely on says what llama.cpp says."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rekindle.errors import DecodeFailed, EngineError
from rekindle.generation.model_state import ModelClass
from rekindle.llama import probe
from rekindle.llama.model import GgufModel
from tests.conftest import TinyModels
from tests.llama.driver import BLOCK, Saved, make_backend, prefill, prompt, restore, save
from tests.support.fake_backend import FakeBackend, InspectedBackend
from tests.support.tiny_models import SLIDING_WINDOW, TinyArchitecture

N_CELLS = 768
N_PROMPT = 320

MODELS = {
    ModelClass.DENSE: TinyArchitecture.LLAMA,
    ModelClass.SLIDING_WINDOW: TinyArchitecture.GEMMA3,
    ModelClass.HYBRID: TinyArchitecture.QWEN35,
    ModelClass.RECURRENT: TinyArchitecture.MAMBA2,
    ModelClass.OPAQUE: TinyArchitecture.LFM2_SWA,  # made so below
}


@pytest.fixture(params=MODELS)
def pair(
    request: pytest.FixtureRequest, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[InspectedBackend, InspectedBackend]]:
    model_class: ModelClass = request.param
    if model_class is ModelClass.OPAQUE:
        monkeypatch.setattr(probe, "_classify", lambda *_: model_class)
    model = GgufModel(tiny_models(MODELS[model_class]), gpu_layers=0)
    real = make_backend(model, n_cells=N_CELLS)
    fake = FakeBackend(
        model_class=model_class, n_cells=N_CELLS, window=SLIDING_WINDOW, window_slack=N_CELLS
    )
    yield real, fake
    fake.close()
    real.close()
    model.close()


def test_the_fake_answers_like_llama(pair: tuple[InspectedBackend, InspectedBackend]) -> None:
    real, fake = (observe(backend) for backend in pair)
    assert fake == real


def observe(backend: InspectedBackend) -> list[object]:
    """One walk through every verb: what it said, and which errors came when."""
    said: list[object] = [replace(backend.traits, row_bytes=0)]

    def attempt(action: Callable[[], object]) -> None:
        try:
            said.append(action())
        except EngineError as error:
            said.append(type(error))

    def look(slot: int) -> None:
        n_held = backend.n_positions(slot)
        cuts = sorted({max(0, n_held - back) for back in (n_held, 200, 100, 2, 1, 0)})
        said.append([n_held, *(backend.can_trim(slot, n_keep) for n_keep in cuts)])

    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens)
    look(0)
    saved = save(backend, 0, N_PROMPT)
    said.append((len(saved.blocks), saved.checkpoint is not None))

    restore(backend, 1, N_PROMPT, saved)
    look(1)
    assert save(backend, 1, N_PROMPT).blocks == saved.blocks
    if backend.can_trim(1, N_PROMPT - 1):
        backend.trim_slot(1, N_PROMPT - 1)
        look(1)

    # 640 of 768 cells are taken, if there are any: a copy shares them or does not fit.
    attempt(lambda: backend.copy_slot(0, 2))
    look(2)
    attempt(lambda: prefill(backend, 3, prompt(BLOCK + 64, seed=2)))
    look(3)
    backend.clear_slot(3)
    prefill(backend, 3, tokens[:64])
    # The block is larger than the room that is left, what is wanted of it is not.
    if saved.blocks:
        attempt(lambda: backend.import_rows(3, 64, BLOCK, saved.blocks[0]))
        look(3)
    backend.clear_slot(1)
    look(1)
    backend.clear_slot(3)
    restore(backend, 3, BLOCK, Saved(saved.blocks[:1], None))

    backend.clear_all()
    for slot in range(4):
        look(slot)
    attempt(lambda: prefill(backend, 0, prompt(N_CELLS + 64)))
    look(0)
    return said


@pytest.mark.parametrize("model_class", [ModelClass.SLIDING_WINDOW, ModelClass.HYBRID])
def test_rows_without_their_checkpoint_cannot_be_used(model_class: ModelClass) -> None:
    backend = FakeBackend(model_class=model_class)
    prefill(backend, 0, prompt(N_PROMPT))
    saved = save(backend, 0, N_PROMPT)
    restore(backend, 1, N_PROMPT, Saved(saved.blocks, None))
    uses: list[Callable[[], object]] = [
        lambda: backend.decode([1], [N_PROMPT], [1], [0]),
        lambda: backend.copy_slot(1, 2),
        lambda: backend.export_checkpoint(1),
        lambda: backend.can_trim(1, N_PROMPT),
        lambda: backend.n_positions(1),
    ]
    for use in uses:
        with pytest.raises(AssertionError):
            use()
    assert saved.checkpoint is not None
    backend.import_checkpoint(1, saved.checkpoint)
    backend.decode([1], [N_PROMPT], [1], [0])
    # The checkpoint belongs to 320 positions, and to no others.
    with pytest.raises(AssertionError):
        backend.import_checkpoint(1, saved.checkpoint)


def test_rows_of_another_prefix_or_place_are_noticed() -> None:
    backend = FakeBackend()
    prefill(backend, 0, prompt(N_PROMPT))
    prefill(backend, 1, prompt(BLOCK, seed=2))
    first, second, _ = save(backend, 0, N_PROMPT).blocks
    misuses: list[Callable[[], object]] = [
        lambda: backend.import_rows(1, BLOCK, 2 * BLOCK, second),  # behind another prefix
        lambda: backend.import_rows(2, 0, BLOCK, second),  # not its place
        lambda: backend.import_rows(2, BLOCK, 2 * BLOCK, second),  # with a gap before it
        lambda: backend.import_rows(2, 0, BLOCK + 1, first),  # not all in it
        lambda: backend.import_checkpoint(2, first),
        lambda: FakeBackend(model_class=ModelClass.HYBRID).import_rows(0, 0, BLOCK, first),
    ]
    for misuse in misuses:
        with pytest.raises(AssertionError):
            misuse()


def test_a_failed_decode_must_be_cleared_away() -> None:
    for model_class, suffering in ((ModelClass.DENSE, {0}), (ModelClass.HYBRID, {0, 1})):
        backend = FakeBackend(model_class=model_class)
        for slot in (0, 1):
            prefill(backend, slot, prompt(64))
        backend.decode_failures += [DecodeFailed("", rows_intact=True), DecodeFailed("")]
        for _ in range(2):
            assert {slot for slot in (0, 1) if backend.slots[slot].is_in_disorder} == set()
            with pytest.raises(DecodeFailed):
                backend.decode([1], [64], [0], [0])
        assert {slot for slot in (0, 1) if backend.slots[slot].is_in_disorder} == suffering
        with pytest.raises(AssertionError):
            backend.decode([1], [64], [0], [0])
        backend.clear_all()
        prefill(backend, 0, prompt(64))
