"""The SQLite file of stored responses: its schema, its bounds, and its life among failures.

Opened anew for each use, so that one that was cleared or replaced is never written to. Each
write is one transaction. Everything raises TierFailed when SQLite or the system cannot do it;
a file that is damaged is set aside by whoever finds out.
"""

import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rekindle.cache.disk.database import alone_in, column
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.turns.file import DAMAGED, connect, primary_code, transaction
from rekindle.errors import TierFailed
from rekindle.generation.stored_responses import StoredResponse

FILE_NAME = "responses.sqlite3"
SCHEMA_VERSION = 1
LIFE_SECONDS = 30 * 24 * 3600  # OpenAI's

_APPLICATION_ID = 0x524B5253  # "RKRS"
_BUSY_SECONDS = 2.0  # no transaction of ours takes a tenth of it; picked
_ROW_BYTES = 200  # what a row takes beside its data, its share of the indexes included; picked
_SCHEMA = f"""
PRAGMA auto_vacuum = FULL;
BEGIN IMMEDIATE;
CREATE TABLE responses (
    id BLOB PRIMARY KEY,
    created_at INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX by_use ON responses (last_used_at, n_bytes);
CREATE INDEX by_age ON responses (created_at);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_INSERT = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)"
# Another server may have used it later.
_TOUCH = "UPDATE responses SET last_used_at = max(last_used_at, ?) WHERE id = ?"
_TOTALS = "SELECT count(*), coalesce(sum(CAST(n_bytes AS INTEGER)), 0) FROM responses"


class ResponseFile:
    def __init__(self, directory: Path, *, max_responses: int, max_bytes: int) -> None:
        self.path = directory / FILE_NAME
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    def read(self, id: str) -> StoredResponse | None:
        with self._errors_translated():
            if not self.path.exists():
                return None
            with closing(connect(self.path, busy_seconds=_BUSY_SECONDS)) as connection:
                if _is_empty(connection):
                    return None
                _check(connection)
                query = "SELECT created_at, data FROM responses WHERE id = ?"
                row = connection.execute(query, (_key(id),)).fetchone()
        return _decode(id, *row) if row else None

    def write(self, responses: Sequence[StoredResponse], used: Mapping[str, int]) -> None:
        with self._writing() as connection:
            for response in responses:
                data = zlib.compress(response.data, 1)
                if len(data) + _ROW_BYTES > self._max_bytes:
                    continue  # everything else would go, and then it would
                used_at = used.get(response.id, time.time_ns())
                row = (_key(response.id), response.created_at, used_at, len(data) + _ROW_BYTES)
                connection.execute(_INSERT, (*row, data))
            connection.executemany(_TOUCH, [(used_at, _key(id)) for id, used_at in used.items()])
            oldest = int(time.time()) - LIFE_SECONDS
            connection.execute("DELETE FROM responses WHERE created_at < ?", (oldest,))
            self._evict(connection)

    def delete(self, id: str) -> bool:
        """Whether it was there."""
        with self._writing() as connection:
            query = "DELETE FROM responses WHERE id = ?"
            return connection.execute(query, (_key(id),)).rowcount > 0

    def _evict(self, connection: sqlite3.Connection) -> None:
        ((n_responses, n_bytes),) = connection.execute(_TOTALS)
        doomed = []
        oldest = connection.execute(
            "SELECT id, CAST(n_bytes AS INTEGER) FROM responses ORDER BY last_used_at"
        )
        with closing(oldest):
            while n_responses > self._max_responses or n_bytes > self._max_bytes:
                id, row_bytes = next(oldest)
                n_responses -= 1
                n_bytes -= row_bytes
                doomed.append((id,))
        connection.executemany("DELETE FROM responses WHERE id = ?", doomed)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._errors_translated():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Or a log that is left behind by whoever clears the directory would meet a new file.
            with alone_in(self.path.parent):
                _create(self.path)
                with closing(connect(self.path, busy_seconds=_BUSY_SECONDS)) as connection:
                    if _is_empty(connection):
                        connection.executescript(_SCHEMA)
                    _check(connection)
                    connection.execute("PRAGMA secure_delete = ON")
                    with transaction(connection):
                        yield connection

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if primary_code(error) in DAMAGED:
                self._set_aside()
            raise TierFailed(f"{self.path}: {error}") from error
        except _Foreign as error:
            self._set_aside()
            raise TierFailed(f"{self.path}: {error}") from error
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error

    def _set_aside(self) -> None:
        """It costs what was stored; the next write makes a new one."""
        try:
            with alone_in(self.path.parent):
                EntryFiles(self.path.parent).set_aside(self.path)
                response_paths(self.path.parent)[1].unlink(missing_ok=True)
        except OSError as error:
            raise TierFailed(f"{self.path}: {error.strerror}") from error


def response_paths(directory: Path) -> list[Path]:
    """What may be there, the file itself first."""
    return [directory / FILE_NAME, directory / f"{FILE_NAME}-journal"]


def has_expired(created_at: int) -> bool:
    return created_at < time.time() - LIFE_SECONDS


class _Foreign(Exception):
    """A file that is not ours."""


def _create(path: Path) -> None:
    """For the owner's eyes only. SQLite gives its log the mode of this one."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not column(connection, "SELECT 1 FROM sqlite_master LIMIT 1")


def _check(connection: sqlite3.Connection) -> None:
    (application,) = column(connection, "PRAGMA application_id")
    (version,) = column(connection, "PRAGMA user_version")
    if application != _APPLICATION_ID:
        raise _Foreign("it is not a file of ours")
    if version > SCHEMA_VERSION:
        raise TierFailed(f"its version is {version}, this program reads {SCHEMA_VERSION}")


def _key(id: str) -> bytes:
    return id.encode("utf-8", "replace")


def _decode(id: str, created_at: object, data: object) -> StoredResponse | None:
    """None: the row is damaged. zlib has a checksum of its own."""
    if not isinstance(created_at, int) or not isinstance(data, bytes):
        return None
    try:
        return StoredResponse(id, created_at, zlib.decompress(data))
    except zlib.error:
        return None
