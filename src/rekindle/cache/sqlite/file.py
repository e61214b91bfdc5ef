"""A SQLite file in a shared cache directory: the file may be locked, damaged or deleted.

An unusable file is quarantined and created again. A locked file is left alone, and so is one that
a later version wrote, unless its content can be rebuilt. The file is private to its owner.
Every method raises TierFailed when SQLite or the system fails.
"""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rekindle.cache.sqlite.connection import (
    DAMAGED,
    PAGE_BYTES,
    column,
    connect,
    primary_code,
    sibling,
    transaction,
)
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.sqlite.schema import (
    OtherVersion,
    Schema,
    Unusable,
    check_is_plain_file,
    check_pages,
    is_empty,
)
from rekindle.errors import TierDamaged, TierFailed

_log = logging.getLogger(__name__)

_INSPECT_BUSY_SECONDS = 5.0  # picked
NOT_UTF8 = "its text is not UTF-8"  # sqlite3 decodes names and messages itself
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)

Inode = tuple[int, int]  # device and inode
SetAside = Callable[[Path], None]  # moves a file to the quarantine


class SqliteFile:
    """Kept open with `open`, `reading` and `writing`, or opened for each use with the `_once` pair.

    Any thread may call it.
    """

    def __init__(
        self,
        directory: Path,
        schema: Schema,
        *,
        busy_seconds: float,
        read_busy_seconds: float | None = None,
        wal_bytes: int | None = None,
    ) -> None:
        """`busy_seconds`: how long to wait for the locks of other connections.

        With `read_busy_seconds` reads have their own connection and do not wait for writes.
        `wal_bytes` bounds the log of a file that is kept open.
        """
        self.path = directory / schema.file_name
        self._schema = schema
        self._busy_seconds = busy_seconds
        self._read_busy_seconds = read_busy_seconds
        self._wal_bytes = wal_bytes
        self._write_lock = threading.RLock()
        self._read_lock = self._write_lock if read_busy_seconds is None else threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._inode: Inode | None = None
        self._damaged_inode: Inode | None = None

    def open(self, set_aside: SetAside) -> None:
        """Open the file, creating it if there is none."""
        self.close()
        with self._errors_translated(), self._alone():
            writer = reader = self._connect_or_replace(set_aside)
            if self._read_busy_seconds is not None:
                reader = connect(self.path, busy_seconds=self._read_busy_seconds)
                reader.execute("PRAGMA query_only = 1")
        with self._write_lock, self._read_lock:
            self._writer, self._reader = writer, reader

    def close(self) -> None:
        with self._write_lock, self._read_lock, self._errors_translated():
            connections = self._reader, self._writer
            self._reader = self._writer = None
            for connection in connections:
                if connection is not None:
                    connection.close()

    def is_current(self) -> bool:
        """Return whether the open file is still the one in the directory, and is sound."""
        try:
            return self._writer is not None and _inode(self.path) == self._inode
        except OSError:
            return False

    def disk_bytes(self) -> int:
        """Return the bytes that the files may take: tables, the limit of the log, its index."""
        with self.reading() as connection:
            (n_pages,) = column(connection, "PRAGMA page_count")
        table_bytes = max(int(n_pages) * PAGE_BYTES, _file_bytes(self.path))
        log_bytes = max(self._wal_bytes or 0, _file_bytes(sibling(self.path, "-wal")))
        return table_bytes + log_bytes + _file_bytes(sibling(self.path, "-shm"))

    def vacuum(self) -> None:
        """Write the file again without unused bytes.

        When SQLite moves rows between pages, it leaves copies that `secure_delete` does not reach.
        """
        with self._write_lock, self._errors_translated():
            if self._writer is None:
                raise TierFailed(f"{self.path} is not open")
            self._writer.execute("VACUUM")

    def vacuum_once(self) -> None:
        """Write a file again that is opened for each use: see `vacuum`."""
        with (
            self._errors_translated(),
            self._alone(),
            closing(connect(self.path, busy_seconds=self._busy_seconds)) as connection,
        ):
            connection.execute("VACUUM")

    def truncate_log(self) -> bool:
        """Move the log into the file and empty it. Return False if others read or write it."""
        with self._write_lock, self._errors_translated():
            if self._writer is None:
                raise TierFailed(f"{self.path} is not open")
            ((is_busy, *_),) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return not is_busy

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, self._errors_translated():
            if self._reader is None:
                raise TierFailed(f"{self.path} is not open")
            yield self._reader

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction."""
        with self._write_lock, self._errors_translated():
            if self._writer is None:
                raise TierFailed(f"{self.path} is not open")
            with transaction(self._writer):
                yield self._writer

    @contextmanager
    def reading_once(self) -> Iterator[sqlite3.Connection | None]:
        """Open the file for one read; None if there is none."""
        with self._errors_translated():
            if not os.path.lexists(self.path):
                yield None
                return
            check_is_plain_file(self.path)
            self._inode = _inode(self.path)
            with closing(connect(self.path, busy_seconds=self._busy_seconds)) as connection:
                if is_empty(connection):
                    yield None
                else:
                    self._schema.check(connection)
                    yield connection

    @contextmanager
    def writing_once(self, set_aside: SetAside) -> Iterator[sqlite3.Connection]:
        """Open or create the file for one transaction, alone in the directory."""
        with (
            self._errors_translated(),
            self._alone(),
            closing(self._connect_or_replace(set_aside)) as connection,
            transaction(connection),
        ):
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone_in(self.path.parent):
            yield

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = primary_code(error)
            self._note_error(code)
            kind = TierDamaged if code in DAMAGED else TierFailed
            raise kind(f"{self.path}: {error}") from error
        except UnicodeDecodeError as error:
            self._note_error(sqlite3.SQLITE_CORRUPT)
            raise TierDamaged(f"{self.path}: {NOT_UTF8}") from error
        except OtherVersion as error:
            raise TierFailed(f"{self.path}: {error}") from error
        except Unusable as error:
            raise TierDamaged(f"{self.path}: {error}") from error
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error

    def _note_error(self, code: int) -> None:
        is_damaged = code in DAMAGED
        if is_damaged:
            self._damaged_inode = self._inode or self._damaged_inode
        # Reopening a file that can be rebuilt rereads the directory: do it only after damage.
        if is_damaged or not (self._schema.is_rebuildable or code in _PASSING):
            self._inode = None

    def _connect_or_replace(self, set_aside: SetAside) -> sqlite3.Connection:
        """Connect, quarantining an unusable file first. Call only while alone in the directory."""
        try:
            connection = self._connect()
        except Unusable as error:
            if isinstance(error, OtherVersion) and not self._schema.is_rebuildable:
                raise
            quarantine(self.path.parent, self._schema, set_aside)
            _log.warning("cache: quarantined %s, creating it again: %s", self.path, error)
            connection = self._connect()
        self._damaged_inode = None
        return connection

    def _connect(self) -> sqlite3.Connection:
        with suppress(FileNotFoundError):
            # SQLite's own check misses some damage. Another server may have replaced the file.
            if self._damaged_inode == _inode(self.path):
                raise Unusable("it was found damaged while in use")
        _create(self.path)
        for log in self._schema.paths(self.path.parent)[1:]:
            if log.is_symlink():
                raise Unusable(f"{log.name} is a symbolic link")
        connection = connect(self.path, busy_seconds=self._busy_seconds)
        try:
            self._prepare(connection)
            self._inode = _inode(self.path)
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.DatabaseError) and primary_code(error) in DAMAGED:
                raise Unusable(str(error)) from error
            if isinstance(error, UnicodeDecodeError):
                raise Unusable(NOT_UTF8) from error
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        self._schema.on_connect(connection)
        if is_empty(connection):
            self._schema.create_tables(connection)
        self._schema.migrate(connection)
        self._schema.check(connection)
        if self._wal_bytes is None:
            return
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {self._wal_bytes}")
        # At half the limit: the log still grows by the transaction that reaches it.
        connection.execute(f"PRAGMA wal_autocheckpoint = {self._wal_bytes // 2 // PAGE_BYTES}")
        check_pages(connection)


class NoSuchFile(TierFailed):
    pass


@contextmanager
def reading_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Read a file that servers may use, changing nothing in its directory. Raises TierFailed."""
    try:
        check_is_plain_file(path)
        # A file without a log has no writer. `immutable` reads it even where no log can be created.
        mode = "mode=ro" if sibling(path, "-wal").exists() else "immutable=1"
        with closing(connect(path, busy_seconds=_INSPECT_BUSY_SECONDS, mode=mode)) as connection:
            yield connection
    except FileNotFoundError as error:
        raise NoSuchFile("it does not exist") from error
    except OSError as error:
        raise TierFailed(str(error.strerror)) from error
    except (sqlite3.DatabaseError, Unusable) as error:
        raise TierFailed(str(error)) from error
    except UnicodeDecodeError as error:
        raise TierFailed(NOT_UTF8) from error


def quarantine(directory: Path, schema: Schema, set_aside: SetAside) -> None:
    """Move the file away and delete its logs. Call only while alone in the directory."""
    path, *logs = schema.paths(directory)
    set_aside(path)
    for log in logs:
        log.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create a private file if there is none. SQLite gives its logs the same mode."""
    # Do not open an existing file: closing it would release the locks that this process has on it.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        check_is_plain_file(path)


def _inode(path: Path) -> Inode:
    status = path.stat()
    return status.st_dev, status.st_ino


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
