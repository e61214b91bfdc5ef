"""Rows of a catalogue that hold anything: damage that is dropped, not a crash."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import Retention
from rekindle.cache.names import Named
from rekindle.generation.request import Rank
from tests.cache.entries import MODEL, make_entry

NOT_UTF_8 = "CAST(x'fffe41' AS TEXT)"
ANYTHING = [NOT_UTF_8, "'x'", "x''", "zeroblob(100000)", "-1", "9223372036854775807", "9e999"]
ENTRY_COLUMNS = (
    *("key", "parent", "fingerprint", "kind", "start", "payload_bytes", "compute_seconds"),
    *("reason", "created_at", "disk_bytes", "last_used_at", "hits", "priority", "n_children"),
    *("rank", "session", "pinned_until", "tokens"),
)


@contextmanager
def damaged(directory: Path, table: str, column: str, value: str) -> Iterator[Catalog]:
    """Yield a catalogue of two entries and a name, with one value replaced in each table row."""
    files = EntryFiles(directory)
    with closing(open_catalog(directory)) as catalog:
        for seed in (1, 2):
            entry = make_entry(seed)
            files.write(entry)
            catalog.add([entry.header], retention=Retention(Rank.MAIN, "ann", 0.0))
        tokens = make_entry(1).header.tokens
        named = Named(root=MODEL, name="n", tokens=tokens, session="ann", named_at=1.0)
        catalog.give_name(named, fingerprint=MODEL)
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as connection:
        last = f"WHERE rowid = (SELECT max(rowid) FROM {table})" if table != "totals" else ""
        connection.execute(f"UPDATE {table} SET {column} = {value} {last}")
        connection.commit()
    with closing(open_catalog(directory)) as catalog:
        yield catalog


@pytest.mark.parametrize("value", ANYTHING)
@pytest.mark.parametrize("column", ENTRY_COLUMNS)
def test_a_row_with_any_value_is_sound_or_dropped(column: str, value: str, tmp_path: Path) -> None:
    with damaged(tmp_path, "entries", column, value) as catalog:
        keys = {make_entry(1).header.key, make_entry(2).header.key}
        rows = list(catalog.rows())
        assert make_entry(1).header.key in {row.header.key for row in rows}
        for row in rows:
            assert row.header.key in keys
            assert isinstance(row.retention.session, str)
            assert 0 <= row.last_used_at + row.retention.pinned_until + row.hits < 1e30
            assert 0 <= row.header.file_bytes < 2**63 + 10_000
        assert set(catalog.all_keys()) == keys
        evicted = (
            catalog.evict(limit_bytes=0, target_bytes=0, now=1e12, is_spared=lambda key: False)
            if column not in ("disk_bytes", "n_children", "pinned_until")
            else []
        )
        assert set(evicted) <= keys


@pytest.mark.parametrize("value", ANYTHING)
@pytest.mark.parametrize("column", ["root", "name", "tokens", "session", "named_at"])
def test_a_name_with_any_value_is_sound_or_dropped(column: str, value: str, tmp_path: Path) -> None:
    with damaged(tmp_path, "names", column, value) as catalog:
        for named in catalog.names(fingerprint=MODEL):
            assert len(named.root) == 16
            assert len(named.tokens) % 4 == 0
            assert isinstance(named.name + named.session, str)
            assert -10 < named.named_at < 1e19


@pytest.mark.parametrize("value", ANYTHING)
@pytest.mark.parametrize("column", ["fingerprint", "n_entries", "n_tokens", "n_bytes"])
def test_totals_with_any_value_do_not_stop_a_server(
    column: str, value: str, tmp_path: Path
) -> None:
    with damaged(tmp_path, "totals", column, value) as catalog:
        for fingerprint, totals in catalog.totals().items():
            assert len(fingerprint) == 16
            assert isinstance(totals.n_entries + totals.n_tokens + totals.n_bytes, int)
        assert len(list(catalog.rows())) == 2
