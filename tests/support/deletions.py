"""Deletions as tests ask for them."""

import time

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.generation.forgetting import Deleted, Scope, Tombstone
from rekindle.generation.questions import Forget, ForgetKey
from tests.support.caches import in_one_go


def forget(namespace: str | None = "", session: str | None = None) -> Forget:
    """Delete what was asked for until now."""
    scope = Scope(namespace=namespace, session=session)
    return Forget(tombstone=Tombstone(scope=scope, at=time.time()))


def forget_key(key: str, namespace: str = "") -> ForgetKey:
    return ForgetKey(key=key, namespace=namespace, at=time.time())


def forget_now(cache: PrefixCache, namespace: str | None = None) -> Deleted:
    """Delete from a cache without an engine, all but its disk tier's part at once."""
    tombstone = forget(namespace).tombstone
    cache.begin_to_forget(tombstone)
    return in_one_go(cache.forget(tombstone))


def n_deleted(deleted: Deleted) -> int:
    return sum(deleted.counts.values())
