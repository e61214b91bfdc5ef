"""Deletion of turns: in memory, in the queue, in the file and its log, and of late ones."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.file import TURNS
from rekindle.cache.turns.recent import MemoryTurns, RecentTurns
from rekindle.generation.forgetting import Owner, Scope, Tombstone, Tombstones
from rekindle.generation.stored_turns import StoredTurn, TurnStore
from tests.cache.entries import MODEL
from tests.cache.turns.writer import make_turn

ANN = Owner(namespace="one", session="ann", asked_at=10.0)
BOB = Owner(namespace="one", session="bob", asked_at=10.0)
CAT = Owner(namespace="two", session="ann", asked_at=10.0)
LATER = Owner(namespace="one", session="ann", asked_at=30.0)
OWNERS = (ANN, BOB, CAT, LATER)

OF_ANN = Tombstone(scope=Scope(namespace="one", session="ann"), at=20.0)
OF_ONE = Tombstone(scope=Scope(namespace="one"), at=20.0)
OF_ALL = Tombstone(scope=Scope(), at=20.0)
LEFT = {OF_ANN: [BOB, CAT, LATER], OF_ONE: [CAT, LATER], OF_ALL: [LATER]}


def secret(owner: Owner) -> StoredTurn:
    number = OWNERS.index(owner)
    text = f"secret of {owner.session} in {owner.namespace} at {owner.asked_at}".encode()
    turn = make_turn(number, owner=owner)
    return StoredTurn(turn.id, turn.keys, text * 500, owner)  # several pages


def owners_found(turns: TurnStore) -> list[Owner]:
    return [owner for owner in OWNERS if turns.find(secret(owner).keys)]


class Server(NamedTuple):
    turns: TurnStore
    forgotten: Tombstones

    def forget(self, tombstone: Tombstone) -> int:
        self.forgotten.add(tombstone)
        return self.turns.forget(tombstone)


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    forgotten = Tombstones()
    turns: TurnStore = MemoryTurns(forgotten)
    if request.param == "disk":
        turns = TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=forgotten)
    yield Server(turns, forgotten)
    turns.close()


@pytest.mark.parametrize("tombstone", LEFT)
def test_a_deletion_leaves_other_owners_and_later_requests(
    store: Server, tombstone: Tombstone
) -> None:
    for owner in OWNERS:
        store.turns.keep(secret(owner))
    assert owners_found(store.turns) == list(OWNERS)
    assert store.forget(tombstone) == len(OWNERS) - len(LEFT[tombstone])
    assert owners_found(store.turns) == LEFT[tombstone]


def test_a_turn_that_arrives_after_its_deletion_is_not_kept(store: Server) -> None:
    store.forget(OF_ONE)
    for owner in OWNERS:
        store.turns.keep(secret(owner))
    assert owners_found(store.turns) == [CAT, LATER]


def test_a_turn_that_arrives_after_its_deletion_is_not_in_memory() -> None:
    forgotten = Tombstones()
    forgotten.add(OF_ONE)
    turns = RecentTurns(forgotten, max_turns=10, max_bytes=10**6)
    assert [turns.keep(secret(owner)) is None for owner in OWNERS] == [True, True, False, False]


def test_a_turn_is_not_found_from_the_moment_of_its_deletion(store: Server) -> None:
    """The deletion is noted. Nothing is removed yet."""
    for owner in OWNERS:
        store.turns.keep(secret(owner))
    store.forgotten.add(OF_ONE)
    assert owners_found(store.turns) == [CAT, LATER]


def test_a_deleted_turn_that_is_still_in_the_file_is_not_found(tmp_path: Path) -> None:
    forgotten = Tombstones()
    with (
        closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=forgotten)) as turns,
        closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=Tombstones())) as other,
    ):
        for owner in OWNERS:
            other.keep(secret(owner))
        assert other._writer.flush(10)
        forgotten.add(OF_ONE)
        assert owners_found(turns) == [CAT, LATER]


def test_an_unwritten_turn_is_not_written_after_its_deletion(tmp_path: Path) -> None:
    forgotten = Tombstones()
    with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=forgotten)) as turns:
        with turns._write_lock:
            turns.keep(secret(BOB))
            forgotten.add(OF_ONE)
        assert turns._writer.flush(10)
        assert b"secret of bob" not in everything(tmp_path)


@pytest.mark.parametrize("when", ["unwritten", "written", "by another server"])
def test_no_byte_of_a_deleted_turn_stays_in_the_file_or_its_log(tmp_path: Path, when: str) -> None:
    forgotten = Tombstones()
    with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=forgotten)) as turns:
        for owner in OWNERS:
            turns.keep(secret(owner))
        if when != "unwritten":
            assert turns._writer.flush(10)
            assert b"secret of bob" in everything(tmp_path)
        forgotten.add(OF_ONE)
        if when == "by another server":
            with closing(
                TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=Tombstones())
            ) as other:
                assert other.forget(OF_ONE) == 2
        n_deleted = turns.forget(OF_ONE)
        if when == "unwritten":
            assert n_deleted <= 2  # the writer has met the tombstone, perhaps
        else:
            assert n_deleted == (0 if when == "by another server" else 2)
        assert turns._writer.flush(10)
        left = everything(tmp_path)
        assert b"secret of bob" not in left
        assert b"in one at 10.0" not in left
        assert b"secret of ann in two" in left
    with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=Tombstones())) as again:
        assert owners_found(again) == [CAT, LATER]


def test_a_turn_that_another_server_deleted_does_not_return_when_it_is_used(tmp_path: Path) -> None:
    forgotten = Tombstones()
    with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=forgotten)) as turns:
        turns.keep(secret(BOB))
        assert turns._writer.flush(10)
        with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=Tombstones())) as other:
            other.forget(OF_ONE)
        forgotten.add(OF_ONE)
        turns.forget(OF_ONE)
        turns.touch([secret(BOB).id])
        assert turns._writer.flush(10)
    assert b"secret of bob" not in everything(tmp_path)


V1 = """
PRAGMA page_size = 4096; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, id BLOB NOT NULL,
    last_used_at INTEGER NOT NULL, n_bytes INTEGER NOT NULL, checksum BLOB NOT NULL,
    keys BLOB NOT NULL, data BLOB NOT NULL, UNIQUE (id, fingerprint)
);
CREATE INDEX by_use ON turns (last_used_at, n_bytes);
CREATE TABLE turn_keys (
    key BLOB NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (key, turn)
) WITHOUT ROWID;
CREATE INDEX by_turn ON turn_keys (turn);
CREATE TRIGGER removed AFTER DELETE ON turns BEGIN
    DELETE FROM turn_keys WHERE turn = OLD.number;
END;
PRAGMA application_id = 1380668501; PRAGMA user_version = 1;
"""


@pytest.fixture
def of_version_1(tmp_path: Path) -> Path:
    """A file with one turn, as version 1 wrote it, and the remains of a deleted one."""
    with closing(TurnDatabase(tmp_path, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        turns.keep(secret(ANN))
        turns.keep(secret(BOB))
    path = tmp_path / TURNS.file_name
    with closing(sqlite3.connect(path)) as now:
        columns = "number, fingerprint, id, last_used_at, n_bytes, checksum, keys, data"
        rows = now.execute(f"SELECT {columns} FROM turns").fetchall()
        keys = now.execute("SELECT * FROM turn_keys").fetchall()
    for each in TURNS.paths(tmp_path):
        each.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.executescript(V1)
        old.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        old.executemany("INSERT INTO turn_keys VALUES (?, ?)", keys)
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("PRAGMA secure_delete = OFF")
        old.execute("DELETE FROM turns WHERE id = ?", (secret(BOB).id,))
    assert b"secret of bob" in path.read_bytes()
    return tmp_path


def test_a_file_of_version_1_keeps_its_turns(of_version_1: Path) -> None:
    with closing(TurnDatabase(of_version_1, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        [found] = turns.find(secret(ANN).keys)
        assert found.data == secret(ANN).data
        assert found.owner.namespace is found.owner.session is None
        turns.keep(secret(CAT))
    assert b"secret of bob" not in everything(of_version_1)


@pytest.mark.parametrize("tombstone", LEFT)
def test_turns_of_version_1_are_deleted_by_any_deletion(
    of_version_1: Path, tombstone: Tombstone
) -> None:
    with closing(TurnDatabase(of_version_1, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        assert turns.forget(tombstone) == 1
        assert turns.find(secret(ANN).keys) == []
    assert b"secret of" not in everything(of_version_1)


def everything(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())
