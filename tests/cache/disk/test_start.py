"""How a start learns what is on disk: from the catalogue at once, from the files afterwards."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event as Signal
from unittest.mock import patch

from rekindle.cache.disk import residency as disk_residency
from rekindle.cache.disk.catalogue import Catalog, CatalogRow
from rekindle.cache.disk.reconcile import Differences
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import (
    CatalogueOpened,
    DiskTransfers,
    FoundEntries,
    disk_pool,
)
from rekindle.cache.entry import Key
from rekindle.cache.policy import WriteRules
from rekindle.cache.prefix_cache import CachePolicy, PrefixCache
from rekindle.cache.stores.transfers import Vanished
from rekindle.config.choices import WritePolicy
from rekindle.generation.model_state import ModelClass, StateTraits
from tests.cache.entries import MIB, MODEL, file_of, make_chain, nobody, open_tier
from tests.support.deletions import forget_now

WAIT_SECONDS = 30.0
DENSE = StateTraits(ModelClass.DENSE, has_rows=True, has_checkpoints=False)
POLICY = CachePolicy(
    memory_bytes=MIB,
    disk_bytes=64 * MIB,
    writes=WriteRules(bytes_per_hour=0, policy=WritePolicy.ALL, min_tokens=0),
    may_recompute=False,
)


class PatientTier(DiskTier):
    """Looks at the files only when it is told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, fingerprint=MODEL, budget_bytes=64 * MIB, is_leased=nobody)
        self.may_look = Signal()

    def reconcile(self, *, on_progress: Callable[[int, int], None] | None = None) -> Differences:
        assert self.may_look.wait(WAIT_SECONDS)
        return super().reconcile(on_progress=on_progress)


def stored(directory: Path, n_entries: int) -> list[Key]:
    chain = make_chain(1, n_entries)
    tier = open_tier(directory)
    for entry in chain:
        tier.put(entry)
    tier.close()
    return [entry.header.key for entry in chain]


def start(tier: DiskTier) -> DiskTransfers:
    transfers = DiskTransfers(tier, disk_pool(lambda: None))
    transfers.start()
    return transfers


def next_event(transfers: DiskTransfers) -> object:
    event = transfers.pool.wait(WAIT_SECONDS)
    assert event is not None
    return event


def listed(event: object) -> set[Key]:
    assert isinstance(event, FoundEntries)
    return {row.header.key for row in event.rows}


def test_the_catalogue_is_listed_before_any_file_is_opened(tmp_path: Path) -> None:
    keys = stored(tmp_path, 3)
    tier = PatientTier(tmp_path)
    transfers = start(tier)
    assert listed(next_event(transfers)) == set(keys)
    tier.may_look.set()
    assert isinstance(next_event(transfers), CatalogueOpened)
    transfers.close(WAIT_SECONDS)


def test_files_deleted_externally_are_reported_before_the_start_ends(tmp_path: Path) -> None:
    *_, last = stored(tmp_path, 3)
    tier = PatientTier(tmp_path)
    (tmp_path / "entries" / last.hex()[:2] / f"{last.hex()}.kv").unlink()
    transfers = start(tier)
    assert last in listed(next_event(transfers))
    tier.may_look.set()
    assert next_event(transfers) == Vanished([last])
    assert isinstance(next_event(transfers), CatalogueOpened)
    transfers.close(WAIT_SECONDS)


def test_without_its_catalogue_a_store_is_found_again_by_its_files(tmp_path: Path) -> None:
    keys = stored(tmp_path, 3)
    (tmp_path / "catalog.sqlite3").unlink()
    tier = PatientTier(tmp_path)
    tier.may_look.set()
    transfers = start(tier)
    assert listed(next_event(transfers)) == set(keys)
    opened = next_event(transfers)
    assert isinstance(opened, CatalogueOpened)
    assert opened.trouble is None
    assert tier.n_bytes > 0
    transfers.close(WAIT_SECONDS)


class StoreWithAStranger(PatientTier):
    """Its files are more than its catalogue knows, so all of it is listed twice."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.listings = 0
        self.was_listed = Signal()

    def rows(self) -> Iterator[list[CatalogRow]]:
        self.listings += 1
        yield from super().rows()
        self.was_listed.set()


def test_an_entry_deleted_during_the_start_is_not_listed_again(tmp_path: Path) -> None:
    first, second, unknown = stored(tmp_path, 3)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.open(lambda path: None)
        catalog.remove([unknown])
    tier = StoreWithAStranger(tmp_path)
    cache = PrefixCache(MODEL, DENSE, POLICY, DiskTransfers(tier, disk_pool(lambda: None)), None)
    with patch.object(disk_residency, "INDEX_SECONDS", 0.0):
        cache.start()
    assert tier.was_listed.wait(WAIT_SECONDS)
    while cache.poll():
        pass
    forget_now(cache)
    tier.may_look.set()
    cache.close(WAIT_SECONDS)
    assert tier.listings == 2
    assert cache.status().tiers[1].n_entries == 0
    assert not any(file_of(tmp_path, key).exists() for key in (first, second, unknown))
