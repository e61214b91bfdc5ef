"""Stored prefixes as one file, which another directory takes in.

    offset size field
    0      8    magic "RKNDPACK"
    8      4    format version
    12     4    bytes of the manifest
    16     8    xxh3 of bytes 0..16 and of the manifest
    24     ..   the manifest, JSON: fingerprint, entries in order, names
    ..     ..   each entry exactly as its file, nothing before what it follows

All numbers are little-endian. Every byte is under a checksum, or is a zero that must be one.
What cannot be done is a StartupError.
"""

import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import (
    HEADER_BYTES,
    KEY_BYTES,
    MAX_PREAMBLE_BYTES,
    TOKEN_BYTES,
    Entry,
    Header,
    Key,
    Retention,
    checksum,
    decode_preamble,
    encode_preamble,
)
from rekindle.cache.listing.names import Named
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.tools.directory import check_is_cache, failures_told
from rekindle.cache.tools.lineage import Lineage, Stored
from rekindle.errors import EntryCorrupt, StartupError
from rekindle.generation.request import Rank

ARCHIVE_VERSION = 1
MAX_MANIFEST_BYTES = 2**28  # picked: a million entries

_MAGIC = b"RKNDPACK"
_HEAD = struct.Struct("<8sII")
_CHECK = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _CHECK.size

OnProgress = Callable[[int, int], None]  # bytes done, of how many


@dataclass(frozen=True, slots=True)
class Packed:
    key: Key
    n_bytes: int  # of its file
    rank: Rank
    session: str


@dataclass(frozen=True, slots=True)
class Manifest:
    fingerprint: Key
    entries: tuple[Packed, ...]
    names: tuple[Named, ...]

    @property
    def n_bytes(self) -> int:
        return sum(packed.n_bytes for packed in self.entries)


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
    is_new_model: bool  # nothing of this model was in the directory


class _Damaged(Exception):
    pass


def export_to(
    path: Path, directory: Path, stored: Stored, wanted: Sequence[Lineage], on_progress: OnProgress
) -> Exported:
    """The file appears under its name whole or not at all."""
    manifest = _manifest_of(stored, wanted)
    files = EntryFiles(directory)
    head = _encoded_head(manifest)
    n_done = 0
    with _appearing(path) as file:
        _write(file, path, head)
        for packed in manifest.entries:
            entry = _read_stored(files, packed.key)
            _write(file, path, encode_preamble(entry))
            _write(file, path, entry.payload)
            n_done += packed.n_bytes
            on_progress(n_done, manifest.n_bytes)
    return Exported(
        manifest,
        n_bytes=len(head) + manifest.n_bytes,
        n_tokens=sum(lineage.n_found for lineage in wanted),
    )


def import_from(path: Path, directory: Path, on_progress: OnProgress) -> Imported:
    """Checks all of the file before it adds anything; what is there already stays as it is."""
    _check_may_take(directory)
    with _opened(path) as file:
        with _damage_told(path, "nothing was added"):
            manifest = _read_manifest(file)
            n_total = 2 * manifest.n_bytes
            first_byte = file.tell()
            known: dict[Key, Header] = {}
            for entry, n_done in _entries(file, manifest):
                _check_follows(entry.header, known)
                known[entry.header.key] = entry.header
                on_progress(n_done, n_total)
        file.seek(first_byte)
        with failures_told(directory, "changed"):
            catalog = open_catalog(directory)
        with closing(catalog), _damage_told(path, "what was added until then is sound"):
            with failures_told(directory, "read"):
                is_new_model = manifest.fingerprint not in catalog.totals()
            added = []
            for entry, n_done in _entries(file, manifest):
                with failures_told(directory, "changed"):
                    if _add(entry, catalog, directory):
                        added.append(entry.header.key)
                on_progress(manifest.n_bytes + n_done, n_total)
            with failures_told(directory, "changed"):
                names_added, names_kept = _give_names(catalog, manifest)
    return Imported(manifest, tuple(added), names_added, names_kept, is_new_model)


def _manifest_of(stored: Stored, wanted: Sequence[Lineage]) -> Manifest:
    entries = {entry.key: entry for lineage in wanted for entry in lineage.entries}
    names = {
        (named.root, named.name): named
        for lineage in wanted
        for named in stored.names_along(lineage)
    }
    fingerprints = {entry.row.header.fingerprint for entry in entries.values()}
    if len(fingerprints) != 1:
        raise StartupError("These are prompts of several models; export those of each by itself.")
    return Manifest(
        fingerprint=fingerprints.pop(),
        entries=tuple(
            Packed(
                entry.key,
                entry.row.file_bytes,
                entry.row.retention.rank,
                entry.row.retention.session,
            )
            for entry in entries.values()
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
    """A private file that gets its name at the end."""
    _check_plain(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with _written(path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            with _written(path):
                file.flush()
                os.fsync(file.fileno())
        with _written(path):
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write(file: BinaryIO, path: Path, data: bytes | memoryview) -> None:
    with _written(path):
        file.write(data)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(f"The file {path} cannot be written: {error.strerror}.") from error


def _encoded_head(manifest: Manifest) -> bytes:
    encoded = json.dumps(asdict(manifest), default=_hex).encode()
    fixed = _HEAD.pack(_MAGIC, ARCHIVE_VERSION, len(encoded))
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + encoded)) + encoded


def _hex(value: object) -> str:
    assert isinstance(value, bytes)
    return value.hex()


def _check_plain(path: Path) -> None:
    """A pipe would keep us waiting, and a device would be replaced."""
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
def _damage_told(path: Path, consequence: str) -> Iterator[None]:
    try:
        yield
    except _Damaged as error:
        raise StartupError(f"The file {path} is refused ({consequence}): {error}.") from error


def _read_manifest(file: BinaryIO) -> Manifest:
    n_file_bytes = os.fstat(file.fileno()).st_size
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        raise _Damaged("it is not an archive of `rekindle cache export`")
    _, version, n_manifest_bytes = _HEAD.unpack_from(head)
    if version != ARCHIVE_VERSION:
        raise _Damaged(f"its format is {version}, this version reads {ARCHIVE_VERSION}")
    if n_manifest_bytes > min(n_file_bytes, MAX_MANIFEST_BYTES):
        raise _Damaged("its list of contents is cut off")
    encoded = file.read(n_manifest_bytes)
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    if check != xxhash.xxh3_64_intdigest(head[: _HEAD.size] + encoded):
        raise _Damaged("its list of contents does not match its checksum")
    manifest = _decoded(encoded)
    if n_file_bytes != HEAD_BYTES + n_manifest_bytes + manifest.n_bytes:
        raise _Damaged("it is longer or shorter than its list of contents says")
    return manifest


def _decoded(encoded: bytes) -> Manifest:
    try:
        told = json.loads(encoded)
        return Manifest(
            fingerprint=_key(told["fingerprint"]),
            entries=tuple(
                Packed(
                    key=_key(each["key"]),
                    n_bytes=_natural(each["n_bytes"]),
                    rank=Rank(each["rank"]),
                    session=_text(each["session"]),
                )
                for each in told["entries"]
            ),
            names=tuple(
                Named(
                    root=_key(each["root"]),
                    name=_text(each["name"]),
                    tokens=_tokens(each["tokens"]),
                    session=_text(each["session"]),
                    named_at=float(each["named_at"]),
                )
                for each in told["names"]
            ),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _Damaged("its list of contents cannot be understood") from error


def _key(text: Any) -> Key:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(text)
    return key


def _tokens(text: Any) -> bytes:
    tokens = bytes.fromhex(text)
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(text)
    return tokens


def _natural(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode()  # JSON may hold halves of characters, which SQLite refuses
    return value


def _entries(file: BinaryIO, manifest: Manifest) -> Iterator[tuple[Entry, int]]:
    """Each one with the bytes of all so far."""
    n_done = 0
    for packed in manifest.entries:
        n_done += packed.n_bytes
        yield _read_packed(file, packed, manifest.fingerprint), n_done


def _read_packed(file: BinaryIO, packed: Packed, fingerprint: Key) -> Entry:
    """Verified as a file of its own would be."""
    data = memoryview(file.read(packed.n_bytes))
    try:
        header, payload_check = decode_preamble(bytes(data[:MAX_PREAMBLE_BYTES]))
    except EntryCorrupt as error:
        raise _Damaged(f"an entry in it is damaged ({error.message})") from error
    if any(data[HEADER_BYTES + len(header.tokens) : header.preamble_bytes]):
        raise _Damaged("there is something between the header and the payload of an entry")
    if len(data) != header.file_bytes:
        raise _Damaged("an entry is longer or shorter than its header says")
    if header.key != packed.key or header.fingerprint != fingerprint:
        raise _Damaged("an entry is another than the list of contents says")
    payload = data[header.preamble_bytes :]
    if checksum(payload) != payload_check:
        raise _Damaged("the payload of an entry does not match its checksum")
    return Entry(header, payload, Retention(packed.rank, packed.session))


def _check_follows(header: Header, known: dict[Key, Header]) -> None:
    parent = known.get(header.parent)
    if header.start != (parent.stop if parent else 0):
        raise _Damaged("an entry follows another that is not there")


def _check_may_take(directory: Path) -> None:
    """A folder of something else does not become a cache by an import."""
    with failures_told(directory, "read"):
        if not directory.exists() or not os.listdir(directory):
            return
    check_is_cache(directory)


def _add(entry: Entry, catalog: Catalog, directory: Path) -> bool:
    """As a server's put, but for the room: its next one makes that."""
    files = EntryFiles(directory)
    header = entry.header
    with alone_in(directory):
        if files.is_whole(header) and catalog.has(header.key):
            return False
        files.write(entry)
        catalog.add([header], used_at=time.time(), retention=entry.retention)
    return True


def _give_names(catalog: Catalog, manifest: Manifest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that are new, and those that stay what they are."""
    there = {
        (named.root, named.name): named for named in catalog.names(fingerprint=manifest.fingerprint)
    }
    added, kept = [], []
    for named in manifest.names:
        known = there.get((named.root, named.name))
        if known is None:
            catalog.give_name(named, fingerprint=manifest.fingerprint)
            added.append(named.name)
        elif known.tokens != named.tokens:
            kept.append(named.name)
    return tuple(added), tuple(kept)
