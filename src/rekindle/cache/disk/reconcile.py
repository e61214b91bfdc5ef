"""Reconciliation of the catalogue with the entry files of a directory.

They differ after a server was killed between a file and its row, after files were deleted by
hand, and after the catalogue was lost. A lost catalogue is rebuilt from the files' headers.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles, name_of
from rekindle.cache.disk.owners import trace_roots
from rekindle.cache.entry import UNKNOWN_SESSION, Header, Key, Retention
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.errors import EntryCorrupt, TierFailed

_log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # files read, files in all

UNKNOWN_OWNER = Retention(session=UNKNOWN_SESSION)
_BATCH_FILES = 256  # a transaction each; picked


class Differences(NamedTuple):
    gone: list[Key]  # rows without a file
    n_unknown: int  # files without a row


def open_catalog(directory: Path) -> Catalog:
    """Open the catalogue for a command without a model, and reconcile it. The caller closes it.

    Creates the directory if there is none. Raises TierFailed.
    """
    catalog, files = Catalog(directory), EntryFiles(directory)
    open_as_it_is(catalog, files)
    reconcile(catalog, files)
    return catalog


def open_as_it_is(catalog: Catalog, files: EntryFiles) -> None:
    """Open the catalogue without reconciling it. Raises TierFailed."""
    with _closed_on_failure(catalog):
        files.create_folders()
        catalog.open(files.set_aside)


def reconcile(
    catalog: Catalog, files: EntryFiles, *, on_progress: OnProgress | None = None
) -> Differences:
    """Delete rows without a file, add rows for unknown files. Return what differed.

    Raises TierFailed.
    """
    with _closed_on_failure(catalog):
        catalog.remove_malformed()
        # Read rows before files: an entry that another server adds meanwhile is unknown, not gone.
        known = {name_of(key): key for key in catalog.all_keys()}
        present = files.names()
        gone = [key for name, key in known.items() if name not in present]
        if gone:
            catalog.remove(gone, unless=lambda key: files.path(key).exists())
        unknown = sorted(present - known.keys())
        for first in range(0, len(unknown), _BATCH_FILES):
            paths = [files.path_of(name) for name in unknown[first : first + _BATCH_FILES]]
            headers = [header for path in paths if (header := _read_header(files, path))]
            # A writer adds its row, and a deletion removes row and file, under the same lock.
            with alone_in(catalog.path.parent):
                there = [header for header in headers if files.path(header.key).exists()]
                catalog.add(there, retention=UNKNOWN_OWNER)
            if on_progress is not None:
                on_progress(min(first + _BATCH_FILES, len(unknown)), len(unknown))
        if unknown:
            trace_roots(catalog)
    return Differences(gone, len(unknown))


@contextmanager
def _closed_on_failure(catalog: Catalog) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        catalog.close()
        raise TierFailed(f"{error.filename or catalog.path.parent}: {error.strerror}") from error
    except TierFailed:
        catalog.close()
        raise


def _read_header(files: EntryFiles, path: Path) -> Header | None:
    try:
        return files.read_header(path)
    except FileNotFoundError:
        return None  # another server evicted it
    except (EntryCorrupt, OSError) as error:
        _log.warning("cache: quarantined entry file %s: %s", path.name, error)
        with suppress(OSError):
            files.set_aside(path)
        return None
