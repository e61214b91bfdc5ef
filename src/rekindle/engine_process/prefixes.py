"""Opens the stored prefixes of one model: memory, disk and shared store, as the settings say."""

from collections.abc import Callable

from rekindle.cache.disk.shares import divide
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskTransfers, disk_pool
from rekindle.cache.fingerprint import Identity, cache_directory, fingerprint
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.shared.connection import SharedStore, open_shared_store
from rekindle.cache.shared.transfers import SharedTransfers, shared_pool
from rekindle.generation.model_state import StateTraits
from rekindle.link.messages import Begin

IdentityOf = Callable[[StateTraits], Identity]


class PrefixStores:
    """The prefix cache of this process. Any thread may change its memory budget."""

    def __init__(self, order: Begin, on_open: Callable[[StateTraits], None]) -> None:
        self._settings = order.cache
        self._memory_bytes = order.memory_bytes
        self._on_open = on_open
        self._cache: PrefixCache | None = None

    def open(
        self, identity_of: IdentityOf, traits: StateTraits, notify: Callable[[], None]
    ) -> PrefixCache:
        root = fingerprint(identity_of(traits))
        settings = self._settings
        can_store = traits.off_because is None
        disk = None
        if settings.cache_disk and can_store:
            tier = DiskTier(
                cache_directory(settings.cache_dir),
                fingerprint=root,
                budget_bytes=divide(settings.cache_disk).entries,
                is_leased=lambda key: cache.is_leased(key),
            )
            disk = DiskTransfers(tier, disk_pool(notify))
        shared = None
        if (store := self._open_shared()) is not None and can_store:
            shared = SharedTransfers(store, shared_pool(notify), fingerprint=root, traits=traits)
        cache = PrefixCache(root, traits, self._policy(), disk, shared)
        self._cache = cache
        self._on_open(traits)
        return cache

    def set_memory_budget(self, n_bytes: int) -> None:
        self._memory_bytes = n_bytes
        if self._cache is not None:
            self._cache.set_memory_budget(n_bytes)

    def _open_shared(self) -> SharedStore | None:
        settings = self._settings
        if settings.cache_shared is None:
            return None
        return open_shared_store(
            settings.cache_shared,
            settings.cache_shared_key,
            encrypts=settings.cache_shared_encrypt,
        )

    def _policy(self) -> CachePolicy:
        settings = self._settings
        return CachePolicy(
            memory_bytes=self._memory_bytes,
            disk_bytes=settings.cache_disk,
            writes=WriteRules(
                bytes_per_hour=settings.cache_write_budget,
                policy=settings.cache_write_policy,
                min_tokens=settings.cache_min_tokens,
            ),
            may_recompute=settings.cache_recompute,
        )
