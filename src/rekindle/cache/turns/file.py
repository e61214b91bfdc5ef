"""The SQLite file of past turns: its schema, and its life in a directory that may fail.

    turns.sqlite3    beside the catalogue; nothing can make it anew, so it is not replaced
                     because somebody holds it locked or because a later version wrote it

One connection reads, for any thread; another one writes, for one thread, so that a find never
waits for somebody else's write. Several servers, also of several models, share one file and its
bounds. Everything raises TierFailed when SQLite or the system cannot do it.
"""

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import xxhash

from rekindle.cache.disk.database import alone_in, column
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.entry import KEY_BYTES, Key
from rekindle.cache.turns.recent import Held
from rekindle.errors import TierFailed
from rekindle.generation.stored_turns import StoredTurn

FILE_NAME = "turns.sqlite3"
SCHEMA_VERSION = 1

_APPLICATION_ID = 0x524B5455  # "RKTU"
WRITE_BUSY_SECONDS = 2.0  # no transaction of ours takes a tenth of it; picked
_READ_BUSY_SECONDS = 0.2  # somebody waits for a reply meanwhile; picked
_PAGE_BYTES = 4096
_BATCH_KEYS = 500  # below 999, what an old SQLite takes as parameters
BATCH_ROWS = 250

# What a row takes beside its data, and each key in its two tables; measured, see cache/README.md.
_ROW_BYTES = 160
_ROW_KEY_BYTES = 72

DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)

# `data` comes last: what precedes it is read without it.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,
    fingerprint BLOB NOT NULL,
    id BLOB NOT NULL,
    last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    keys BLOB NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (id, fingerprint)
);
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
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_INSERT = """
INSERT INTO turns (fingerprint, id, last_used_at, n_bytes, checksum, keys, data)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
# CROSS JOIN: from the keys to the turns, whatever the planner thinks of it.
_LOOK_UP = """
SELECT number, id, last_used_at, checksum
FROM turn_keys CROSS JOIN turns ON number = turn
WHERE key IN ({marks}) AND fingerprint = ?
"""
TOTALS = "SELECT count(*), coalesce(sum(CAST(n_bytes AS INTEGER)), 0) FROM turns"


class Row(NamedTuple):
    """Of what SQLite gave back: any of it may be damaged."""

    number: int
    id: bytes
    last_used_at: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    held: list[Held]
    damaged: list[int]  # numbers of rows


class TurnFile:
    def __init__(
        self, directory: Path, *, fingerprint: Key, max_turns: int, max_bytes: int, wal_bytes: int
    ) -> None:
        """`max_bytes` of rows; the file is somewhat larger, and has a log beside it."""
        self.path = directory / FILE_NAME
        self._fingerprint = fingerprint
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._wal_bytes = wal_bytes
        self._lock = threading.Lock()  # for the connection that reads
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._damaged_inode: tuple[int, int] | None = None

    def open(self) -> bool:
        """Makes it when there is none; False: one that cannot be used was set aside first."""
        self.close()
        with self._errors_translated():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone_in(self.path.parent):
                is_usable = not self._is_known_to_be_damaged()
                if is_usable:
                    try:
                        self._connect()
                    except Unusable:
                        is_usable = False
                if not is_usable:
                    set_aside(self.path)
                    self._connect()
        self._damaged_inode = None
        return is_usable

    def close(self) -> None:
        with self._lock, self._errors_translated():
            connections = self._reader, self._writer
            self._reader = self._writer = None
            for connection in connections:
                if connection is not None:
                    connection.close()

    def is_current(self) -> bool:
        """Whether the file that is open is still the one in the directory, and sound."""
        try:
            return self._writer is not None and _inode(self.path.stat()) == self._inode
        except OSError:
            return False

    def look_up(self, keys: Sequence[bytes]) -> list[Row]:
        """Of this model."""
        rows: dict[int, Row] = {}
        with self._reading() as connection:
            for first in range(0, len(keys), _BATCH_KEYS):
                batch = keys[first : first + _BATCH_KEYS]
                query = _LOOK_UP.format(marks=_marks(batch))
                for row in connection.execute(query, (*batch, self._fingerprint)):
                    rows[row[0]] = Row._make(row)
        return list(rows.values())

    def read(self, numbers: Sequence[int]) -> Reading:
        reading = Reading([], [])
        with self._reading() as connection:
            for first in range(0, len(numbers), BATCH_ROWS):
                batch = numbers[first : first + BATCH_ROWS]
                read_rows(connection, batch, reading)
        return reading

    def write(
        self, kept: Sequence[Held], touched: Mapping[bytes, int], damaged: Sequence[int]
    ) -> list[bytes]:
        """Those of the touched that are not there. A failure leaves none or some of it written."""
        for batch in self._batches(kept):
            with self._writing() as connection:
                for held in batch:
                    self._insert(connection, held)
                self._evict(connection)
        with self._writing() as connection:
            connection.executemany(
                "DELETE FROM turns WHERE number = ?", ((number,) for number in damaged)
            )
            gone = [
                id for id, used_at in touched.items() if not self._touch(connection, id, used_at)
            ]
            self._evict(connection)
        return gone

    def _batches(self, kept: Sequence[Held]) -> Iterator[list[Held]]:
        """What is written at once is in the log at once."""
        batch: list[Held] = []
        n_bytes = 0
        for held in kept:
            n_bytes += row_bytes(held.turn)
            if batch and n_bytes > self._wal_bytes // 4:
                yield batch
                batch, n_bytes = [], row_bytes(held.turn)
            batch.append(held)
        if batch:
            yield batch

    def _insert(self, connection: sqlite3.Connection, held: Held) -> None:
        turn, n_bytes = held.turn, row_bytes(held.turn)
        if n_bytes > self._max_bytes:
            return  # everything else would go, and then it would
        connection.execute(
            "DELETE FROM turns WHERE id = ? AND fingerprint = ?", (turn.id, self._fingerprint)
        )
        keys = b"".join(turn.keys)
        check = _checksum(turn.id, keys, turn.data)
        row = (self._fingerprint, turn.id, held.used_at, n_bytes, check, keys, turn.data)
        number = connection.execute(_INSERT, row).lastrowid
        connection.executemany(
            "INSERT OR IGNORE INTO turn_keys VALUES (?, ?)", ((key, number) for key in turn.keys)
        )

    def _touch(self, connection: sqlite3.Connection, id: bytes, used_at: int) -> bool:
        # Another server may have used it later.
        query = (
            "UPDATE turns SET last_used_at = max(last_used_at, ?) WHERE id = ? AND fingerprint = ?"
        )
        return connection.execute(query, (used_at, id, self._fingerprint)).rowcount > 0

    def _evict(self, connection: sqlite3.Connection) -> None:
        ((n_turns, n_bytes),) = connection.execute(TOTALS)
        doomed = []
        oldest = connection.execute(
            "SELECT number, CAST(n_bytes AS INTEGER) FROM turns ORDER BY last_used_at, number"
        )
        with closing(oldest):
            while n_turns > self._max_turns or n_bytes > self._max_bytes:
                number, row_bytes = next(oldest)
                n_turns -= 1
                n_bytes -= row_bytes
                doomed.append((number,))
        if doomed:
            connection.executemany("DELETE FROM turns WHERE number = ?", doomed)
            _shrink(connection)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors_translated():
            if self._reader is None:
                raise TierFailed(f"{self.path} is not open")
            yield self._reader

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._errors_translated():
            if self._writer is None:
                raise TierFailed(f"{self.path} is not open")
            with transaction(self._writer):
                yield self._writer

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if primary_code(error) in DAMAGED and self._inode is not None:
                self._damaged_inode = self._inode
            if primary_code(error) not in _PASSING:
                self._inode = None
            raise TierFailed(f"{self.path}: {error}") from error
        except (Unusable, TooNew) as error:
            raise TierFailed(f"{self.path}: {error}") from error
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error

    def _is_known_to_be_damaged(self) -> bool:
        """Another server may have replaced it since. `quick_check` does not find everything."""
        with suppress(FileNotFoundError):
            return self._damaged_inode == _inode(self.path.stat())
        return False

    def _connect(self) -> None:
        _create(self.path)
        writer = connect(self.path, busy_seconds=WRITE_BUSY_SECONDS)
        try:
            _prepare(writer, self._wal_bytes)
            reader = connect(self.path, busy_seconds=_READ_BUSY_SECONDS)
        except BaseException:
            writer.close()
            raise
        reader.execute("PRAGMA query_only = 1")
        with self._lock:
            self._inode = _inode(self.path.stat())
            self._reader, self._writer = reader, writer


def turn_paths(directory: Path) -> list[Path]:
    """What may be there, the file itself first: a log that is left alone is not taken up again."""
    return [directory / f"{FILE_NAME}{suffix}" for suffix in ("", "-wal", "-shm")]


def set_aside(path: Path) -> None:
    """Only while `alone_in` its directory."""
    EntryFiles(path.parent).set_aside(path)
    for sibling in turn_paths(path.parent)[1:]:
        sibling.unlink(missing_ok=True)


def turn_checksum(turn: StoredTurn) -> bytes:
    return _checksum(turn.id, b"".join(turn.keys), turn.data)


class Unusable(Exception):
    """Not turns that any version could read."""


class TooNew(Exception):
    pass


def check_is_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unusable("it is not a plain file")


def connect(path: Path, *, busy_seconds: float, mode: str = "mode=rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{mode}",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.text_factory = bytes  # nothing is text, unless a damaged row says so
    return connection


def check(connection: sqlite3.Connection) -> None:
    (application,) = column(connection, "PRAGMA application_id")
    (version,) = column(connection, "PRAGMA user_version")
    if application != _APPLICATION_ID:
        raise Unusable("it is not a file of ours")
    if version > SCHEMA_VERSION:
        raise TooNew(f"its version is {version}, this program reads {SCHEMA_VERSION}")
    (verdict,) = column(connection, "PRAGMA quick_check(1)")
    if verdict != b"ok":
        raise Unusable(verdict.decode(errors="replace"))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def read_rows(connection: sqlite3.Connection, numbers: Sequence[int], reading: Reading) -> None:
    query = f"""
        SELECT number, id, last_used_at, checksum, keys, data
        FROM turns WHERE number IN ({_marks(numbers)})
    """
    for number, id, used_at, check, keys, data in connection.execute(query, numbers):
        turn = _decode(id, keys, data, check)
        if turn is None or not isinstance(used_at, int):
            reading.damaged.append(number)
        else:
            reading.held.append(Held(turn, used_at))


def row_bytes(turn: StoredTurn) -> int:
    return len(turn.data) + _ROW_BYTES + _ROW_KEY_BYTES * len(turn.keys)


def primary_code(error: sqlite3.DatabaseError) -> int:
    return error.sqlite_errorcode & 0xFF


def _create(path: Path) -> None:
    """For the owner's eyes only. SQLite gives its other files the mode of this one."""
    # Only if it is new: closing a file takes away the locks that this process has on it, and
    # with them what keeps others from deleting the log.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        check_is_file(path)


def _prepare(connection: sqlite3.Connection, wal_bytes: int) -> None:
    try:
        if not column(connection, "SELECT 1 FROM sqlite_master LIMIT 1"):
            # Both are too late once it is in WAL mode.
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
        check(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {wal_bytes // 2}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {wal_bytes // 2 // _PAGE_BYTES}")
    except sqlite3.DatabaseError as error:
        if primary_code(error) in DAMAGED:
            raise Unusable(str(error)) from error
        raise


def _checksum(id: bytes, keys: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(b"".join((id, len(keys).to_bytes(4, "little"), keys, data)))


def _decode(id: object, keys: object, data: object, check: object) -> StoredTurn | None:
    if not isinstance(id, bytes) or not isinstance(keys, bytes) or not isinstance(data, bytes):
        return None
    if _checksum(id, keys, data) != check:
        return None
    each = [keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES)]
    return StoredTurn(id, tuple(each), data)


def _shrink(connection: sqlite3.Connection) -> None:
    """Gives pages back when many are unused, a few at a time: each one is moved."""
    (n_pages,) = column(connection, "PRAGMA page_count")
    (n_free,) = column(connection, "PRAGMA freelist_count")
    if n_free > n_pages // 4:
        connection.execute("PRAGMA incremental_vacuum(64)").fetchall()  # rows without columns


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
