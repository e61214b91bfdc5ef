"""The SQLite file of stored responses.

    responses.sqlite3    beside the catalogue; the text of conversations, private to its owner

The file is opened for each use, so that a deleted or replaced file is never written to.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.sqlite.connection import evict_least_recently_used
from rekindle.cache.sqlite.file import SqliteFile
from rekindle.cache.sqlite.schema import Schema
from rekindle.generation.stored_responses import StoredResponse

LIFE_SECONDS = 30 * 24 * 3600  # OpenAI's

_BUSY_SECONDS = 2.0  # our transactions take less than a tenth of this; picked
_ROW_BYTES = 200  # a row without its data, with its share of the indexes; picked
_INSERT = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)"
# Another server may have used the response later.
_TOUCH = "UPDATE responses SET last_used_at = max(last_used_at, ?) WHERE id = ?"

RESPONSES = Schema(
    file_name="responses.sqlite3",
    application_id=0x524B5253,  # "RKRS"
    version=1,
    settings="PRAGMA auto_vacuum = FULL;",
    on_connect=lambda connection: connection.execute("PRAGMA secure_delete = ON"),
    tables="""
CREATE TABLE responses (
    id BLOB PRIMARY KEY,
    created_at INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX by_use ON responses (last_used_at, n_bytes);
CREATE INDEX by_age ON responses (created_at);
""",
)


class ResponseFile:
    """Responses by id. Every method raises TierFailed when the file cannot be used."""

    def __init__(self, directory: Path, *, max_responses: int, max_bytes: int) -> None:
        self._file = SqliteFile(directory, RESPONSES, busy_seconds=_BUSY_SECONDS)
        self._set_aside = EntryFiles(directory).set_aside
        self._max_responses = max_responses
        self._max_bytes = max_bytes

    def read(self, id: str) -> StoredResponse | None:
        with self._file.reading_once() as connection:
            if connection is None:
                return None
            query = "SELECT created_at, data FROM responses WHERE id = ?"
            row = connection.execute(query, (_key(id),)).fetchone()
        return _decode(id, *row) if row else None

    def write(self, responses: Sequence[StoredResponse], used: Mapping[str, int]) -> None:
        """Insert the responses, note uses, and delete expired and least recently used ones."""
        with self._file.writing_once(self._set_aside) as connection:
            for response in responses:
                data = zlib.compress(response.data, 1)
                n_bytes = len(data) + _ROW_BYTES
                if n_bytes > self._max_bytes:
                    continue  # the response would evict all others, then itself
                row = (_key(response.id), response.created_at, used[response.id], n_bytes, data)
                connection.execute(_INSERT, row)
            connection.executemany(_TOUCH, [(used_at, _key(id)) for id, used_at in used.items()])
            oldest = int(time.time()) - LIFE_SECONDS
            connection.execute("DELETE FROM responses WHERE created_at < ?", (oldest,))
            evict_least_recently_used(
                connection, "responses", max_rows=self._max_responses, max_bytes=self._max_bytes
            )

    def delete(self, id: str) -> bool:
        """Delete the response. Return whether it was there."""
        with self._file.writing_once(self._set_aside) as connection:
            query = "DELETE FROM responses WHERE id = ?"
            return connection.execute(query, (_key(id),)).rowcount > 0


def has_expired(created_at: int) -> bool:
    return created_at < time.time() - LIFE_SECONDS


def _key(id: str) -> bytes:
    return id.encode("utf-8", "replace")


def _decode(id: str, created_at: object, data: object) -> StoredResponse | None:
    """Return None if the row is damaged. zlib verifies its own checksum."""
    if not isinstance(created_at, int) or not isinstance(data, bytes):
        return None
    try:
        return StoredResponse(id, created_at, zlib.decompress(data))
    except zlib.error:
        return None
