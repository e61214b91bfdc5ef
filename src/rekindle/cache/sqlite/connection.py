"""SQLite connections, and the statements that several databases have in common."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

PAGE_BYTES = 4096
DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def connect(path: Path, *, busy_seconds: float, mode: str = "mode=rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{mode}",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    # The default raises an error without an SQLite code when a damaged text is not UTF-8.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


def sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def column(
    connection: sqlite3.Connection, query: str, parameters: Sequence[bytes | int | None] = ()
) -> list[Any]:
    """Run a query of one column and return its values."""
    return [value for (value,) in connection.execute(query, parameters)]


def placeholders(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def count_rows(connection: sqlite3.Connection, table: str) -> tuple[int, int]:
    """Return the number of rows and the sum of their column `n_bytes`."""
    # CAST: a damaged row may hold a text.
    query = f"SELECT count(*), coalesce(sum(CAST(n_bytes AS INTEGER)), 0) FROM {table}"
    ((n_rows, n_bytes),) = connection.execute(query)
    return n_rows, n_bytes


def evict_least_recently_used(
    connection: sqlite3.Connection, table: str, *, max_rows: int, max_bytes: int
) -> None:
    """Delete rows by their column `last_used_at` until the table is within its bounds."""
    n_rows, n_bytes = count_rows(connection, table)
    evicted = []
    query = f"SELECT rowid, CAST(n_bytes AS INTEGER) FROM {table} ORDER BY last_used_at, rowid"
    oldest = connection.execute(query)
    while n_rows > max_rows or n_bytes > max_bytes:
        number, row_bytes = next(oldest)
        n_rows -= 1
        n_bytes -= row_bytes
        evicted.append((number,))
    oldest.close()
    if evicted:
        connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", evicted)
        shrink(connection)


def shrink(connection: sqlite3.Connection) -> None:
    """Return pages to the file system when many are unused, a few at a time: moving one is slow."""
    (n_pages,) = column(connection, "PRAGMA page_count")
    (n_free,) = column(connection, "PRAGMA freelist_count")
    if n_free > n_pages // 4:
        connection.execute("PRAGMA incremental_vacuum(64)").fetchall()  # rows without columns


def primary_code(error: sqlite3.DatabaseError) -> int:
    """Return the SQLite error code without its extension."""
    return error.sqlite_errorcode & 0xFF
