"""A disk tier in an empty directory."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.disk.tier import DiskTier
from tests.cache.entries import open_tier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(directory: Path) -> Iterator[DiskTier]:
    with closing(open_tier(directory)) as tier:
        yield tier
