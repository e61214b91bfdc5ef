"""Soon after a start: a prompt is found by its keys while the rest of the index is being read."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Signal
from unittest.mock import patch

from rekindle.cache.disk import residency as disk_residency
from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.entry import BLOCK_TOKENS, Key
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.names import Named
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.generation.request import CacheTerms
from tests.cache.test_prefix_cache import DENSE, save
from tests.support.caches import ROOT, cache_opener
from tests.support.stepped_transfers import Pace, SteppedPool

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
    transfers = cache._disk.transfers  # type: ignore[union-attr]
    transfers._list = lambda: may_list.wait(WAIT_SECONDS)  # type: ignore[method-assign]
    with (
        patch.object(disk_residency, "INDEX_SECONDS", 0.5),
        patch.object(disk_residency, "LOOK_UP_SECONDS", WAIT_SECONDS),
    ):
        cache.start()
        keys = PrefixKeys(ROOT, [*PROMPT[:-10], 1, 2, 3])
        assert cache.match(keys, len(PROMPT)).n_tokens == 0
        lookup = cache.look_up(keys, len(PROMPT))
        assert lookup is not None
        until(lambda: not cache.poll() and lookup.is_answered)
    assert cache.match(keys, len(PROMPT)).n_tokens == len(PROMPT) - 10
    assert cache.status().tiers[1].n_entries == 4  # nothing else was read for it
    may_list.set()
    cache.close(WAIT_SECONDS)


def test_a_late_answer_is_used_and_no_other_request_waits_for_a_slow_disk(tmp_path: Path) -> None:
    fill(tmp_path)
    may_list, may_answer = Signal(), Signal()
    cache = open_cache(tmp_path)
    transfers = cache._disk.transfers  # type: ignore[union-attr]
    rows_along = transfers._rows_along

    def late(path: Sequence[Key]) -> list[CatalogRow]:
        may_answer.wait(WAIT_SECONDS)
        return rows_along(path)

    transfers._list = lambda: may_list.wait(WAIT_SECONDS)  # type: ignore[method-assign]
    keys = PrefixKeys(ROOT, PROMPT)
    with (
        patch.object(disk_residency, "INDEX_SECONDS", 0.2),
        patch.object(disk_residency, "LOOK_UP_SECONDS", 0.05),
        patch.object(transfers, "_rows_along", late),
    ):
        cache.start()
        lookup = cache.look_up(keys, len(PROMPT))
        assert lookup is not None
        until(lambda: lookup.is_over(time.monotonic()))
        assert cache.look_up(PrefixKeys(ROOT, [7, *PROMPT]), len(PROMPT)) is None
        assert cache.match(keys, len(PROMPT)).n_tokens == 0
        may_answer.set()
        until(lambda: not cache.poll() and lookup.is_answered)
        assert cache.look_up(PrefixKeys(ROOT, [7, *PROMPT]), len(PROMPT)) is not None
    assert cache.match(keys, len(PROMPT)).n_tokens == len(PROMPT)
    may_list.set()
    cache.close(WAIT_SECONDS)


def test_a_renamed_prompt_is_not_overwritten_by_the_index(
    tmp_path: Path,
) -> None:
    cache = open_cache(tmp_path)
    cache.start()
    terms = CacheTerms(name="sys")
    save(cache, PROMPT)
    cache.give_name(PrefixKeys(ROOT, PROMPT), len(PROMPT), terms)
    cache.close(WAIT_SECONDS)
    may_tell = Signal()
    cache = open_cache(tmp_path)
    tier = cache._disk.transfers.tier  # type: ignore[union-attr]
    names = tier.names

    def late() -> list[Named]:
        known = names()
        may_tell.wait(WAIT_SECONDS)
        return known

    with patch.object(disk_residency, "INDEX_SECONDS", 0.2), patch.object(tier, "names", late):
        cache.start()
        cache.give_name(PrefixKeys(ROOT, [7, *PROMPT]), len(PROMPT), terms)
        may_tell.set()
        until(lambda: not cache.poll() and cache._disk.is_listed)  # type: ignore[union-attr]
    [named] = cache._names.of(ROOT)
    assert named.tokens[:4] == (7).to_bytes(4, "big")
    cache.close(WAIT_SECONDS)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lookup_overtakes_the_reads_that_wait(tmp_path: Path) -> None:
    fill(tmp_path)
    opener = cache_opener(tmp_path, make_pool=SteppedPool)
    cache = opener(DENSE, lambda: None)
    cache.start()
    keys = PrefixKeys(ROOT, PROMPT)
    restore = cache.restore(cache.match(keys, len(PROMPT)), n_live=0, n_tokens=len(PROMPT))
    transfers = cache._disk.transfers  # type: ignore[union-attr]
    answers: SimpleQueue[list[CatalogRow]] = SimpleQueue()
    transfers.look_up([keys.after_blocks(0)], answers.put)
    transfers.pool.work(Pace(n_reads=1, n_writes=0))  # type: ignore[union-attr]
    assert not answers.empty()
    cache.poll()
    assert restore.next_piece() is None
    restore.give_up()
    cache.close(WAIT_SECONDS)
