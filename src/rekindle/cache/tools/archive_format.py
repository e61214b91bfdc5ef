"""The file format of an archive: stored prefixes of one model that another directory can import.

    offset size field
    0      8    magic "RKNDPACK"
    8      4    format version
    12     4    bytes of the manifest
    16     8    xxh3 of bytes 0..16 and of the manifest
    24     ..   the manifest, JSON: fingerprint, entries in order, names
    ..     ..   each entry exactly as its file, parents before children

All numbers are little-endian. Every byte is under a checksum, or is padding that must be zero.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import xxhash

from rekindle.cache.entry import (
    HEADER_BYTES,
    KEY_BYTES,
    MAX_PREAMBLE_BYTES,
    TOKEN_BYTES,
    Entry,
    Key,
    Retention,
    checksum,
    decode_preamble,
)
from rekindle.cache.names import MAX_NAMES, Named
from rekindle.errors import EntryCorrupt
from rekindle.generation.request import MAX_SESSION_CHARS, Rank
from rekindle.json_size import is_too_large

ARCHIVE_VERSION = 1
MAX_MANIFEST_BYTES = 2**28  # picked: a million entries
MAX_ENTRIES = 2**20
# An entry is an object with 4 keys, a name one with 5.
MAX_MEMBERS = 5 * MAX_ENTRIES + 6 * MAX_NAMES + 16
MAX_PAYLOAD_BYTES = 2**32  # a hundred times the block of a large model; picked
NAME_PATTERN = re.compile(r"[A-Za-z0-9._:/-]{1,128}")  # of `cache_key`
_MAX_TIME = 1e11  # seconds since the epoch: the year 5138

_MAGIC = b"RKNDPACK"
_HEAD = struct.Struct("<8sII")
_CHECK = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _CHECK.size


class ArchiveDamaged(Exception):
    """The message says what is wrong with the archive."""


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


def encode_head(manifest: Manifest) -> bytes:
    """Return everything that precedes the first entry."""
    encoded = json.dumps(asdict(manifest), default=bytes.hex).encode()
    fixed = _HEAD.pack(_MAGIC, ARCHIVE_VERSION, len(encoded))
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + encoded)) + encoded


def read_manifest(file: BinaryIO) -> Manifest:
    """Read and verify the head. Raises ArchiveDamaged."""
    n_file_bytes = os.fstat(file.fileno()).st_size
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        raise ArchiveDamaged("it is not an archive of `rekindle cache export`")
    _, version, n_manifest_bytes = _HEAD.unpack_from(head)
    if version != ARCHIVE_VERSION:
        raise ArchiveDamaged(f"its format is {version}, this version reads {ARCHIVE_VERSION}")
    if n_manifest_bytes > min(n_file_bytes, MAX_MANIFEST_BYTES):
        raise ArchiveDamaged("its list of contents is cut off")
    encoded = file.read(n_manifest_bytes)
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    if check != xxhash.xxh3_64_intdigest(head[: _HEAD.size] + encoded):
        raise ArchiveDamaged("its list of contents does not match its checksum")
    manifest = _decode_manifest(encoded)
    if n_file_bytes != HEAD_BYTES + n_manifest_bytes + manifest.n_bytes:
        raise ArchiveDamaged("it is longer or shorter than its list of contents says")
    return manifest


def read_entries(file: BinaryIO, manifest: Manifest) -> Iterator[tuple[Entry, int]]:
    """Yield each verified entry with the bytes read so far. Raises ArchiveDamaged."""
    n_done = 0
    for packed in manifest.entries:
        n_done += packed.n_bytes
        yield _read_packed(file, packed, manifest.fingerprint), n_done


def _decode_manifest(encoded: bytes) -> Manifest:
    try:
        if is_too_large(encoded, MAX_MEMBERS, MAX_MEMBERS):
            raise ValueError("more than any list of contents has")
        content = json.loads(encoded)
        return Manifest(
            fingerprint=_key(content["fingerprint"]),
            entries=tuple(
                Packed(
                    key=_key(each["key"]),
                    n_bytes=_natural(each["n_bytes"]),
                    rank=Rank(each["rank"]),
                    session=_session(each["session"]),
                )
                for each in _bounded(content["entries"], MAX_ENTRIES)
            ),
            names=tuple(
                Named(
                    root=_key(each["root"]),
                    name=_name(each["name"]),
                    tokens=_tokens(each["tokens"]),
                    session=_session(each["session"]),
                    named_at=_time(each["named_at"]),
                )
                for each in _bounded(content["names"], MAX_NAMES)
            ),
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ArchiveDamaged("its list of contents is malformed") from error


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
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


def _time(value: Any) -> float:
    at = float(value)
    if not 0 <= at <= _MAX_TIME:  # nor an infinity or NaN
        raise ValueError(value)
    return at


def _name(value: Any) -> str:
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(value)
    return str(value)


def _session(value: Any) -> str:
    """Hold the session to what the API lets a client send: it is printed and logged."""
    if not isinstance(value, str) or not value or len(value) > MAX_SESSION_CHARS:
        raise ValueError(value)
    if not value.isprintable():  # nor half of a surrogate pair, which SQLite refuses
        raise ValueError(value)
    return value


def _bounded(values: Any, max_items: int) -> list[Any]:
    if not isinstance(values, list) or len(values) > max_items:
        raise ValueError
    return values


def _read_packed(file: BinaryIO, packed: Packed, fingerprint: Key) -> Entry:
    data = file.read(min(packed.n_bytes, MAX_PREAMBLE_BYTES))
    try:
        header, payload_check = decode_preamble(data)
    except EntryCorrupt as error:
        raise ArchiveDamaged(f"an entry in it is damaged ({error.message})") from error
    if any(data[HEADER_BYTES + len(header.tokens) : header.preamble_bytes]):
        raise ArchiveDamaged("an entry has unexpected bytes between its header and its payload")
    if packed.n_bytes != header.file_bytes:
        raise ArchiveDamaged("an entry is longer or shorter than its header says")
    if header.payload_bytes > MAX_PAYLOAD_BYTES:
        raise ArchiveDamaged(f"an entry has more than {MAX_PAYLOAD_BYTES >> 30} GiB")
    if header.key != packed.key or header.fingerprint != fingerprint:
        raise ArchiveDamaged("an entry is not the one that the list of contents names")
    payload = memoryview(data[header.preamble_bytes :] + file.read(packed.n_bytes - len(data)))
    if checksum(payload) != payload_check:
        raise ArchiveDamaged("the payload of an entry does not match its checksum")
    return Entry(header, payload, Retention(packed.rank, packed.session))
