"""What is worth loading, storing and writing: the cache alone, with rows that are just bytes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rekindle.cache.entry import BLOCK_TOKENS, Reason
from rekindle.cache.entry_writer import Export, Saved
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.memory.tier import size_in_memory
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.restore import Restore
from rekindle.config.choices import WritePolicy
from rekindle.generation.events import CacheSource
from rekindle.generation.model_state import ModelClass, StateTraits
from rekindle.generation.request import USUAL_TERMS
from tests.support.caches import cache_opener

DENSE = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False)
HYBRID = StateTraits(ModelClass.HYBRID, has_rows=True, has_checkpoints=True)
ROW_BYTES = 1000

Open = Callable[..., PrefixCache]


@pytest.fixture
def opened() -> Iterator[Open]:
    caches: list[PrefixCache] = []

    def open_one(
        directory: Path | None = None, *, traits: StateTraits = DENSE, **policy: object
    ) -> PrefixCache:
        caches.append(cache_opener(directory, **policy)(traits, lambda: None))  # type: ignore[arg-type]
        caches[-1].start()
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close(grace_seconds=10)


def keys_of(cache: PrefixCache, tokens: list[int]) -> PrefixKeys:
    return PrefixKeys(cache.root, tokens)


def save(cache: PrefixCache, tokens: list[int], *, was_reused: bool = False) -> list[Saved]:
    keys = keys_of(cache, tokens)
    return [
        cache.writer.save_rows(
            keys,
            start,
            min(start + BLOCK_TOKENS, len(tokens)),
            Export(
                run=lambda: bytes(ROW_BYTES),
                reason=Reason.PREFILL,
                compute_seconds=1.0,
                was_reused=was_reused,
                terms=USUAL_TERMS,
            ),
        )
        for start in range(0, len(tokens), BLOCK_TOKENS)
    ]


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def settle(cache: PrefixCache, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
        cache.poll()


def wait_for_writes(cache: PrefixCache, count: int) -> None:
    settle(cache, lambda: cache.status().counters.disk.writes == count)


def take_all(cache: PrefixCache, restore: Restore) -> list[CacheSource]:
    sources = []
    while not restore.is_complete:
        settle(cache, lambda: restore.has_failed or restore.next_piece() is not None)
        assert not restore.has_failed
        piece = restore.next_piece()
        assert piece is not None
        sources.append(piece.source)
        restore.piece_done()
    return sources


def test_a_block_is_stored_once_however_many_conversations_have_it(opened: Open) -> None:
    cache = opened()
    assert save(cache, text(0, 600)) == [Saved.STORED] * 3
    assert save(cache, text(0, 512) + text(9000, 100)) == [Saved.KNOWN] * 2 + [Saved.STORED]


def test_a_longer_block_replaces_the_short_one_it_covers(opened: Open) -> None:
    cache = opened()
    save(cache, text(0, 300))
    save(cache, text(0, 400))
    assert cache.status().tiers[0].n_entries == 2
    assert save(cache, text(0, 350)) == [Saved.KNOWN] * 2


def test_memory_stays_within_its_budget_and_keeps_the_beginning(opened: Open) -> None:
    cache = opened(memory_bytes=10 * size_in_memory(ROW_BYTES))
    results = save(cache, text(0, 20 * BLOCK_TOKENS))
    assert results[:10] == [Saved.STORED] * 10
    assert Saved.STORED not in results[10:]
    tier = cache.status().tiers[0]
    assert tier.n_bytes <= tier.budget_bytes
    assert cache.match(keys_of(cache, text(0, 20 * BLOCK_TOKENS)), 5000).n_tokens == 2560


def test_used_entries_outlive_unused_ones(opened: Open) -> None:
    cache = opened(memory_bytes=8 * size_in_memory(ROW_BYTES))
    used, unused = text(0, 1024), text(10_000, 1024)
    save(cache, used)
    save(cache, unused)
    for _ in range(5):
        cache.use(cache.match(keys_of(cache, used), 1024), USUAL_TERMS)
    save(cache, text(20_000, 1024))
    assert cache.match(keys_of(cache, used), 1024).n_tokens == 1024
    assert cache.match(keys_of(cache, unused), 1024).n_tokens < 1024


def test_written_entries_are_found_by_the_next_process(opened: Open, tmp_path: Path) -> None:
    first = opened(tmp_path)
    tokens = text(0, 700)
    save(first, tokens)
    wait_for_writes(first, 3)
    second = opened(tmp_path)
    match = second.match(keys_of(second, tokens), 699)
    assert match.n_tokens == 699
    restore = second.restore(match, n_live=0, n_tokens=699)
    assert take_all(second, restore) == [CacheSource.DISK] * 3
    again = second.restore(match, n_live=0, n_tokens=699)
    assert take_all(second, again) == [CacheSource.MEMORY] * 3


def test_without_memory_entries_pass_through_to_the_disk(opened: Open, tmp_path: Path) -> None:
    cache = opened(tmp_path, memory_bytes=0)
    tokens = text(0, 3 * BLOCK_TOKENS)
    keys = keys_of(cache, tokens)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        saved = cache.writer.save_rows(
            keys,
            start,
            start + BLOCK_TOKENS,
            Export(
                run=lambda: bytes(ROW_BYTES),
                reason=Reason.PREFILL,
                compute_seconds=1.0,
                was_reused=False,
                terms=USUAL_TERMS,
            ),
        )
        assert saved is Saved.STORED
    wait_for_writes(cache, 3)
    assert cache.status().tiers[0].n_bytes == 0
    match = cache.match(keys, len(tokens))
    assert take_all(cache, cache.restore(match, n_live=0, n_tokens=len(tokens)))
    assert cache.status().tiers[0].n_bytes == 0


def test_one_shot_prompts_stop_being_written_when_half_the_budget_is_gone(
    opened: Open, tmp_path: Path
) -> None:
    cache = opened(tmp_path, write_bytes_per_hour=20 * ROW_BYTES)
    for number in range(20):
        save(cache, text(number * 10_000, BLOCK_TOKENS))
    settle(cache, lambda: cache.status().counters.disk.writes >= 10)
    assert cache.status().counters.disk.writes <= 11
    assert cache.status().counters.disk.writes_refused >= 9
    save(cache, text(900_000, BLOCK_TOKENS), was_reused=True)
    settle(cache, lambda: cache.status().counters.disk.writes >= 11)


def test_with_the_policy_reused_only_the_second_use_is_written(
    opened: Open, tmp_path: Path
) -> None:
    cache = opened(tmp_path, write_policy=WritePolicy.REUSED)
    tokens = text(0, 512)
    save(cache, tokens)
    assert cache.status().counters.disk.writes_refused == 2
    cache.use(cache.match(keys_of(cache, tokens), 512), USUAL_TERMS)
    wait_for_writes(cache, 2)


def test_prefixes_below_the_minimum_are_not_written(opened: Open, tmp_path: Path) -> None:
    cache = opened(tmp_path, min_tokens=300)
    save(cache, text(0, 280))
    assert cache.status().counters.disk.writes_refused == 2
    save(cache, text(0, 600))
    wait_for_writes(cache, 3)  # a longer prefix takes its beginning along


@pytest.mark.parametrize(
    ("seconds_to_load_a_block", "n_loaded"), [(0.1, 1024), (0.3, 0), (0.26, 0), (0.25, 1024)]
)
def test_loading_stops_where_computing_is_faster(
    opened: Open, seconds_to_load_a_block: float, n_loaded: int
) -> None:
    cache = opened(may_recompute=True)
    tokens = text(0, 1024)
    save(cache, tokens)
    cache.gate.put_speed.observe(ROW_BYTES, seconds_to_load_a_block)
    match = cache.match(keys_of(cache, tokens), 1024)
    n_worth = cache.gate.n_worth_loading(
        match, n_live=0, n_gained=1024, prefill_seconds_per_token=0.25 / BLOCK_TOKENS
    )
    assert n_worth == n_loaded


def test_entries_are_loaded_while_no_speed_is_measured(opened: Open) -> None:
    cache = opened(may_recompute=True)
    tokens = text(0, 1024)
    save(cache, tokens)
    match = cache.match(keys_of(cache, tokens), 1024)
    assert (
        cache.gate.n_worth_loading(match, n_live=0, n_gained=1024, prefill_seconds_per_token=1e-9)
        == 1024
    )


def test_a_file_that_is_gone_is_a_miss_and_the_next_lookup_knows(
    opened: Open, tmp_path: Path
) -> None:
    first = opened(tmp_path)
    tokens = text(0, 700)
    save(first, tokens)
    wait_for_writes(first, 3)
    second = opened(tmp_path)
    match = second.match(keys_of(second, tokens), 700)
    victim = match.blocks[1]
    [file] = tmp_path.rglob(f"{victim.key.hex()}*")
    file.unlink()
    restore = second.restore(match, n_live=0, n_tokens=700)
    settle(second, lambda: restore.has_failed)
    restore.give_up()
    assert second.status().counters.disk.vanished == 1
    assert second.match(keys_of(second, tokens), 700).n_tokens == 256


def test_an_entry_the_backend_refuses_is_quarantined_and_not_retried(
    opened: Open, tmp_path: Path
) -> None:
    cache = opened(tmp_path)
    tokens = text(0, 300)
    save(cache, tokens)
    wait_for_writes(cache, 2)
    match = cache.match(keys_of(cache, tokens), 300)
    cache.distrust(match.blocks[0], "the backend refused it")
    assert cache.match(keys_of(cache, tokens), 300).n_tokens == 0
    assert cache.status().counters.disk.quarantined == 1
    settle(cache, lambda: len(list((tmp_path / "quarantine").iterdir())) == 1)


def test_checkpoints_of_a_long_conversation_are_thinned(opened: Open) -> None:
    cache = opened(traits=HYBRID)
    tokens = text(0, 100 * BLOCK_TOKENS)
    save(cache, tokens)
    keys = keys_of(cache, tokens)
    positions = range(100, 100 * BLOCK_TOKENS, 100)
    for position in positions:
        cache.writer.save_checkpoint(
            keys,
            position,
            Export(
                run=lambda: bytes(10 * ROW_BYTES),
                reason=Reason.BOUNDARY,
                compute_seconds=0.1,
                was_reused=False,
                terms=USUAL_TERMS,
            ),
        )
    kept = [position for position in positions if cache.match(keys, position).n_tokens == position]
    assert len(kept) <= 17
    assert kept[0] == positions[0]
    assert kept[-1] == positions[-1]


def test_a_cache_that_is_off_stores_and_finds_nothing() -> None:
    cache = PrefixCache.switched_off("a test")
    assert set(save(cache, text(0, 300))) == {Saved.REFUSED}
    assert cache.match(keys_of(cache, text(0, 300)), 300).n_tokens == 0
    assert cache.status().off_because == "a test"
