"""The tombstones of a cache directory, shared by every server and command that uses it.

    forgotten.sqlite3    one row per scope, the newest tombstone wins; is_done: nothing that it
                         covers is left in the directory

The file is opened for each use, so that a deleted or replaced file is never written to.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.sqlite.file import SqliteFile
from rekindle.cache.sqlite.schema import Schema
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import MAX_TOMBSTONES, Scope, Tombstone

LIFE_SECONDS = 30 * 24 * 3600  # far longer than any request runs or write waits; picked

_BUSY_SECONDS = 2.0  # our transactions take less than a tenth of this; picked

FORGOTTEN = Schema(
    file_name="forgotten.sqlite3",
    application_id=0x524B4647,  # "RKFG"
    version=1,
    settings="",  # no write-ahead log: each change is one of the file itself
    tables="""
CREATE TABLE tombstones (
    scope BLOB PRIMARY KEY,
    at REAL NOT NULL,
    is_session INTEGER NOT NULL,
    is_done INTEGER NOT NULL DEFAULT 0
);
""",
)
_ADD = """
INSERT INTO tombstones (scope, at, is_session) VALUES (?, ?, ?)
ON CONFLICT (scope) DO UPDATE
SET is_done = is_done AND excluded.at <= at, at = max(at, excluded.at)
"""
_DROP_SURPLUS = """
DELETE FROM tombstones WHERE scope IN (
    SELECT scope FROM tombstones WHERE is_done ORDER BY is_session DESC, at
    LIMIT max(0, (SELECT count(*) FROM tombstones) - ?)
)
"""

_State = tuple[int, int] | None  # inode and time of change; None: there is no file


class TombstoneFile:
    """`add` and `all` raise TierFailed when the file cannot be used. Any thread may call them."""

    def __init__(self, directory: Path) -> None:
        self._file = SqliteFile(directory, FORGOTTEN, busy_seconds=_BUSY_SECONDS)
        self._set_aside = EntryFiles(directory).set_aside
        self._seen: _State = None

    def add(self, tombstone: Tombstone) -> None:
        """Keep the tombstone, and drop those that have expired.

        Above MAX_TOMBSTONES, finished ones are dropped as well: first the oldest of sessions.
        """
        scope = tombstone.scope
        row = (msgspec.json.encode(scope), tombstone.at, scope.session is not None)
        with self._file.writing_once(self._set_aside) as connection:
            connection.execute(_ADD, row)
            oldest = time.time() - LIFE_SECONDS
            connection.execute("DELETE FROM tombstones WHERE at < ?", (oldest,))
            connection.execute(_DROP_SURPLUS, (MAX_TOMBSTONES,))
        # The system's own clock for files may stand still between two changes.
        now = time.time_ns()
        with suppress(OSError):
            os.utime(self._file.path, ns=(now, now))

    def all(self) -> list[Tombstone]:
        """Return the tombstones, the oldest first. `changed` tells of later ones.

        A damaged file is set aside. Do not call it while alone in the directory.
        """
        try:
            return self.read()
        except TierFailed:
            with self._file.writing_once(self._set_aside):
                pass
            return self.read()

    def read(self) -> list[Tombstone]:
        """Return the same, and raise TierFailed if the file is damaged."""
        seen = self._state()
        tombstones = self._select("")
        self._seen = seen
        return tombstones

    def unfinished(self) -> list[Tombstone]:
        """Return the tombstones whose directory may still hold what they cover, oldest first."""
        return self._select("WHERE NOT is_done")

    def finish(self, tombstones: Iterable[Tombstone]) -> None:
        """Note that nothing in the directory is covered by the tombstones any more."""
        rows = [(msgspec.json.encode(each.scope), each.at) for each in tombstones]
        with self._file.writing_once(self._set_aside) as connection:
            connection.executemany(
                "UPDATE tombstones SET is_done = 1 WHERE scope = ? AND at <= ?", rows
            )

    def changed(self) -> bool:
        """Return whether a read may have something new. Takes a few microseconds."""
        return self._state() != self._seen

    def disk_bytes(self) -> int:
        try:
            return self._file.path.stat().st_blocks * 512
        except OSError:
            return 0

    def _select(self, where: str) -> list[Tombstone]:
        with self._file.reading_once() as connection:
            if connection is None:
                return []
            query = f"SELECT scope, at FROM tombstones {where} ORDER BY at"
            rows = connection.execute(query).fetchall()
        return [each for row in rows if (each := _decode(*row)) is not None]

    def _state(self) -> _State:
        # Not by opening it: to close it again would release the locks of this process.
        try:
            status = self._file.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _decode(scope: object, at: object) -> Tombstone | None:
    """Return None if the row is damaged."""
    if not isinstance(scope, bytes) or not isinstance(at, float):
        return None
    try:
        return Tombstone(scope=msgspec.json.decode(scope, type=Scope), at=at)
    except msgspec.MsgspecError:
        return None
