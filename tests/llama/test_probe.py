"""The traits that a backend finds for its model when it warms up."""

import pytest

from rekindle.errors import EngineError
from rekindle.generation.model_state import ModelClass
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.llama.state import SlotMemory, StateAccess
from tests.conftest import TinyModels
from tests.llama.driver import continue_greedily, make_backend, prefill, prompt
from tests.support.tiny_models import TinyArchitecture

CLASSES = {
    TinyArchitecture.LLAMA: ModelClass.DENSE,
    TinyArchitecture.GEMMA3: ModelClass.SLIDING_WINDOW,
    TinyArchitecture.QWEN35: ModelClass.HYBRID,
    TinyArchitecture.LFM2_SWA: ModelClass.HYBRID,
    TinyArchitecture.MAMBA2: ModelClass.RECURRENT,
}


@pytest.mark.parametrize(("architecture", "model_class"), CLASSES.items())
@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("swa_full", [False, True])
def test_the_class_is_found_and_can_be_stored(
    tiny_models: TinyModels,
    architecture: TinyArchitecture,
    model_class: ModelClass,
    n_slots: int,
    *,
    swa_full: bool,
) -> None:
    model = GgufModel(tiny_models(architecture), gpu_layers=0)
    backend = make_backend(model, n_slots=n_slots, swa_full=swa_full)
    traits = backend.traits
    assert (traits.model_class, traits.off_because) == (model_class, None)
    assert traits.has_rows == (model_class is not ModelClass.RECURRENT)
    assert traits.has_checkpoints == (model_class is not ModelClass.DENSE)
    backend.close()
    model.close()


def test_nothing_of_the_probe_is_left(model: GgufModel) -> None:
    backend = make_backend(model, n_cells=256)
    assert [backend.n_positions(slot) for slot in range(5)] == [0] * 5  # the scratch slot, too
    prefill(backend, 0, prompt(256))
    backend.close()


def test_nothing_may_be_stored_before_the_probe(
    model: GgufModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaBackend, "warm_up", lambda _: None)
    backend = make_backend(model)
    assert backend.traits.off_because
    assert not backend.traits.has_rows
    assert not backend.traits.has_checkpoints
    backend.close()


def lose(*_: object) -> None:
    pass


def refuse(*_: object) -> None:
    raise EngineError("it does not fit.")


@pytest.mark.parametrize(
    ("owner", "names", "breakage", "reason"),
    [
        (StateAccess, ("import_rows", "import_checkpoint"), lose, "differs from the saved one"),
        (SlotMemory, ("write",), refuse, "it does not fit"),
        (SlotMemory, ("read",), refuse, "it does not fit"),
    ],
)
def test_a_model_that_fails_the_round_trip_is_served_without_a_store(
    model: GgufModel,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    names: tuple[str, ...],
    breakage: object,
    reason: str,
) -> None:
    healthy = make_backend(model, n_cells=256)
    tokens = prompt(245)
    prefill(healthy, 0, tokens[:-1])
    expected = continue_greedily(healthy, 0, tokens)
    healthy.close()

    for name in names:
        monkeypatch.setattr(owner, name, breakage)
    backend = make_backend(model, n_cells=256)
    monkeypatch.undo()
    assert backend.traits.off_because is not None
    assert reason in backend.traits.off_because
    prefill(backend, 0, tokens[:-1])
    assert continue_greedily(backend, 0, tokens) == expected
    backend.close()
