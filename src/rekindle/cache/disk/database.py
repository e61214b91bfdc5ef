"""The SQLite file behind the catalogue: its schema, and its life in a directory that may fail.

It is opened, replaced when it cannot be used, and noticed when it vanished. Triggers keep two
things exact whoever writes: how many stored entries follow each one (only a leaf is evicted),
and the totals of each model. Several servers share one file; within one, any thread may use it.
"""

import errno
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rekindle.cache.entry import TOKEN_BYTES, Kind
from rekindle.cache.policy import priority
from rekindle.errors import TierFailed

_log = logging.getLogger(__name__)

FILE_NAME = "catalog.sqlite3"
SCHEMA_VERSION = 2
MAX_WAL_BYTES = 2**20  # picked
MIN_WAL_BYTES = 2**16

_PAGE_BYTES = 4096
_APPLICATION_ID = 0x524B4E44  # "RKND"
_BUSY_SECONDS = 5.0  # no transaction of ours takes a tenth of it; picked
_LOCK_POLL_SECONDS = 0.001
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    parent BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    kind INTEGER NOT NULL,
    start INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    compute_seconds REAL NOT NULL,
    reason INTEGER NOT NULL,
    created_at REAL NOT NULL,
    disk_bytes INTEGER NOT NULL,
    last_used_at REAL NOT NULL,
    hits INTEGER NOT NULL,
    priority REAL NOT NULL,
    n_children INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    session TEXT NOT NULL,
    pinned_until REAL NOT NULL,
    tokens BLOB NOT NULL
);
CREATE INDEX by_parent ON entries (parent);
CREATE INDEX leaves ON entries (rank DESC, priority) WHERE n_children = 0;
CREATE TABLE names (
    fingerprint BLOB NOT NULL,
    root BLOB NOT NULL,
    name TEXT NOT NULL,
    tokens BLOB NOT NULL,
    session TEXT NOT NULL,
    named_at REAL NOT NULL,
    PRIMARY KEY (root, name)
);
CREATE TABLE totals (
    fingerprint BLOB PRIMARY KEY,
    n_entries INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE eviction (clock REAL NOT NULL);
INSERT INTO eviction VALUES (0.0);
CREATE TRIGGER added AFTER INSERT ON entries BEGIN
    UPDATE entries SET n_children = n_children + 1 WHERE key = NEW.parent;
    INSERT OR IGNORE INTO totals VALUES (NEW.fingerprint, 0, 0, 0);
    UPDATE totals SET
        n_entries = n_entries + 1,
        n_tokens = n_tokens + (NEW.kind = {Kind.BLOCK:d}) * length(NEW.tokens) / {TOKEN_BYTES},
        n_bytes = n_bytes + NEW.disk_bytes
    WHERE fingerprint = NEW.fingerprint;
END;
CREATE TRIGGER removed AFTER DELETE ON entries BEGIN
    UPDATE entries SET n_children = n_children - 1 WHERE key = OLD.parent;
    UPDATE totals SET
        n_entries = n_entries - 1,
        n_tokens = n_tokens - (OLD.kind = {Kind.BLOCK:d}) * length(OLD.tokens) / {TOKEN_BYTES},
        n_bytes = n_bytes - OLD.disk_bytes
    WHERE fingerprint = OLD.fingerprint;
    DELETE FROM totals WHERE fingerprint = OLD.fingerprint AND n_entries = 0;
END;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


class Database:
    def __init__(self, directory: Path, *, wal_bytes: int = MAX_WAL_BYTES) -> None:
        self.path = directory / FILE_NAME
        self._wal_bytes = max(MIN_WAL_BYTES, min(wal_bytes, MAX_WAL_BYTES))
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None

    def open(self, set_aside: Callable[[Path], None]) -> None:
        """Makes it when there is none. One that cannot be used is handed to `set_aside`."""
        self.close()
        with self._errors_translated(), alone_in(self.path.parent), self._lock:
            try:
                self._connection = self._connect()
            except (_Unusable, IsADirectoryError) as error:
                _log.warning("%s is set aside and made anew: %s", self.path, error)
                self._sibling("-wal").unlink(missing_ok=True)
                self._sibling("-shm").unlink(missing_ok=True)
                set_aside(self.path)
                self._connection = self._connect()

    def close(self) -> None:
        with self._lock, self._errors_translated():
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def is_current(self) -> bool:
        """Whether the file that is open is still the one in the directory, and sound."""
        try:
            return self._connection is not None and _inode(self.path.stat()) == self._inode
        except OSError:
            return False

    def disk_bytes(self) -> int:
        """What its files may take: the log's limit, and what the log has yet to add."""
        with self.reading() as connection:
            (n_pages,) = column(connection, "PRAGMA page_count")
        table_bytes = max(int(n_pages) * _PAGE_BYTES, _file_bytes(self.path))
        log_bytes = max(self._wal_bytes, _file_bytes(self._sibling("-wal")))
        return table_bytes + log_bytes + _file_bytes(self._sibling("-shm"))

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors_translated():
            if self._connection is None:
                raise TierFailed(f"{self.path} is not open")
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self.reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _primary_code(error) in _DAMAGED:
                self._inode = None
            raise TierFailed(f"{self.path}: {error}") from error
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error

    def _sibling(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _connect(self) -> sqlite3.Connection:
        # SQLite gives its other files the mode of this one.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._inode = _inode(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, self._wal_bytes)
        except sqlite3.DatabaseError as error:
            connection.close()
            if _primary_code(error) in (*_DAMAGED, sqlite3.SQLITE_BUSY):
                raise _Unusable(str(error)) from error
            raise
        except _Unusable:
            connection.close()
            raise
        return connection


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """No other server replaces the catalogue or adds entries meanwhile. Not to be nested."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    # Not a blocking flock, which would wait for ever for a server that is stopped or hangs.
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked") from None
            time.sleep(_LOCK_POLL_SECONDS)


def column(
    connection: sqlite3.Connection, query: str, parameters: Sequence[bytes | int | None] = ()
) -> list[Any]:
    return [value for (value,) in connection.execute(query, parameters)]


class _Unusable(Exception):
    """Not a catalogue that this version can read."""


def _prepare(connection: sqlite3.Connection, wal_bytes: int) -> None:
    connection.create_function("priority", 4, priority, deterministic=True)
    is_new = not column(connection, "SELECT 1 FROM sqlite_master LIMIT 1")
    if is_new:
        # Both are too late once it is in WAL mode.
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {wal_bytes}")
    # At half the limit: the log still grows by the transaction that reaches it.
    connection.execute(f"PRAGMA wal_autocheckpoint = {wal_bytes // 2 // _PAGE_BYTES}")
    if is_new:
        connection.executescript(_SCHEMA)
    (application,) = column(connection, "PRAGMA application_id")
    (version,) = column(connection, "PRAGMA user_version")
    if (application, version) != (_APPLICATION_ID, SCHEMA_VERSION):
        raise _Unusable(f"its version is {version}, this program reads {SCHEMA_VERSION}")
    connection.executescript("BEGIN IMMEDIATE; COMMIT")  # somebody may hold it locked for ever
    (verdict,) = column(connection, "PRAGMA quick_check(1)")
    if verdict != "ok":
        raise _Unusable(verdict)


def _primary_code(error: sqlite3.DatabaseError) -> int:
    return error.sqlite_errorcode & 0xFF


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
