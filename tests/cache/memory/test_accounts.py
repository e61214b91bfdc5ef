"""The memory tier's books against what CPython and the kernel say, and tables that must end."""

import gc
import platform
import random
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import rekindle.llama.library  # noqa: F401  sets malloc up, as in a server
from rekindle.cache.entry import BLOCK_TOKENS, Kind, Reason
from rekindle.cache.entry_writer import Export
from rekindle.cache.index import Node
from rekindle.cache.pins import Pins
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.responses.store import ResponseDatabase
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.model_state import ModelClass, Payload, StateTraits
from rekindle.generation.request import USUAL_TERMS, CacheTerms
from rekindle.generation.stored_responses import StoredResponse
from tests.support.caches import cache_opener
from tests.support.deletions import forget_now
from tests.support.tables import anonymous_bytes

DENSE = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False)
RECURRENT = StateTraits(ModelClass.RECURRENT, has_rows=False, has_checkpoints=True)
MIB = 2**20


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def open_cache(memory_bytes: int, traits: StateTraits = DENSE) -> PrefixCache:
    cache = cache_opener(None, memory_bytes=memory_bytes)(traits, lambda: None)
    cache.start()
    return cache


def store(cache: PrefixCache, seed: int, *, n_tokens: int, payload_bytes: int) -> None:
    """One entry that shares nothing with others."""

    def export() -> Payload:
        return np.ones(payload_bytes, np.uint8).data.toreadonly()

    cache.writer.save_rows(
        cache.keys(tokens_of(seed, n_tokens), ""),
        0,
        n_tokens,
        Export(
            run=export,
            reason=Reason.PREFILL,
            compute_seconds=1.0,
            was_reused=False,
            terms=CacheTerms(session=f"session-{seed}"),
        ),
    )


def store_state(cache: PrefixCache, seed: int, *, payload_bytes: int) -> None:
    """A block without rows and the checkpoint behind it, as of a recurrent model."""
    store(cache, seed, n_tokens=BLOCK_TOKENS, payload_bytes=0)
    cache.writer.save_checkpoint(
        cache.keys(tokens_of(seed, BLOCK_TOKENS), ""),
        BLOCK_TOKENS,
        Export(
            run=lambda: bytes(payload_bytes),
            reason=Reason.TURN_END,
            compute_seconds=1.0,
            was_reused=False,
            terms=USUAL_TERMS,
        ),
    )


def tokens_of(seed: int, n_tokens: int) -> list[int]:
    noise = random.Random(seed)
    return [noise.randrange(50_000) for _ in range(n_tokens)]


def accounted(cache: PrefixCache) -> int:
    [memory] = cache.status().tiers
    return memory.n_bytes


def taken() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("n_entries", "n_tokens", "payload_bytes"),
    [
        (1000, BLOCK_TOKENS, 0),  # of a recurrent model: tokens that lead to a checkpoint
        (1000, 24, 3000),
        (500, BLOCK_TOKENS, 10_000),
        (50, BLOCK_TOKENS, 300_000),
    ],
)
def test_entries_take_what_is_accounted_for_them(
    n_entries: int, n_tokens: int, payload_bytes: int
) -> None:
    """Within 5 %, also where payloads are as small as those of a tiny model."""
    cache = open_cache(1000 * MIB)
    before = taken()
    for seed in range(n_entries):
        store(cache, seed, n_tokens=n_tokens, payload_bytes=payload_bytes)
    assert taken() - before == pytest.approx(accounted(cache), rel=0.05)


@pytest.mark.usefixtures("traced")
def test_replaced_and_deleted_entries_free_their_memory() -> None:
    budget_bytes = 4 * MIB
    cache = open_cache(budget_bytes)
    before = taken()
    for seed in range(400):  # four times what there is room for
        store(
            cache, seed, n_tokens=1 + seed % BLOCK_TOKENS, payload_bytes=1000 + 300 * (seed % 256)
        )
    assert accounted(cache) <= budget_bytes
    assert taken() - before == pytest.approx(accounted(cache), rel=0.05)
    forget_now(cache)
    assert accounted(cache) == 0
    assert taken() - before < 0.05 * budget_bytes


def test_blocks_without_rows_do_not_outlive_their_checkpoints_for_long() -> None:
    """By bytes alone they would be the last to go, and fill memory with what leads nowhere."""
    n_fit = 20
    cache = open_cache(n_fit * 100_000, RECURRENT)
    for seed in range(50 * n_fit):
        store_state(cache, seed, payload_bytes=90_000)
    nodes = list(cache._index.nodes())
    n_checkpoints = sum(node.kind is Kind.CHECKPOINT for node in nodes)
    assert n_checkpoints > 0.9 * n_fit
    assert len(nodes) - n_checkpoints < 3 * n_checkpoints
    newest = cache.keys(tokens_of(50 * n_fit - 1, BLOCK_TOKENS), "")
    assert cache.match(newest, BLOCK_TOKENS).n_tokens == BLOCK_TOKENS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc's malloc")
def test_large_payloads_go_back_to_the_kernel_from_between_others() -> None:
    """In a process of its own: the heap of this one may have room for some of them."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        n_returned, n_dropped = pool.submit(_drop_every_second_payload).result()
    assert n_returned > 0.9 * n_dropped


def _drop_every_second_payload() -> tuple[int, int]:
    np.ones(30 * MIB, np.uint8)  # by default, malloc would keep what is smaller from now on
    noise = random.Random(1)
    held = [np.ones(noise.randrange(MIB, 4 * MIB), np.uint8) for _ in range(60)]
    before = anonymous_bytes()
    n_dropped = sum(each.nbytes for each in held[::2])
    del held[::2]
    return before - anonymous_bytes(), n_dropped


def test_released_pins_do_not_stay_in_memory_until_they_expire() -> None:
    pins = Pins(MIB, lambda _: b"root")
    for number in range(1000):
        node = Node(number.to_bytes(16, "big"))
        assert list(pins.grant("session", [node], 1e9 + number)) == [node]
        pins.release(node.key)
    kept = Node(b"k" * 16)
    assert list(pins.grant("session", [kept], 2e9)) == [kept]
    assert len(pins._ends._heap) < 100
    assert list(pins.expired(3e9))[-1] == kept.key


def test_a_disk_that_refuses_responses_does_not_fill_memory_with_their_ids(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    store = ResponseDatabase(tmp_path / "cache", forgotten=Tombstones(), max_responses=16)
    for number in range(200):
        store.put(StoredResponse(f"resp_{number}", 2_000_000_000, b"data", USUAL_TERMS.owner))
    assert len(store._writer._queue) <= 16
    store.close()
