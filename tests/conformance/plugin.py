"""A pytest plugin for llama.cpp's tests: they run without a hub, and without packages for it."""

import sys
from types import ModuleType

import pytest

for name in ("wget", "aiohttp"):  # imported by tests that cannot run here
    sys.modules.setdefault(name, ModuleType(name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The tests' own folder is on the path while they run.
    presets = sys.modules["utils"].ServerPreset
    presets.load_all = staticmethod(lambda: None)  # would start a server for every model
