"""The SQLite file of past turns, shared by all servers and all models of a directory.

    turns.sqlite3    beside the catalogue; nothing can rebuild it

Reads have their own connection, so that a lookup never waits for a write.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from rekindle.cache.entry import KEY_BYTES, Key
from rekindle.cache.sqlite.connection import evict_least_recently_used, placeholders
from rekindle.cache.sqlite.file import SqliteFile
from rekindle.cache.sqlite.owned_rows import (
    OWNER_COLUMNS,
    delete_covered,
    overwrite_deleted,
    owner_of,
)
from rekindle.cache.sqlite.schema import Schema
from rekindle.cache.turns.recent import Held
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_turns import StoredTurn

WRITE_BUSY_SECONDS = 2.0  # our transactions take less than a tenth of this; picked
_READ_BUSY_SECONDS = 0.2  # a request waits meanwhile; picked
_LOG_POLL_SECONDS = 0.05  # picked
_BATCH_KEYS = 500  # an old SQLite takes at most 999 parameters
_BATCH_ROWS = 250

# Bytes of a row without its data, and of each key in its two tables; measured, see cache/README.md.
_ROW_BYTES = 160
_ROW_KEY_BYTES = 72

_BY_OWNER = "CREATE INDEX by_owner ON turns (namespace, session, asked_at)"
# `data` comes last, so that SQLite reads the other columns without it.
TURNS = Schema(
    file_name="turns.sqlite3",
    application_id=0x524B5455,  # "RKTU"
    version=2,
    on_connect=overwrite_deleted,
    migrations={
        1: f"""
ALTER TABLE turns ADD COLUMN namespace TEXT;
ALTER TABLE turns ADD COLUMN session TEXT;
ALTER TABLE turns ADD COLUMN asked_at REAL;
{_BY_OWNER};
"""
    },
    tables=f"""
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    id BLOB NOT NULL,
    last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    {OWNER_COLUMNS},
    keys BLOB NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (id, fingerprint)
);
{_BY_OWNER};
CREATE INDEX by_use ON turns (last_used_at, n_bytes);
CREATE TABLE turn_keys (
    key BLOB NOT NULL,
    turn INTEGER NOT NULL,
    PRIMARY KEY (key, turn)
) WITHOUT ROWID;
CREATE INDEX by_turn ON turn_keys (turn);
CREATE TRIGGER removed AFTER DELETE ON turns BEGIN
    DELETE FROM turn_keys WHERE turn = OLD.number;
END;
""",
)
_INSERT = """
INSERT INTO turns (
    fingerprint, id, last_used_at, n_bytes, checksum, namespace, session, asked_at, keys, data
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
# CROSS JOIN makes the planner go from the keys to the turns.
_LOOK_UP = """
SELECT number, id, last_used_at, checksum
FROM turn_keys CROSS JOIN turns ON number = turn
WHERE key IN ({marks}) AND fingerprint = ?
"""
# Another server may have used the turn later.
_TOUCH = "UPDATE turns SET last_used_at = max(last_used_at, ?) WHERE id = ? AND fingerprint = ?"


class TurnRow(NamedTuple):
    """The columns that a lookup reads. Any of them may be damaged."""

    number: int
    id: bytes
    last_used_at: int
    checksum: bytes


class TurnFile(SqliteFile):
    def __init__(
        self, directory: Path, *, fingerprint: Key, max_turns: int, max_bytes: int, wal_bytes: int
    ) -> None:
        """`max_bytes` counts rows. The file is somewhat larger, and has a log beside it."""
        super().__init__(
            directory,
            TURNS,
            busy_seconds=WRITE_BUSY_SECONDS,
            read_busy_seconds=_READ_BUSY_SECONDS,
            wal_bytes=wal_bytes,
        )
        self._fingerprint = fingerprint
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._max_batch_bytes = wal_bytes // 4  # a transaction is in the log as a whole

    def look_up(self, keys: Sequence[bytes]) -> list[TurnRow]:
        """Return the rows of this model that have one of the keys."""
        rows: dict[int, TurnRow] = {}
        with self.reading() as connection:
            for first in range(0, len(keys), _BATCH_KEYS):
                batch = keys[first : first + _BATCH_KEYS]
                query = _LOOK_UP.format(marks=placeholders(batch))
                for row in connection.execute(query, (*batch, self._fingerprint)):
                    rows[row[0]] = TurnRow._make(row)
        return list(rows.values())

    def read(self, numbers: Sequence[int]) -> dict[int, Held | None]:
        """Return the turns by row number; None: the row is damaged."""
        with self.reading() as connection:
            return dict(read_rows(connection, numbers))

    def write(
        self, kept: Sequence[Held], touched: Mapping[bytes, int], damaged: Sequence[int]
    ) -> list[bytes]:
        """Insert, touch and delete turns. Return the ids of touched turns that are not there.

        After a failure some of the turns may be written.
        """
        for batch in self._batches(kept):
            with self.writing() as connection:
                for held in batch:
                    self._insert(connection, held)
                self._evict(connection)
        with self.writing() as connection:
            delete_rows(connection, damaged)
            gone = [
                id for id, used_at in touched.items() if not self._touch(connection, id, used_at)
            ]
            self._evict(connection)
        return gone

    def forget(self, is_covered: Callable[[Owner], bool]) -> int:
        """Delete the turns of covered owners, of every model. Return how many."""
        with self.writing() as connection:
            n_deleted = delete_covered(connection, "turns", is_covered)
        if n_deleted:
            self.vacuum()
        # The log has copies of the deleted rows.
        deadline = time.monotonic() + WRITE_BUSY_SECONDS
        while not self.truncate_log():
            if time.monotonic() > deadline:
                raise TierFailed(f"{self.path}: another process reads its log")
            time.sleep(_LOG_POLL_SECONDS)
        return n_deleted

    def _batches(self, kept: Sequence[Held]) -> Iterator[list[Held]]:
        batch: list[Held] = []
        n_bytes = 0
        for held in kept:
            n_bytes += row_bytes(held.turn)
            if batch and n_bytes > self._max_batch_bytes:
                yield batch
                batch, n_bytes = [], row_bytes(held.turn)
            batch.append(held)
        if batch:
            yield batch

    def _insert(self, connection: sqlite3.Connection, held: Held) -> None:
        turn, n_bytes = held.turn, row_bytes(held.turn)
        if n_bytes > self._max_bytes:
            return  # the turn would evict all others, then itself
        connection.execute(
            "DELETE FROM turns WHERE id = ? AND fingerprint = ?", (turn.id, self._fingerprint)
        )
        keys = b"".join(turn.keys)
        check = _checksum(turn.id, keys, turn.data)
        owner = (turn.owner.namespace, turn.owner.session, turn.owner.asked_at)
        row = (self._fingerprint, turn.id, held.used_at, n_bytes, check, *owner, keys, turn.data)
        number = connection.execute(_INSERT, row).lastrowid
        connection.executemany(
            "INSERT OR IGNORE INTO turn_keys VALUES (?, ?)", ((key, number) for key in turn.keys)
        )

    def _touch(self, connection: sqlite3.Connection, id: bytes, used_at: int) -> bool:
        return connection.execute(_TOUCH, (used_at, id, self._fingerprint)).rowcount > 0

    def _evict(self, connection: sqlite3.Connection) -> None:
        evict_least_recently_used(
            connection, "turns", max_rows=self._max_turns, max_bytes=self._max_bytes
        )


def read_rows(
    connection: sqlite3.Connection, numbers: Sequence[int]
) -> Iterator[tuple[int, Held | None]]:
    """Yield row numbers with their verified turns; None: the row is damaged.

    Reads in batches: an open query keeps the log from being truncated.
    """
    for first in range(0, len(numbers), _BATCH_ROWS):
        batch = numbers[first : first + _BATCH_ROWS]
        query = f"""
            SELECT number, id, last_used_at, checksum, keys, data, namespace, session, asked_at
            FROM turns WHERE number IN ({placeholders(batch)})
        """
        rows = connection.execute(query, batch).fetchall()
        for number, id, used_at, check, keys, data, *owner in rows:
            turn = _decode(id, keys, data, check, owner_of(*owner))
            if turn is None or not isinstance(used_at, int):
                yield number, None
            else:
                yield number, Held(turn, used_at)


def delete_rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
    connection.executemany("DELETE FROM turns WHERE number = ?", [(each,) for each in numbers])


def row_bytes(turn: StoredTurn) -> int:
    """Return what the turn takes in the file."""
    return len(turn.data) + _ROW_BYTES + _ROW_KEY_BYTES * len(turn.keys)


def turn_checksum(turn: StoredTurn) -> bytes:
    return _checksum(turn.id, b"".join(turn.keys), turn.data)


def _checksum(id: bytes, keys: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(b"".join((id, len(keys).to_bytes(4, "little"), keys, data)))


def _decode(
    id: object, keys: object, data: object, check: object, owner: Owner
) -> StoredTurn | None:
    """Return None if the row is damaged."""
    if not isinstance(id, bytes) or not isinstance(keys, bytes) or not isinstance(data, bytes):
        return None
    if _checksum(id, keys, data) != check:
        return None
    each = [keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES)]
    return StoredTurn(id, tuple(each), data, owner)
