"""Rows that have an owner, and their deletion without a trace in the file or its log."""

import sqlite3
from collections.abc import Callable

from rekindle.generation.forgetting import Owner

# Unknown if an earlier version wrote the row.
OWNER_COLUMNS = """
    namespace TEXT,
    session TEXT,
    asked_at REAL"""


def owner_of(namespace: object, session: object, asked_at: object) -> Owner:
    """Return the owner in a row. A damaged column counts as unknown."""
    return Owner(
        namespace=namespace if isinstance(namespace, str) else None,
        session=session if isinstance(session, str) else None,
        asked_at=asked_at if isinstance(asked_at, float) else 0.0,
    )


def delete_covered(
    connection: sqlite3.Connection, table: str, is_covered: Callable[[Owner], bool]
) -> int:
    """Delete the rows of covered owners, inside a transaction. Return how many.

    The table has an index of OWNER_COLUMNS, so that no other column is read.
    """
    rows = connection.execute(f"SELECT rowid, namespace, session, asked_at FROM {table}")
    covered = [(number,) for number, *owner in rows if is_covered(owner_of(*owner))]
    connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", covered)
    return len(covered)


def overwrite_deleted(connection: sqlite3.Connection) -> None:
    """Have SQLite overwrite what it deletes. Its default leaves the bytes in unused pages."""
    connection.execute("PRAGMA secure_delete = ON")
