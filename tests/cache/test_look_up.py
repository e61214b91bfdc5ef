"""Soon after a start: a prompt is found by its keys while the rest of the index is being read."""

from pathlib import Path
from threading import Event as Signal
from unittest.mock import patch

from rekindle.cache import disk_store
from rekindle.cache.block import BLOCK_TOKENS
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.prefix_keys import PrefixKeys
from tests.cache.test_prefix_cache import DENSE, save
from tests.support.caches import ROOT, cache_opener

WAIT_SECONDS = 30.0
PROMPT = list(range(3 * BLOCK_TOKENS + 100))


def open_cache(directory: Path) -> PrefixCache:
    return cache_opener(directory)(DENSE, lambda: None)


def fill(directory: Path) -> None:
    cache = open_cache(directory)
    cache.start()
    save(cache, PROMPT)
    save(cache, [7, *PROMPT])
    cache.close(WAIT_SECONDS)


def test_a_prompt_is_found_before_the_index_is_read(tmp_path: Path) -> None:
    fill(tmp_path)
    may_list = Signal()
    cache = open_cache(tmp_path)
    transfers = cache._disk._transfers  # type: ignore[union-attr]
    transfers._tell_all = lambda: may_list.wait(WAIT_SECONDS)  # type: ignore[method-assign]
    with (
        patch.object(disk_store, "INDEX_SECONDS", 0.5),
        patch.object(disk_store, "LOOK_UP_SECONDS", WAIT_SECONDS),
    ):
        cache.start()
        keys = PrefixKeys(ROOT, [*PROMPT[:-10], 1, 2, 3])
        assert cache.match(keys, len(PROMPT)).n_tokens == 0
        cache.look_up(keys, len(PROMPT))
    assert cache.match(keys, len(PROMPT)).n_tokens == len(PROMPT) - 10
    assert cache.status().tiers[1].n_entries == 4  # nothing else was read for it
    may_list.set()
    cache.close(WAIT_SECONDS)
