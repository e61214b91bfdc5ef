"""A pytest plugin for llama.cpp's tests: they run without a hub, and without packages for it.

Servers are forked from a process that has imported everything, because each test starts one.
"""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import pytest

from tests.conformance.launcher import translated
from tests.support.fork_server import ForkedProcess, fork_rekindle

for name in ("wget", "aiohttp"):  # imported by tests that cannot run here
    sys.modules.setdefault(name, ModuleType(name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The tests' own folder is on the path while they run.
    utils: Any = sys.modules["utils"]
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # would start a server for every model
    # All that they use of the module.
    utils.subprocess = SimpleNamespace(
        Popen=started, TimeoutExpired=utils.subprocess.TimeoutExpired
    )


def started(
    arguments: Sequence[str], *, env: Mapping[str, str], stdout: IO[str], **_: object
) -> ForkedProcess:
    """Start `rekindle serve` as llama.cpp's tests start llama-server."""
    command = translated(arguments[1:], Path(os.environ["CONFORMANCE_MODELS"]))
    log = Path(stdout.name) if stdout is not sys.stdout else Path(tempfile.mkstemp(".log")[1])
    return fork_rekindle(command, env, log)
