"""Brings the catalogue of a directory and its files together again.

They part when a server is killed between a file and its row, when somebody deletes files, and
when the catalogue itself is lost: then it is made again from the files' headers.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles, name_of
from rekindle.cache.entry import Header, Key
from rekindle.errors import EntryCorrupt, TierFailed

_log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]  # files read, of how many

_BATCH_FILES = 256  # a transaction each; picked


class Differences(NamedTuple):
    gone: list[Key]
    n_unknown: int


def open_catalog(directory: Path, *, on_progress: OnProgress | None = None) -> Catalog:
    """For whoever has no model to serve: `with closing(open_catalog(directory)) as catalog`.

    Makes the directory when there is none. Raises TierFailed.
    """
    catalog, files = Catalog(directory), EntryFiles(directory)
    open_as_it_is(catalog, files)
    reconcile(catalog, files, on_progress=on_progress)
    return catalog


def open_as_it_is(catalog: Catalog, files: EntryFiles) -> None:
    """What it says may not be true before `reconcile`. Raises TierFailed."""
    with _closed_when_it_fails(catalog):
        files.create_folders()
        catalog.open(files.set_aside)


def reconcile(
    catalog: Catalog, files: EntryFiles, *, on_progress: OnProgress | None
) -> Differences:
    """What the catalogue said, and was not so, and how many files it did not know."""
    with _closed_when_it_fails(catalog):
        # Rows before files: what another server stores meanwhile then looks unknown, not gone.
        known = {name_of(key): key for key in catalog.all_keys()}
        present = files.names()
        gone = [key for name, key in known.items() if name not in present]
        if gone:
            catalog.remove(gone, unless=lambda key: files.path(key).exists())
        unknown = sorted(present - known.keys())
        for first in range(0, len(unknown), _BATCH_FILES):
            paths = [files.path_of(name) for name in unknown[first : first + _BATCH_FILES]]
            catalog.add([header for path in paths if (header := _read_header(files, path))])
            if on_progress is not None:
                on_progress(min(first + _BATCH_FILES, len(unknown)), len(unknown))
    return Differences(gone, len(unknown))


@contextmanager
def _closed_when_it_fails(catalog: Catalog) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        catalog.close()
        raise TierFailed(f"{error.filename}: {error.strerror}") from error
    except TierFailed:
        catalog.close()
        raise


def _read_header(files: EntryFiles, path: Path) -> Header | None:
    try:
        return files.read_header(path)
    except FileNotFoundError:
        return None  # another server evicted it
    except (EntryCorrupt, OSError) as error:
        _log.warning("cache file %s is set aside: %s", path.name, error)
        with suppress(OSError):
            files.set_aside(path)
        return None
