"""The SQLite file of stored responses.

    responses.sqlite3    beside the catalogue; the text of conversations, private to its owner

The file is opened for each use, so that a deleted or replaced file is never written to.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.sqlite.connection import evict_least_recently_used
from rekindle.cache.sqlite.file import SqliteFile
from rekindle.cache.sqlite.owned_rows import (
    OWNER_COLUMNS,
    delete_covered,
    overwrite_deleted,
    owner_of,
)
from rekindle.cache.sqlite.schema import Schema
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_responses import StoredResponse

MAX_RESPONSE_BYTES = 256 * 2**20  # unpacked; picked
LIFE_SECONDS = 30 * 24 * 3600  # OpenAI's

BEHIND_TEXT = b"\xff"  # no text in UTF-8 has this byte

_BUSY_SECONDS = 2.0  # our transactions take less than a tenth of this; picked
_ROW_BYTES = 200  # a row without its data, with its share of the indexes; picked
_INSERT = """
INSERT OR REPLACE INTO responses (
    id, created_at, last_used_at, n_bytes, namespace, session, asked_at, data
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_READ = """
SELECT created_at, data, namespace, session, asked_at FROM responses
WHERE id = ? AND length(data) <= ?
"""
_IDS = "SELECT id FROM responses WHERE id >= ? AND id < ?"
# Another server may have used the response later.
_TOUCH = "UPDATE responses SET last_used_at = max(last_used_at, ?) WHERE id = ?"

_BY_OWNER = "CREATE INDEX by_owner ON responses (namespace, session, asked_at)"
RESPONSES = Schema(
    file_name="responses.sqlite3",
    application_id=0x524B5253,  # "RKRS"
    version=2,
    settings="PRAGMA auto_vacuum = FULL;",
    on_connect=overwrite_deleted,
    # Version 1 has the namespace in front of the id.
    migrations={
        1: f"""
ALTER TABLE responses ADD COLUMN namespace TEXT;
ALTER TABLE responses ADD COLUMN session TEXT;
ALTER TABLE responses ADD COLUMN asked_at REAL;
UPDATE responses SET asked_at = created_at, namespace = CAST(
    CASE instr(id, x'2f') WHEN 0 THEN '' ELSE substr(id, 1, instr(id, x'2f') - 1) END AS TEXT
);
{_BY_OWNER};
"""
    },
    tables=f"""
CREATE TABLE responses (
    id BLOB PRIMARY KEY,
    created_at INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    {OWNER_COLUMNS},
    data BLOB NOT NULL
);
{_BY_OWNER};
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
            row = connection.execute(_READ, (_key(id), self._max_bytes)).fetchone()
        return _decode(id, *row) if row else None

    def ids(self, prefix: str) -> list[str]:
        """List the ids that begin so."""
        start = _key(prefix)
        with self._file.reading_once() as connection:
            if connection is None:
                return []
            rows = connection.execute(_IDS, (start, start + BEHIND_TEXT)).fetchall()
        return [id.decode("utf-8", "replace") for (id,) in rows if isinstance(id, bytes)]

    def write(self, responses: Sequence[StoredResponse], used: Mapping[str, int]) -> None:
        """Insert the responses, note uses, and delete expired and least recently used ones."""
        with self._file.writing_once(self._set_aside) as connection:
            for response in responses:
                data = zlib.compress(response.data, 1)
                n_bytes = len(data) + _ROW_BYTES
                if n_bytes > self._max_bytes:
                    continue  # the response would evict all others, then itself
                id, created_at, owner = response.id, response.created_at, response.owner
                whose = (owner.namespace, owner.session, owner.asked_at)
                connection.execute(_INSERT, (_key(id), created_at, used[id], n_bytes, *whose, data))
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

    def forget(self, is_covered: Callable[[Owner], bool]) -> int:
        """Delete the responses of covered owners. Return how many."""
        if not self._file.path.exists():
            return 0
        with self._file.writing_once(self._set_aside) as connection:
            n_deleted = delete_covered(connection, "responses", is_covered)
        if n_deleted:
            self._file.vacuum_once()
        return n_deleted

    def migrate(self) -> None:
        """Bring a file of an earlier version to this one: a read does not."""
        with self._file.reading_once() as connection:
            if connection is None or RESPONSES.is_of_this_version(connection):
                return
        with self._file.writing_once(self._set_aside):
            pass


def has_expired(created_at: int) -> bool:
    return created_at < time.time() - LIFE_SECONDS


def _key(id: str) -> bytes:
    return id.encode("utf-8", "replace")


def _decode(id: str, created_at: object, data: object, *owner: object) -> StoredResponse | None:
    """Return None if the row is damaged. zlib verifies its own checksum."""
    if not isinstance(created_at, int) or not isinstance(data, bytes):
        return None
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(data, MAX_RESPONSE_BYTES)
    except zlib.error:
        return None
    return StoredResponse(id, created_at, content, owner_of(*owner)) if unpacker.eof else None
