"""Export stored prefixes to one file, and import them into another directory.

Every failure is a StartupError.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import Entry, Key, encode_preamble
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.tools.archive_format import (
    ArchiveDamaged,
    Manifest,
    Packed,
    encode_head,
    read_entries,
    read_manifest,
)
from rekindle.cache.tools.directory import check_is_cache, failures_reported
from rekindle.cache.tools.lineage import Lineage, Stored
from rekindle.errors import EntryCorrupt, StartupError

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Exported:
    manifest: Manifest
    n_bytes: int  # of the archive
    n_tokens: int  # of the prompts, as far as they are stored


@dataclass(frozen=True, slots=True)
class Imported:
    manifest: Manifest
    added: tuple[Key, ...]
    names_added: tuple[str, ...]
    names_kept: tuple[str, ...]  # they stand for another prompt in this directory
    is_new_model: bool  # the directory held nothing of this model


def export_to(
    path: Path, directory: Path, stored: Stored, wanted: Sequence[Lineage], on_progress: OnProgress
) -> Exported:
    """Write an archive. The file appears under its name as a whole or not at all."""
    manifest = _manifest_of(stored, wanted)
    files = EntryFiles(directory)
    head = encode_head(manifest)
    n_done = 0
    with _appearing(path) as file:
        file.write(head)
        for packed in manifest.entries:
            entry = _read_stored(files, packed.key)
            file.write(encode_preamble(entry))
            file.write(entry.payload)
            n_done += packed.n_bytes
            on_progress(n_done, manifest.n_bytes)
    return Exported(
        manifest,
        n_bytes=len(head) + manifest.n_bytes,
        n_tokens=sum(lineage.n_found for lineage in wanted),
    )


def import_from(path: Path, directory: Path, on_progress: OnProgress) -> Imported:
    """Verify the whole archive, then add its entries. Existing entries and names stay."""
    _check_is_cache_or_empty(directory)
    with _opened(path) as file:
        with _damage_reported(path, "nothing was added"):
            manifest = read_manifest(file)
            n_total = 2 * manifest.n_bytes
            first_byte = file.tell()
            stops: dict[Key, int] = {}
            for entry, n_done in read_entries(file, manifest):
                header = entry.header
                if header.start != stops.get(header.parent, 0):
                    raise ArchiveDamaged("the parent of an entry is missing")
                stops[header.key] = header.stop
                on_progress(n_done, n_total)
        file.seek(first_byte)
        with failures_reported(directory, "changed"):
            catalog = open_catalog(directory)
        with closing(catalog), _damage_reported(path, "entries added so far are sound"):
            with failures_reported(directory, "read"):
                is_new_model = manifest.fingerprint not in catalog.totals()
            added = []
            for entry, n_done in read_entries(file, manifest):
                with failures_reported(directory, "changed"):
                    if _add(entry, catalog, directory):
                        added.append(entry.header.key)
                on_progress(manifest.n_bytes + n_done, n_total)
            with failures_reported(directory, "changed"):
                names_added, names_kept = _give_names(catalog, manifest)
    return Imported(manifest, tuple(added), names_added, names_kept, is_new_model)


def _manifest_of(stored: Stored, wanted: Sequence[Lineage]) -> Manifest:
    entries = {entry.key: entry.row for lineage in wanted for entry in lineage.entries}
    names = {
        (named.root, named.name): named
        for lineage in wanted
        for named in stored.names_along(lineage)
    }
    fingerprints = {row.header.fingerprint for row in entries.values()}
    if len(fingerprints) != 1:
        raise StartupError("These are prompts of several models; export each model by itself.")
    return Manifest(
        fingerprint=fingerprints.pop(),
        entries=tuple(
            Packed(key, row.header.file_bytes, row.retention.rank, row.retention.session)
            for key, row in entries.items()
        ),
        names=tuple(names.values()),
    )


def _read_stored(files: EntryFiles, key: Key) -> Entry:
    try:
        return files.read(key)
    except FileNotFoundError:
        raise StartupError(f"The entry {key.hex()} was deleted while it was exported.") from None
    except OSError as error:
        raise StartupError(f"The entry {key.hex()} cannot be read: {error.strerror}.") from error
    except EntryCorrupt as error:
        raise StartupError(
            f"The entry {key.hex()} is damaged ({error.message}); see `rekindle cache verify`."
        ) from error


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """Write to a private temporary file that gets its name at the end."""
    _check_plain(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StartupError(f"The file {path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):  # a failure left it
            temporary.unlink(missing_ok=True)


def _check_plain(path: Path) -> None:
    """Refuse a pipe, which would block, and a device, which would be replaced."""
    if path.exists() and not path.is_file():
        raise StartupError(f"{path} is not a plain file.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    _check_plain(path)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StartupError(f"The file {path} cannot be read: {error.strerror}.") from error


@contextmanager
def _damage_reported(path: Path, consequence: str) -> Iterator[None]:
    try:
        yield
    except ArchiveDamaged as error:
        raise StartupError(f"The file {path} is refused ({consequence}): {error}.") from error


def _check_is_cache_or_empty(directory: Path) -> None:
    """Refuse a folder with other content: an import must not turn it into a cache."""
    with failures_reported(directory, "read"):
        if not directory.exists() or not os.listdir(directory):
            return
    check_is_cache(directory)


def _add(entry: Entry, catalog: Catalog, directory: Path) -> bool:
    """Store an entry, ignoring the budget: the next put of a server evicts. Return True if new."""
    files = EntryFiles(directory)
    header = entry.header
    with alone_in(directory):
        if files.is_whole(header) and catalog.has(header.key):
            return False
        files.write(entry)
        # An archive is taken in on purpose: a deletion before that does not count.
        now = time.time()
        catalog.add([header], used_at=now, retention=entry.retention._replace(asked_at=now))
    return True


def _give_names(catalog: Catalog, manifest: Manifest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the new names. Return them, and the names that stand for another prompt here."""
    existing = {
        (named.root, named.name): named for named in catalog.names(fingerprint=manifest.fingerprint)
    }
    added, kept = [], []
    for named in manifest.names:
        known = existing.get((named.root, named.name))
        if known is None:
            catalog.give_name(named, fingerprint=manifest.fingerprint)
            added.append(named.name)
        elif known.tokens != named.tokens:
            kept.append(named.name)
    return tuple(added), tuple(kept)
