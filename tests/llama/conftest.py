"""Every tiny model in turn, and a backend on it."""

from collections.abc import Iterator

import pytest

from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from tests.conftest import TinyModels
from tests.llama.driver import make_backend
from tests.support.tiny_models import MEMORY_CLASSES


@pytest.fixture(params=MEMORY_CLASSES, scope="module")
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[GgufModel]:
    model = GgufModel(tiny_models(request.param), gpu_layers=0)
    yield model
    model.close()


@pytest.fixture
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model)
    yield backend
    backend.close()
