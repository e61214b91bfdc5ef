"""Audit the accounts of engine and cache: facts that hold between any two steps."""

from pathlib import Path

from rekindle.cache.entry import Key
from rekindle.cache.index import Node, Where
from rekindle.cache.memory.tier import size_in_memory
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.residency import STAGED_ENTRIES
from rekindle.engine.loop import EngineLoop
from tests.support import index_check
from tests.support.audited_backend import AuditedBackend
from tests.support.fake_backend import FakeBackend


def check_slots(loop: EngineLoop, backend: AuditedBackend) -> None:
    """Check that each slot holds the rows that the engine expects, in as many cells."""
    slots = loop._slots
    for slot in slots.all:
        wanted = slot.keys.tokens if slot.keys else []
        assert backend.tokens(slot.id) == wanted[: slot.n_rows]
        assert len(backend.tokens(slot.id)) == slot.n_rows
    if isinstance(backend.inner, FakeBackend):
        assert loop.status().n_cells_used == backend.inner.n_cells_used
    assert slots.n_cells_used <= slots.n_cells


def check_index(cache: PrefixCache) -> None:
    """Check the index against itself, the memory tier and the eviction queue."""
    index_check.check_index(cache._index)
    nodes = list(cache._index.nodes())
    in_memory = [node for node in nodes if Where.MEMORY in node.where]
    assert {node.key for node in in_memory} == set(cache._memory._entries)
    assert cache._holdings.n_on_disk == sum(Where.DISK in node.where for node in nodes)
    may_leave = {
        node.key
        for node in in_memory
        if not node.leases
        and (Where.DISK in node.where or (node.is_leaf and not node.retention.pinned_until))
    }
    assert may_leave == {key for q in cache._holdings._queues.values() for key in q._tickets}


def check_memory(cache: PrefixCache, n_slots: int) -> None:
    assert cache._memory.n_bytes == sum(_sizes_in_memory(cache))
    # One entry may exceed the budget for each sequence that needs it to continue.
    n_passing_bytes = n_slots * max(_sizes_in_memory(cache), default=0)
    assert cache._memory.n_bytes <= _allowed_bytes(cache) + n_passing_bytes


def check_nothing_is_held(loop: EngineLoop, cache: PrefixCache, backend: AuditedBackend) -> None:
    """Check an idle engine: only entries that are being written are leased."""
    writing = being_written(cache)
    for node in cache._index.nodes():
        assert node.leases == (writing.get(node.key) is node), f"{node.leases} leases"
    assert all(sampler.is_closed for sampler in backend.samplers)
    status = loop.status()
    assert (status.n_running, status.n_waiting) == (0, 0)


def check_nothing_moves(cache: PrefixCache) -> None:
    """Check that no transfer is pending."""
    assert not being_written(cache)
    assert not being_read(cache)
    assert cache._memory.n_bytes <= _allowed_bytes(cache)


def check_files(cache: PrefixCache, directory: Path) -> None:
    """Check the disk tier. Valid without pending transfers and outside changes."""
    on_disk = {node.key for node in cache._index.nodes() if Where.DISK in node.where}
    files = {bytes.fromhex(path.stem) for path in directory.glob("entries/*/*.kv")}
    assert files == on_disk


def being_written(cache: PrefixCache) -> dict[Key, Node]:
    return cache._disk.writing if cache._disk else {}


def being_read(cache: PrefixCache) -> dict[Key, int]:
    """Return the payload bytes of each entry."""
    return cache._disk._reading if cache._disk else {}


def _allowed_bytes(cache: PrefixCache) -> int:
    staged_bytes = STAGED_ENTRIES * max(_sizes_in_memory(cache), default=0)
    return max(cache._memory.budget_bytes, staged_bytes)


def _sizes_in_memory(cache: PrefixCache) -> list[int]:
    """Return the sizes of entries that are stored or being transferred."""
    headers = [entry.header for entry in cache._memory._entries.values()]
    held = [size_in_memory(header.payload_bytes, len(header.tokens)) for header in headers]
    return held + [size_in_memory(n_bytes) for n_bytes in being_read(cache).values()]
