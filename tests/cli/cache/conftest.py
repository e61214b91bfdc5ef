from pathlib import Path

import pytest

from tests.support.cache_command import Stored, store_conversations


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return store_conversations(tmp_path / "cache")
