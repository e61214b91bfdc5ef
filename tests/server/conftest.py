"""One server with the embedded model for all tests that only read from it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.server_process import ServerProcess, serve


@pytest.fixture(scope="session")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "4") as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
