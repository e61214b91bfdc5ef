"""Overwrites what deleted rows of a catalogue leave behind.

When SQLite moves rows between pages, it leaves copies that `secure_delete` does not reach. Only
VACUUM drops them. It takes seconds for 100,000 entries, so deletions that wait share one.
"""

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.sqlite.directory_lock import alone_in

_LOCK_SECONDS = 30.0  # longest wait for the VACUUM of another process; picked


def begin_deletion(catalog: Catalog) -> None:
    """Note that a deletion has begun, so that the next start ends it if this process is killed."""
    with catalog.writing() as connection:
        connection.execute("UPDATE wiping SET n_begun = n_begun + 1")


def is_deletion_unfinished(catalog: Catalog) -> bool:
    with catalog.reading() as connection:
        query = "SELECT 1 FROM wiping WHERE n_begun > n_ended"
        return connection.execute(query).fetchone() is not None


def wipe(catalog: Catalog, files: EntryFiles) -> bool:
    """End the deletions that have begun. Return False if others still use the log.

    Raises TierFailed or OSError.
    """
    with alone_in(files.entries_folder, wait_seconds=_LOCK_SECONDS):
        with catalog.reading() as connection:
            query = "SELECT n_removed, n_wiped, n_begun FROM wiping"
            n_removed, n_wiped, n_begun = connection.execute(query).fetchone()
        if n_removed != n_wiped:
            catalog.vacuum()
        is_truncated = catalog.truncate_log()
        n_ended = n_begun if is_truncated else 0
        with catalog.writing() as connection:
            connection.execute(
                "UPDATE wiping SET n_wiped = max(n_wiped, ?), n_ended = max(n_ended, ?)",
                (n_removed, n_ended),
            )
    return is_truncated
