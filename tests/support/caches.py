"""Prefix caches for engine tests: in memory, and with a disk tier in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.listing.slices import Sliced
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.shared.transfers import SharedTransfers
from rekindle.cache.stores.transfers import TransferPool
from rekindle.config.choices import WritePolicy
from rekindle.config.declare import MIB
from rekindle.engine.orders import OpenCache
from rekindle.generation.model_state import StateTraits

T = TypeVar("T")

ROOT = b"r" * 16


def in_one_go(sliced: Sliced[T]) -> T:
    """Do all slices of some long work. Return its result."""
    while True:
        try:
            next(sliced)
        except StopIteration as done:
            result: T = done.value
            return result


def cache_opener(
    directory: Path | None = None,
    *,
    memory_bytes: int = 64 * MIB,
    disk_bytes: int = 64 * MIB,
    write_bytes_per_hour: int = 0,
    write_policy: WritePolicy = WritePolicy.ALL,
    min_tokens: int = 0,
    may_recompute: bool = False,
    opened: list[PrefixCache] | None = None,
    shared: Callable[[StateTraits, Callable[[], None]], SharedTransfers] | None = None,
    make_pool: Callable[[Callable[[], None]], TransferPool] = disk_pool,
) -> OpenCache:
    """`opened` gets the cache, for tests that look inside."""
    policy = CachePolicy(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes if directory else 0,
        writes=WriteRules(
            bytes_per_hour=write_bytes_per_hour,
            policy=write_policy,
            min_tokens=min_tokens,
        ),
        may_recompute=may_recompute,
    )

    def open_cache(traits: StateTraits, notify: Callable[[], None]) -> PrefixCache:
        disk = None
        if directory is not None:
            tier = DiskTier(
                directory,
                fingerprint=ROOT,
                budget_bytes=disk_bytes,
                is_leased=lambda key: cache.is_leased(key),
            )
            disk = DiskTransfers(tier, make_pool(notify))
        access = shared(traits, notify) if shared is not None else None
        cache = PrefixCache(ROOT, traits, policy, disk, access)
        if opened is not None:
            opened.append(cache)
        return cache

    return open_cache
