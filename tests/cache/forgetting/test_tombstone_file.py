"""The tombstones of a directory are kept, shared, and expire."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.forgetting import tombstone_file
from rekindle.cache.forgetting.tombstone_file import LIFE_SECONDS, TombstoneFile
from rekindle.errors import TierFailed, TierFull
from rekindle.generation.forgetting import Scope, Tombstone
from tests.cache.entries import make_entry, open_tier


def tombstone(at: float, namespace: str | None = "", session: str | None = None) -> Tombstone:
    return Tombstone(scope=Scope(namespace=namespace, session=session), at=at)


def test_the_newest_tombstone_of_a_scope_is_kept(tmp_path: Path) -> None:
    file, now = TombstoneFile(tmp_path), time.time()
    wanted = [
        tombstone(now, None),
        tombstone(now + 1),
        tombstone(now + 2, "x"),
        tombstone(now + 3, "x", "s"),
    ]
    for each in (*wanted, tombstone(now - 5, "x"), tombstone(now - 9, "x", "s")):
        file.add(each)
    assert TombstoneFile(tmp_path).all() == wanted


def test_a_server_notices_the_tombstones_of_another(tmp_path: Path) -> None:
    mine, other = TombstoneFile(tmp_path), TombstoneFile(tmp_path)
    assert mine.all() == []
    assert not mine.changed()
    for number in range(20):
        other.add(tombstone(time.time(), "x", f"s{number}"))
        assert mine.changed()
        assert len(mine.all()) == number + 1
        assert not mine.changed()


def test_expired_tombstones_are_dropped(tmp_path: Path) -> None:
    file, now = TombstoneFile(tmp_path), time.time()
    file.add(tombstone(now - LIFE_SECONDS - 60, "old"))
    file.add(tombstone(now, "new"))
    assert [each.scope.namespace for each in file.all()] == ["new"]


def test_a_deletion_stays_unfinished_until_its_directory_is_done(tmp_path: Path) -> None:
    file, now = TombstoneFile(tmp_path), time.time()
    one, other, again = tombstone(now, "x"), tombstone(now, "y"), tombstone(now + 1, "x")
    file.add(one)
    file.add(other)
    file.finish([one])
    file.add(one)  # by an engine of the same deletion
    assert TombstoneFile(tmp_path).unfinished() == [other]
    file.add(again)
    assert file.unfinished() == [other, again]
    file.finish([one])  # says nothing about the later deletion
    assert file.unfinished() == [other, again]
    file.finish([again, other])
    assert file.unfinished() == []
    assert file.all() == [other, again]


def test_finished_deletions_of_sessions_are_dropped_above_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.forgetting.tombstone_file.MAX_TOMBSTONES", 3)
    file, now = TombstoneFile(tmp_path), time.time()
    first = [tombstone(now, "x"), tombstone(now + 1, "x", "a"), tombstone(now + 2, "x", "b")]
    for each in first:
        file.add(each)
    file.finish([first[0], first[2]])
    last = tombstone(now + 3, "x", "c")
    file.add(last)
    assert file.all() == [*first[:2], last]


def test_a_damaged_file_is_set_aside_and_started_again(tmp_path: Path) -> None:
    file = TombstoneFile(tmp_path)
    (tmp_path / "forgotten.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(TierFailed):
        file.read()
    assert file.all() == []
    file.add(tombstone(now := time.time()))
    assert file.all() == [tombstone(now)]
    [aside] = (tmp_path / "quarantine").iterdir()
    assert aside.name.endswith("forgotten.sqlite3")


def test_a_read_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_file, "_BUSY_SECONDS", 0.1)
    file = TombstoneFile(tmp_path)
    TombstoneFile(tmp_path).add(tombstone(now := time.time()))
    with closing(sqlite3.connect(tmp_path / "forgotten.sqlite3", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TierFailed, match="locked"):
            file.all()
    assert file.changed()
    assert file.all() == [tombstone(now)]


def test_nothing_is_written_while_the_tombstones_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstone_file, "_BUSY_SECONDS", 0.1)
    tier = open_tier(tmp_path)
    TombstoneFile(tmp_path).add(tombstone(time.time()))
    with closing(sqlite3.connect(tmp_path / "forgotten.sqlite3", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TierFailed, match="locked"):
            tier.put(make_entry(1))
    with pytest.raises(TierFull, match="deleted"):
        tier.put(make_entry(1))
    tier.close()


def test_the_file_is_private_to_its_owner(tmp_path: Path) -> None:
    TombstoneFile(tmp_path).add(tombstone(time.time()))
    assert (tmp_path / "forgotten.sqlite3").stat().st_mode & 0o777 == 0o600
