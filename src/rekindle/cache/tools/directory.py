"""Operations on a cache directory: read, verify, repair, shrink and clear it.

For commands without a model, while servers may use the directory. Commands read a copy of the
catalogue, and change only what another server could change as well. Every failure is a
StartupError.
"""

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.catalogue_schema import CATALOG
from rekindle.cache.disk.entry_file import EntryFiles, size_on_disk
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import KEY_BYTES, Header, Key
from rekindle.cache.fingerprint import DIGESTS_NAME
from rekindle.cache.forgetting.tombstone_file import FORGOTTEN, TombstoneFile
from rekindle.cache.responses.file import RESPONSES
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.sqlite.file import reading_only
from rekindle.cache.tools.inventory import Inventory
from rekindle.cache.tools.lineage import Stored
from rekindle.cache.tools.turn_upkeep import TurnTotals, repair_turns, verify_turns
from rekindle.cache.turns.file import TURNS
from rekindle.errors import CacheError, EntryCorrupt, StartupError, TierFailed
from rekindle.generation.forgetting import Scope, Tombstone

_ENTRY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.kv")
_PARTIAL = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\..+\.tmp")
_DATABASES = "|".join(
    re.escape(schema.file_name) for schema in (CATALOG, TURNS, RESPONSES, FORGOTTEN)
)
_SET_ASIDE = re.compile(rf"\d+-(.+\.kv|{_DATABASES})")
_DIGESTS = re.compile(rf"{re.escape(DIGESTS_NAME)}|\.{re.escape(DIGESTS_NAME)}-\w{{8}}")
_BATCH_KEYS = 256  # per transaction; picked
_WRITE_SECONDS = 60.0  # picked: a temporary file that is older has lost its writer
_SETTLE_SECONDS = 0.5  # picked: a server evicts a batch in half the time


class Flaw(Enum):
    CATALOG = "the catalogue cannot be read"
    DAMAGED = "the file is damaged"
    DIFFERS = "the catalogue describes it differently"
    UNKNOWN = "the catalogue does not know it"
    GONE = "the file is gone"
    TURNS = "not all of the remembered turns can be read"


@dataclass(frozen=True, slots=True)
class Problem:
    flaw: Flaw
    path: Path
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryFindings:
    n_entries: int  # sound ones
    n_bytes: int
    n_incomplete: int  # useless until a missing parent is computed again
    turns: TurnTotals  # sound ones
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class Cleared:
    n_files: int
    n_bytes: int


def check_is_cache(directory: Path) -> None:
    """Raise StartupError unless the directory has entries or a readable catalogue."""
    with failures_reported(directory, "read"):
        os.listdir(directory)
    if not entry_paths(directory):
        try:
            with _catalog_copy(directory):
                pass
        except TierFailed as error:
            raise StartupError(
                f"The directory {directory} is not a cache of Rekindle:"
                " it has no entries and no readable catalogue."
            ) from error


def read_stored(directory: Path) -> Stored:
    """Read the entries and names of every model."""
    check_is_cache(directory)
    try:
        with _catalog_copy(directory) as catalog:
            names = [
                named
                for fingerprint in catalog.totals()
                for named in catalog.names(fingerprint=fingerprint)
            ]
            return Stored(Inventory(catalog.rows()), names)
    except TierFailed as error:
        raise StartupError(
            f"The catalogue of {directory} cannot be read ({error});"
            " `rekindle cache verify --fix` rebuilds it."
        ) from error


def entry_paths(directory: Path) -> list[Path]:
    """Return every file whose name and folder are those of an entry."""
    return [
        path
        for path in sorted((directory / "entries").glob("[0-9a-f][0-9a-f]/*.kv"))
        if _ENTRY.fullmatch(path.name) and path.name.startswith(path.parent.name)
    ]


def verify(directory: Path, on_progress: Callable[[int, int], None]) -> DirectoryFindings:
    """Read everything and report problems. `on_progress` gets bytes done and bytes in all."""
    check_is_cache(directory)
    headers: dict[Key, Header] = {}
    problems: list[Problem] = []
    inventory = Inventory([])
    for found in _examine_all(directory, on_progress):
        if isinstance(found, Header):
            headers[found.key] = found
        else:
            problems.append(found)
    try:
        inventory = _inventory(directory)
        suspected = _disagreements(directory, inventory, headers)
        if suspected:
            # A server may be between writing or deleting a file and its row: look again.
            time.sleep(_SETTLE_SECONDS)
            inventory = _inventory(directory)
            confirmed = set(_disagreements(directory, inventory, headers))
            problems += [problem for problem in suspected if problem in confirmed]
    except TierFailed as error:
        problems.append(Problem(Flaw.CATALOG, directory / CATALOG.file_name, str(error)))
    turns = verify_turns(directory)
    if turns.trouble is not None:
        problems.append(Problem(Flaw.TURNS, directory / TURNS.file_name, turns.trouble))
    return DirectoryFindings(
        n_entries=len(headers),
        n_bytes=sum(size_on_disk(header) for header in headers.values()),
        n_incomplete=sum(not entry.is_complete for entry in inventory.entries),
        turns=turns.sound,
        problems=problems,
    )


def repair(directory: Path, problems: Sequence[Problem]) -> None:
    """Quarantine damaged files, delete rows without a file, add rows for unknown files.

    Damaged turns are deleted.
    """
    files = EntryFiles(directory)
    with failures_reported(directory, "changed"):
        for problem in problems:
            # A server may have replaced or evicted the file meanwhile.
            if problem.flaw is Flaw.DAMAGED and isinstance(_examine(files, problem.path), Problem):
                with suppress(FileNotFoundError):
                    files.set_aside(problem.path)
        with closing(Catalog(directory)) as catalog:
            catalog.open(files.set_aside)
            # A wrong row would prevent adding the right one.
            wrong = [each for each in problems if each.flaw in (Flaw.DIFFERS, Flaw.UNKNOWN)]
            catalog.remove([_key(problem.path) for problem in wrong])
        open_catalog(directory).close()
        if any(problem.flaw is Flaw.TURNS for problem in problems):
            repair_turns(directory)


def remove(directory: Path, keys: Sequence[Key]) -> int:
    """Delete entries. Return the bytes of files that could not be deleted."""
    files = EntryFiles(directory)
    n_stuck_bytes = 0
    with failures_reported(directory, "changed"), closing(Catalog(directory)) as catalog:
        catalog.open(files.set_aside)
        for first in range(0, len(keys), _BATCH_KEYS):
            batch = keys[first : first + _BATCH_KEYS]
            catalog.remove(batch)
            n_stuck_bytes += files.remove(batch)
        _forget_gone(catalog, files)
    return n_stuck_bytes


def clear(directory: Path) -> Cleared:
    """Delete every file of the cache. The catalogue is only emptied: a server may use it.

    A tombstone tells running servers to delete what they hold.
    """
    check_is_cache(directory)
    with failures_reported(directory, "changed"):
        TombstoneFile(directory).add(Tombstone(scope=Scope(), at=time.time()))
    files = EntryFiles(directory)
    n_bytes = 0
    with failures_reported(directory, "changed"), closing(Catalog(directory)) as catalog:
        catalog.open(files.set_aside)
        # A server may be adding entries. Servers notice a row without a file, but not the reverse.
        keys = catalog.all_keys()
        own_files = _own_files(directory)
        catalog.remove(keys)
        catalog.clear_names()
        for path in own_files:
            n_bytes += _size(path)
            path.unlink(missing_ok=True)
        _forget_gone(catalog, files)
        catalog.vacuum()
        catalog.truncate_log()
        # The files are deleted, so that no text of a reply is left. A server notices that.
        with alone_in(directory):
            known = [*TURNS.paths(directory), *RESPONSES.paths(directory)]
            texts = [path for path in known if path.is_file()]
            for path in texts:
                n_bytes += _size(path)
                path.unlink(missing_ok=True)
    return Cleared(len(own_files) + len(texts), n_bytes)


@contextmanager
def failures_reported(directory: Path, done: str) -> Iterator[None]:
    """Turn failures into a StartupError: the directory cannot be `done` (read, changed)."""
    try:
        yield
    except (OSError, CacheError) as error:
        why = error.message if isinstance(error, CacheError) else error.strerror
        raise StartupError(f"The cache directory {directory} cannot be {done}: {why}.") from error


def _forget_gone(catalog: Catalog, files: EntryFiles) -> None:
    """Delete rows without a file: a server may have added one for a file being deleted."""
    gone = [key for key in catalog.all_keys() if not files.path(key).exists()]
    catalog.remove(gone, unless=lambda key: files.path(key).exists())


def _inventory(directory: Path) -> Inventory:
    with _catalog_copy(directory) as catalog:
        return Inventory(catalog.rows())


@contextmanager
def _catalog_copy(directory: Path) -> Iterator[Catalog]:
    """Open a copy of the catalogue: no server waits, and nothing in the directory changes.

    Raises TierFailed.
    """

    def refuse(_copy: Path) -> None:
        raise TierFailed("it is damaged or of another version")

    with TemporaryDirectory(prefix="rekindle-") as folder:
        copy = Path(folder) / CATALOG.file_name
        with (
            reading_only(directory / CATALOG.file_name) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        with closing(Catalog(copy.parent)) as catalog:
            catalog.open(refuse)
            yield catalog


def _examine_all(
    directory: Path, on_progress: Callable[[int, int], None]
) -> Iterator[Header | Problem]:
    files = EntryFiles(directory)
    sizes = {path: _size(path) for path in entry_paths(directory)}
    n_total, n_done = sum(sizes.values()), 0
    for path, n_bytes in sizes.items():
        if found := _examine(files, path):
            yield found
        n_done += n_bytes
        on_progress(n_done, n_total)


def _examine(files: EntryFiles, path: Path) -> Header | Problem | None:
    try:
        return files.read(_key(path)).header
    except FileNotFoundError:
        return None  # a server evicted it
    except EntryCorrupt as error:
        return Problem(Flaw.DAMAGED, path, error.message)
    except OSError as error:
        return Problem(Flaw.DAMAGED, path, f"it cannot be read: {error.strerror}")


def _disagreements(
    directory: Path, inventory: Inventory, headers: Mapping[Key, Header]
) -> list[Problem]:
    """Compare the catalogue with the files. `headers` may have been read a while ago."""
    files = EntryFiles(directory)
    described = {entry.key: entry.row.header for entry in inventory.entries}
    problems = []
    for key, header in headers.items():
        path = files.path(key)
        if key not in described:
            if path.exists():
                problems.append(Problem(Flaw.UNKNOWN, path))
        elif described[key] != header and _examine(files, path) == header:
            problems.append(Problem(Flaw.DIFFERS, path))
    for key in sorted(described.keys() - headers.keys()):
        if not files.path(key).exists():
            problems.append(Problem(Flaw.GONE, files.path(key)))
    return problems


def _own_files(directory: Path) -> list[Path]:
    """Return the files of the cache, without databases and without files being written."""
    partial = (directory / "entries").glob("[0-9a-f][0-9a-f]/*.tmp")
    others = [
        *(path for path in directory.iterdir() if _DIGESTS.fullmatch(path.name)),
        *(path for path in (directory / "quarantine").glob("*") if _SET_ASIDE.fullmatch(path.name)),
        *(path for path in partial if _PARTIAL.fullmatch(path.name) and _is_abandoned(path)),
    ]
    return entry_paths(directory) + [path for path in others if path.is_file()]


def _is_abandoned(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _WRITE_SECONDS
    except FileNotFoundError:
        return False


def _key(path: Path) -> Key:
    return bytes.fromhex(path.stem)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
