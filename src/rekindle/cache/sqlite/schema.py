"""The identity and the tables of a kind of SQLite file, and the check that a file is one."""

import sqlite3
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.cache.sqlite.connection import PAGE_BYTES, column, sibling

# The first two settings have no effect once the file is in WAL mode.
WAL_SETTINGS = f"""
PRAGMA page_size = {PAGE_BYTES};
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
"""


class Unusable(Exception):
    """The file is damaged or not ours."""


class OtherVersion(Unusable):
    """Another version of Rekindle wrote the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    file_name: str
    application_id: int
    version: int
    tables: str  # statements that create them
    settings: str = WAL_SETTINGS  # statements before the first table
    on_connect: Callable[[sqlite3.Connection], object] = lambda connection: None
    is_rebuildable: bool = False  # a file of another version may be replaced
    migrations: Mapping[int, str] = field(default_factory=dict)  # statements from each version on

    def paths(self, directory: Path) -> list[Path]:
        """Return every file that SQLite may create, the database first.

        SQLite ignores a log without its database, so deleting in this order is safe.
        """
        path = directory / self.file_name
        return [path, *(sibling(path, suffix) for suffix in ("-wal", "-shm", "-journal"))]

    def create_tables(self, connection: sqlite3.Connection) -> None:
        connection.executescript(
            f"""
            {self.settings}
            BEGIN IMMEDIATE;
            {self.tables}
            PRAGMA application_id = {self.application_id};
            PRAGMA user_version = {self.version};
            COMMIT;
            """
        )

    def is_of_this_version(self, connection: sqlite3.Connection) -> bool:
        return column(connection, "PRAGMA user_version") == [self.version]

    def migrate(self, connection: sqlite3.Connection) -> None:
        """Bring a file of ours that an earlier version wrote to this version, if that is known.

        An earlier version left deleted text in unused pages, which VACUUM drops.
        """
        (application,) = column(connection, "PRAGMA application_id")
        (version,) = column(connection, "PRAGMA user_version")
        if application == self.application_id and version in self.migrations:
            if not self.is_rebuildable:  # those may be large
                connection.execute("VACUUM")
            connection.executescript(
                f"""
                BEGIN IMMEDIATE;
                {self.migrations[version]}
                PRAGMA user_version = {version + 1};
                COMMIT;
                """
            )

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise Unusable unless the file has our identity and a version that we read."""
        (application,) = column(connection, "PRAGMA application_id")
        (version,) = column(connection, "PRAGMA user_version")
        if application != self.application_id:
            raise Unusable("it is not a file of ours")
        is_readable = version == self.version or (
            version < self.version and not self.is_rebuildable
        )
        if not is_readable:
            raise OtherVersion(f"its version is {version}, this program reads {self.version}")


def check_pages(connection: sqlite3.Connection) -> None:
    """Raise Unusable if SQLite finds damage."""
    (verdict,) = column(connection, "PRAGMA quick_check(1)")
    if verdict != "ok":
        raise Unusable(verdict)


def check_is_plain_file(path: Path) -> None:
    """Raise Unusable for anything else. SQLite itself would follow a link."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Unusable("it is not a plain file")


def is_empty(connection: sqlite3.Connection) -> bool:
    return not column(connection, "SELECT 1 FROM sqlite_master LIMIT 1")
