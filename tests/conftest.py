"""Models for the tests: tiny random ones per llama.cpp memory class, and the embedded one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from rekindle.model_source import resolve_model
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

# The same examples in every run, however slow the machine. HYPOTHESIS_SEARCH=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile("search" if "HYPOTHESIS_SEARCH" in os.environ else "repeatable")

TinyModels = Callable[[TinyArchitecture], Path]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    folder = tmp_path_factory.mktemp("models")

    def get(architecture: TinyArchitecture) -> Path:
        path = folder / f"{architecture}.gguf"
        return path if path.exists() else write_tiny_model(path, architecture)

    return get


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    return resolve_model(None).path


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: counts seconds, and needs the machine for itself")


def pytest_unconfigure() -> None:
    """The binding leaves these open to the very end, where a strict run complains of them."""
    from llama_cpp import _utils

    _utils.outnull_file.close()
    _utils.errnull_file.close()
