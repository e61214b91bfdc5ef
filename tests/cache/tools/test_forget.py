"""A directory forgets without a model, and while servers use it."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.entry import Entry, Retention, namespace_root
from rekindle.cache.names import Named
from rekindle.cache.tools.forget import forget_in
from rekindle.errors import TierFull
from rekindle.generation.forgetting import Deleted, Place, Scope, Tombstone
from tests.cache.entries import MODEL, OTHER_MODEL, make_entry, open_tier

NOW = time.time()


def of(session: str, entry: Entry, namespace: str = "") -> Entry:
    root = namespace_root(entry.header.fingerprint, namespace)
    return replace(entry, retention=Retention(session=session, asked_at=NOW - 60), root=root)


def tombstone(namespace: str | None = None, session: str | None = None) -> Tombstone:
    return Tombstone(scope=Scope(namespace=namespace, session=session), at=NOW)


def keys_in(directory: Path) -> set[str]:
    """Return the keys of files and rows, which must agree."""
    files = {path.stem for path in directory.rglob("*.kv")}
    with closing(Catalog(directory)) as catalog:
        catalog.open(lambda path: None)
        assert {key.hex() for key in catalog.all_keys()} == files
    return files


def test_every_model_of_a_directory_forgets(tmp_path: Path) -> None:
    for model in (MODEL, OTHER_MODEL):
        tier = open_tier(tmp_path, model=model)
        tier.put(of("s", make_entry(1, model=model)))
        tier.put(of("s", make_entry(2, model=model), "x"))
        tier.close()
    deleted = forget_in(tmp_path, tombstone(""))
    assert deleted == Deleted(counts={Place.DISK: 2})
    assert len(keys_in(tmp_path)) == 2
    assert forget_in(tmp_path, tombstone()).counts == {Place.DISK: 2}
    assert keys_in(tmp_path) == set()


def test_a_server_that_uses_the_directory_refuses_what_is_forgotten(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put(of("s", make_entry(1)))
    assert forget_in(tmp_path, tombstone("", "s")).counts == {Place.DISK: 1}
    with pytest.raises(TierFull, match="deleted"):
        tier.put(of("s", make_entry(1)))
    tier.put(of("t", make_entry(2)))
    tier.close()
    assert keys_in(tmp_path) == {make_entry(2).header.key.hex()}


def test_a_file_without_a_row_is_forgotten_with_its_namespace_and_any_session(
    tmp_path: Path,
) -> None:
    files = EntryFiles(tmp_path)
    root = namespace_root(MODEL, "x")
    first = make_entry(1, parent=root)
    second = make_entry(2, parent=first.header.key)
    second = replace(second, header=replace(second.header, start=256))
    for entry in (first, second, make_entry(3)):
        files.write(entry)
    deleted = forget_in(tmp_path, tombstone("x", "anybody"))
    assert deleted.counts == {Place.DISK: 2}
    assert keys_in(tmp_path) == {make_entry(3).header.key.hex()}


def test_names_of_models_without_entries_are_forgotten_too(tmp_path: Path) -> None:
    named = Named(root=MODEL, name="n", tokens=b"\0\0\1\1", session="s", named_at=NOW - 5)
    with closing(Catalog(tmp_path)) as catalog:
        catalog.open(lambda path: None)
        catalog.give_name(named, fingerprint=MODEL)
    assert forget_in(tmp_path, tombstone("")).counts == {Place.NAMES: 1}


def test_partial_files_of_killed_writers_go_with_any_deletion(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    folder = tmp_path / "entries" / "ab"
    folder.mkdir(parents=True)
    (folder / f"{'ab' * 16}.1-cafe.tmp").write_bytes(b"half of an entry")
    forget_in(tmp_path, tombstone("x"))
    assert list(folder.iterdir()) == []


def test_a_catalogue_of_the_version_before_keeps_its_pins_and_names(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    root = namespace_root(MODEL, "x")
    first = make_entry(1, parent=root)
    second = make_entry(2, parent=first.header.key)
    pinned = Retention(session="s", pinned_until=NOW + 3600)
    for entry in (first, second):
        tier.put(replace(entry, retention=pinned))
    tier.close()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as connection:
        connection.executescript(
            "DROP TRIGGER removed_entry; DROP TRIGGER removed_name; DROP TABLE wiping;"
            "ALTER TABLE entries DROP COLUMN asked_at; ALTER TABLE entries DROP COLUMN root;"
            "PRAGMA user_version = 2"
        )
    again = open_tier(tmp_path)
    rows = [row for batch in again.rows() for row in batch]
    again.close()
    assert {row.retention.pinned_until for row in rows} == {NOW + 3600}
    assert {row.root for row in rows} == {root}
    assert {row.retention.asked_at for row in rows} == {
        entry.header.created_at for entry in (first, second)
    }
    assert not list((tmp_path / "quarantine").iterdir())


def test_a_row_with_damaged_owners_is_covered_by_any_deletion(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for seed in range(1, 5):
        tier.put(of("s", make_entry(seed), "x"))
    tier.close()
    damage = ["asked_at = 'x'", "session = x'ff'", "root = 7", "start = 'x'"]
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite3")) as connection:
        for number, each in enumerate(damage, start=1):
            connection.execute(f"UPDATE entries SET {each} WHERE id = ?", (number,))
        connection.commit()
    assert forget_in(tmp_path, tombstone("x", "s")).counts[Place.DISK] == 4
    assert list(tmp_path.rglob("*.kv")) == []
