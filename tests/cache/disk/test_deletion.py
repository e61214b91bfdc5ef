"""Deletions of the disk tier: what is left behind, who else writes, and what a kill leaves."""

import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from rekindle.cache.disk import catalogue, wiping
from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import reconcile
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.disk.transfers import DiskDeletion, DiskTransfers, disk_pool
from rekindle.cache.entry import Entry, Retention
from rekindle.cache.names import Named
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.generation.forgetting import Place, Scope, Tombstone
from tests.cache.entries import MODEL, make_entry, open_tier, stored_keys

NOW = time.time()
CATALOGUE = "catalog.sqlite3"
WAIT_SECONDS = 30.0


def of(session: str, entry: Entry, *, asked_at: float = NOW - 60) -> Entry:
    return replace(entry, retention=Retention(session=session, asked_at=asked_at), root=MODEL)


def tombstone(session: str | None = None, *, at: float = NOW) -> Tombstone:
    return Tombstone(scope=Scope(namespace="", session=session), at=at)


def name_of(entry: Entry, session: str, *, named_at: float = NOW - 60) -> Named:
    tokens = entry.header.tokens
    return Named(root=MODEL, name=session, tokens=tokens, session=session, named_at=named_at)


def filled(directory: Path) -> tuple[DiskTier, list[Entry]]:
    """Store entries of two sessions, until SQLite has moved rows. Return those of the first."""
    tier, noise = open_tier(directory), random.Random(1)
    entries = [of("s" if n % 2 else "t", make_entry(n, payload_bytes=10)) for n in range(200)]
    for entry in entries:
        tier.put(entry)
    for number in range(200, 400):  # others that come and go
        tier.put(of("u", make_entry(number, payload_bytes=10)))
        if number % 3 == 0:
            tier.drop([make_entry(number, payload_bytes=10).header.key])
    for entry in noise.sample(entries, 60):
        tier.mark(entry.header.key, entry.retention._replace(pinned_until=1.0))
    return tier, entries[1::2]


def left_in(directory: Path, entries: list[Entry]) -> list[Path]:
    """Return the files that have some of the tokens."""
    pieces = {entry.header.tokens[:64] for entry in entries}
    pieces |= {entry.header.tokens[-64:] for entry in entries}
    contents = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return [path for path, data in contents.items() if any(piece in data for piece in pieces)]


def test_no_copy_of_a_deleted_row_is_left_in_the_catalogue(tmp_path: Path) -> None:
    tier, entries = filled(tmp_path)
    tier.forget(tombstone("s"))
    assert left_in(tmp_path, entries) != []
    assert tier.erase().unreached == []
    assert left_in(tmp_path, entries) == []
    tier.close()


def test_copies_of_rows_that_were_evicted_before_go_with_a_deletion(tmp_path: Path) -> None:
    tier, entries = filled(tmp_path)
    tier.drop([entry.header.key for entry in entries])
    assert left_in(tmp_path, entries) != []
    assert tier.forget(tombstone("s")).keys == []
    tier.erase()
    assert left_in(tmp_path, entries) == []
    tier.close()


def test_the_next_start_ends_a_deletion_that_a_kill_cut_off(tmp_path: Path) -> None:
    tier, entries = filled(tmp_path / "before")
    tier.forget(tombstone("s"))
    EntryFiles(tier.directory).set_aside(next(tier.directory.glob("entries/*/*.kv")))
    shutil.copytree(tier.directory, directory := tmp_path / "after")  # as a kill leaves it
    tier.close()
    assert left_in(directory, entries) != []
    open_tier(directory).close()
    assert left_in(directory, entries) == []
    assert list((directory / "quarantine").iterdir()) == []


def test_the_next_start_deletes_names_whose_deletion_had_not_begun(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    entry = make_entry(1)
    tier.put(of("t", make_entry(2)))
    tier.give_name(name_of(entry, "s"))
    tier._tombstones.add(tombstone("s"))
    tier.close()
    again = open_tier(tmp_path)
    assert again.names() == []
    assert left_in(tmp_path, [entry]) == []
    again.close()


def test_a_start_after_finished_deletions_writes_the_catalogue_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, _ = filled(tmp_path)
    tier.forget(tombstone("s"))
    tier.erase()
    tier.drop(stored_keys(tier)[:5])
    tier.close()
    n_written = count_calls(monkeypatch)
    open_tier(tmp_path).close()
    assert n_written() == 0


def count_calls(monkeypatch: pytest.MonkeyPatch) -> "Count":
    count = Count()
    vacuum = Catalog.vacuum

    def counted(catalog: Catalog) -> None:
        count.n += 1
        vacuum(catalog)

    monkeypatch.setattr(Catalog, "vacuum", counted)
    return count


class Count:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        return self.n


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[DiskTransfers]:
    tier = DiskTier(tmp_path, fingerprint=MODEL, budget_bytes=2**26, is_leased=lambda key: False)
    transfers = DiskTransfers(tier, disk_pool(lambda: None))
    transfers.start()
    assert transfers._is_open.wait(WAIT_SECONDS)
    yield transfers
    transfers.close(WAIT_SECONDS)


def begun(transfers: DiskTransfers, each: Tombstone) -> DiskDeletion:
    deletion = DiskDeletion(lambda: transfers.tier.forget(each), each)
    transfers.begin_deletion(deletion)
    return deletion


def wait_for(deletion: DiskDeletion) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not deletion.is_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_deletions_that_wait_share_one_rewriting_of_the_catalogue(
    tmp_path: Path, transfers: DiskTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_written = count_calls(monkeypatch)
    with closing(open_tier(tmp_path)) as other:
        for number in range(20):
            other.put(of(f"s{number}", make_entry(number)))
        (tmp_path / "quarantine" / "1-file").write_bytes(b"damaged")
    with alone_in(tmp_path):  # the first waits for it, the others wait for the first
        deletions = [begun(transfers, tombstone(f"s{number}")) for number in range(20)]
    for deletion in deletions:
        wait_for(deletion)
    counts = [deletion.answer.counts for deletion in deletions]
    assert counts == [{Place.DISK: 1, Place.QUARANTINE: 1}, *[{Place.DISK: 1}] * 19]
    assert 1 <= n_written() <= 2


def test_a_deletion_that_the_disk_refuses_says_why(
    tmp_path: Path, transfers: DiskTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "BUSY_SECONDS", 0.1)
    with closing(open_tier(tmp_path)) as tier:
        tier.put(of("s", make_entry(1)))
    transfers.tier.close()
    transfers.tier.open()
    with closing(sqlite3.connect(tmp_path / CATALOGUE, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        deletion = begun(transfers, tombstone("s"))
        wait_for(deletion)
    [line] = deletion.answer.unreached
    assert "database is locked" in line


def test_bytes_that_could_not_be_overwritten_do_not_fail_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiping, "_LOCK_SECONDS", 0.1)
    tier, entries = filled(tmp_path)
    gone = tier.forget(tombstone("s"))
    assert set(gone.keys) == {entry.header.key for entry in entries}
    with alone_in(tmp_path / "entries"):  # another process rewrites its catalogue
        [line] = tier.erase().unreached
    assert "another process keeps it locked" in line
    assert tier.erase().unreached == []
    assert left_in(tmp_path, entries) == []
    tier.close()


def test_an_entry_from_a_clock_ahead_is_deleted(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(of("s", make_entry(1), asked_at=NOW + 3600))
    tier.give_name(name_of(make_entry(1), "s", named_at=NOW + 3600))
    gone = tier.forget(tombstone("s", at=time.time()))
    assert (len(gone.keys), gone.n_names) == (1, 1)
    tier.close()


def test_what_a_newer_request_follows_belongs_to_it(tmp_path: Path) -> None:
    """A start applies the same deletions again. They do not cover the newer request."""
    tier = open_tier(tmp_path)
    first = make_entry(1)
    second = make_entry(2, parent=first.header.key)
    second = replace(second, header=replace(second.header, start=256))
    tier.put(of("s", first))
    tier.put(of("t", second, asked_at=NOW + 0.001))
    tier.forget(tombstone("s", at=NOW - 30))
    tier.forget(tombstone("t", at=NOW - 30))
    tier.erase()
    tier.close()
    again = open_tier(tmp_path)
    owners = {row.header.key: row.retention for batch in again.rows() for row in batch}
    assert {(each.session, each.asked_at) for each in owners.values()} == {("t", NOW + 0.001)}
    assert owners.keys() == {first.header.key, second.header.key}
    again.close()


def test_a_file_whose_writer_has_not_added_its_row_keeps_its_owner(tmp_path: Path) -> None:
    entry = of("s", make_entry(1))
    open_tier(tmp_path).close()
    files = EntryFiles(tmp_path)
    with closing(Catalog(tmp_path)) as catalog, closing(Catalog(tmp_path)) as writer:
        for each in (catalog, writer):
            each.open(files.set_aside)
        with alone_in(tmp_path):
            files.write(entry)
            reader = Thread(target=reconcile, args=(catalog, files))
            reader.start()
            reader.join(0.2)
            writer.add([entry.header], retention=entry.retention, root=entry.root)
        reader.join(WAIT_SECONDS)
        [row] = catalog.rows()
    assert row.retention == entry.retention


def test_a_file_that_is_deleted_while_it_is_read_gets_no_row(tmp_path: Path) -> None:
    entry = make_entry(1)
    open_tier(tmp_path).close()
    files = EntryFiles(tmp_path)
    files.write(entry)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.open(files.set_aside)
        with alone_in(tmp_path):
            reader = Thread(target=reconcile, args=(catalog, files))
            reader.start()
            reader.join(0.2)
            files.remove([entry.header.key])
        reader.join(WAIT_SECONDS)
        assert catalog.all_keys() == []
