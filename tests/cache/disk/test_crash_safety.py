"""What is on disk stays there until something better is, and comes back when it is lost."""

import shutil
from pathlib import Path

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.generation.request import USUAL_TERMS
from tests.cache.test_prefix_cache import (
    ROW_BYTES,
    Open,
    keys_of,
    opened,
    save,
    text,
    wait_for_writes,
)

__all__ = ["opened"]


def n_found(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.match(keys_of(cache, tokens), len(tokens)).n_tokens


def test_a_short_block_stays_on_disk_until_its_replacement_is_written(
    opened: Open, tmp_path: Path
) -> None:
    # The budget lets the first one through, and then nothing more.
    cache = opened(tmp_path, write_bytes_per_hour=ROW_BYTES)
    turn = text(0, 100)
    save(cache, turn)
    wait_for_writes(cache, 1)
    save(cache, turn + text(1000, 50))
    assert n_found(cache, turn + text(1000, 50)) == 150
    cache.close(grace_seconds=10)
    assert n_found(opened(tmp_path), turn + text(1000, 50)) == 100


def test_a_short_block_is_deleted_once_its_replacement_is_written(
    opened: Open, tmp_path: Path
) -> None:
    cache = opened(tmp_path)
    turn = text(0, 100)
    save(cache, turn)
    save(cache, turn + text(1000, 50))
    wait_for_writes(cache, 2)
    cache.close(grace_seconds=10)
    assert len(list(tmp_path.rglob("*.kv"))) == 1


def test_a_vanished_entry_is_written_again_when_it_is_used(opened: Open, tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    conversation = text(0, 700)
    save(cache, conversation)
    wait_for_writes(cache, 3)
    shutil.rmtree(tmp_path / "cache")
    cache.use(cache.match(keys_of(cache, conversation), 700), USUAL_TERMS)
    wait_for_writes(cache, 6)
    assert cache.status().counters.disk.vanished == 3
    assert n_found(opened(tmp_path / "cache"), conversation) == 700


def test_a_vanished_entry_is_written_again_with_the_next_write(
    opened: Open, tmp_path: Path
) -> None:
    """Nothing asked for it meanwhile, and the next server would have missed it."""
    cache = opened(tmp_path / "cache")
    conversation = text(0, 700)
    save(cache, conversation)
    wait_for_writes(cache, 3)
    shutil.rmtree(tmp_path / "cache")
    save(cache, text(5000, 100))
    wait_for_writes(cache, 7)
    assert cache.status().counters.disk.vanished == 3
    assert n_found(opened(tmp_path / "cache"), conversation) == 700
