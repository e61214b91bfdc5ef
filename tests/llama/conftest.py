"""Every tiny model in turn, a backend on it, and the vocabulary of one."""

from collections.abc import Iterator

import pytest

from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.conftest import TinyModels
from tests.llama.driver import make_backend
from tests.support.tiny_models import MEMORY_CLASSES, TinyArchitecture


@pytest.fixture(params=MEMORY_CLASSES, scope="module")
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[GgufModel]:
    model = GgufModel(tiny_models(request.param), gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def vocabulary(tiny_models: TinyModels) -> Iterator[Vocabulary]:
    model = GgufModel(tiny_models(TinyArchitecture.LLAMA), gpu_layers=0)
    yield model.vocabulary
    model.close()


@pytest.fixture
def backend(model: GgufModel) -> Iterator[LlamaBackend]:
    backend = make_backend(model)
    yield backend
    backend.close()
