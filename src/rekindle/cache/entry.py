"""Entries: blocks and checkpoints, their keys, and the bytes of a stored file.

A block is the rows of up to 256 positions that start at a multiple of 256; a checkpoint is
the state at one position. Both are immutable. Their key names the prefix they end:

    key = blake2b(parent key | kind | token ids)        the first parent is a root: the
                                                        fingerprint, or one of a namespace

A checkpoint's parent is the last whole block before it. Its tokens are those after that block
(none at a block's end).

A file is one header, the token ids, and the payload as the backend wrote it:

    offset size field                          offset size field
    0      4    magic "RKND"                   40     16   key
    4      2    format version                 56     16   parent key
    6      1    kind (1 block, 2 checkpoint)   72     16   fingerprint
    7      1    reason it was saved            88     8    xxh3 of the payload
    8      4    first position                 96     8    xxh3 of bytes 0..96 and token ids
    12     4    number of token ids            104    ..   token ids, big-endian u32 each
    16     8    payload bytes                  ..     ..   zeros up to a multiple of 64
    24     8    seconds to compute it (f64)    ..     ..   payload
    32     8    created, unix time (f64)

All numbers but the token ids are little-endian. Big-endian ids sort as bytes the way they sort
as numbers, which the index relies on.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from math import isfinite
from typing import NamedTuple

import xxhash

from rekindle.errors import EntryCorrupt
from rekindle.generation.model_state import Payload
from rekindle.generation.request import DEFAULT_SESSION, Rank

BLOCK_TOKENS = 256
TOKEN_BYTES = 4
KEY_BYTES = 16
FORMAT_VERSION = 1

_MAGIC = b"RKND"
_HEADER = struct.Struct("<4sHBBIIQdd16s16s16sQ")
# The header's fields behind the number of token ids, in the order of the file.
_PLAIN_FIELDS = (
    "payload_bytes",
    "compute_seconds",
    "created_at",
    "key",
    "parent",
    "fingerprint",
)
_CHECK = struct.Struct("<Q")
_ALIGNMENT = 64
HEADER_BYTES = _HEADER.size + _CHECK.size
# Enough to read every header whole: a block has at most 256 token ids.
MAX_PREAMBLE_BYTES = -(-(HEADER_BYTES + BLOCK_TOKENS * TOKEN_BYTES) // _ALIGNMENT) * _ALIGNMENT

Key = bytes


class Kind(IntEnum):
    BLOCK = 1
    CHECKPOINT = 2


class Reason(IntEnum):
    """Why an entry was saved."""

    PREFILL = 1  # the prompt's computation completed it
    DECODE = 2  # the reply's computation completed it
    BOUNDARY = 3  # a later request is likely to share the prefix up to here
    TURN_END = 4
    RECLAIM = 5  # its slot was needed
    SHUTDOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    key: Key
    parent: Key
    fingerprint: Key
    kind: Kind
    start: int
    tokens: bytes  # big-endian u32 ids
    payload_bytes: int
    compute_seconds: float
    reason: Reason
    created_at: float

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    @property
    def preamble_bytes(self) -> int:
        """Where the payload starts in a file."""
        return -(-(HEADER_BYTES + len(self.tokens)) // _ALIGNMENT) * _ALIGNMENT

    @property
    def file_bytes(self) -> int:
        return self.preamble_bytes + self.payload_bytes


UNKNOWN_SESSION = ""  # of an entry whose row was lost


class Retention(NamedTuple):
    """What an entry does not say of itself: its rank, its pin, and whose request computed it."""

    rank: Rank = Rank.MAIN
    session: str = DEFAULT_SESSION
    pinned_until: float = 0.0  # seconds since the epoch
    asked_at: float = 0.0  # when the request arrived; 0: unknown, the entry's own time counts


ORDINARY = Retention()


@dataclass(frozen=True, slots=True)
class Entry:
    header: Header
    payload: Payload
    retention: Retention = ORDINARY
    root: Key = b""  # of its namespace; empty: unknown


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Encode token ids as big-endian u32."""
    # numpy takes more than twice as long for a list.
    encoded = array("I", tokens)
    assert encoded.itemsize == TOKEN_BYTES
    if sys.byteorder == "little":
        encoded.byteswap()
    return encoded.tobytes()


def namespace_root(fingerprint: Key, namespace: str) -> Key:
    """Return the parent key of a namespace's first blocks. No two namespaces share a key."""
    if not namespace:
        return fingerprint
    return blake2b(fingerprint + namespace.encode(), digest_size=KEY_BYTES).digest()


def entry_key(parent: Key, kind: Kind, tokens: bytes) -> Key:
    return blake2b(parent + bytes((kind,)) + tokens, digest_size=KEY_BYTES).digest()


def checksum(payload: Payload) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def encode_preamble(entry: Entry) -> bytes:
    """Encode all bytes of a file that come before the payload."""
    header = entry.header
    fixed = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        header.kind,
        header.reason,
        header.start,
        header.n_tokens,
        *(getattr(header, name) for name in _PLAIN_FIELDS),
        checksum(entry.payload),
    )
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + header.tokens))
    return (fixed + check + header.tokens).ljust(header.preamble_bytes, b"\0")


def decode_preamble(data: bytes) -> tuple[Header, int]:
    """Return the header at the start of a file and the payload's checksum.

    Raises EntryCorrupt.
    """
    if len(data) < HEADER_BYTES:
        raise EntryCorrupt(f"the file has {len(data)} bytes, a header has {HEADER_BYTES}")
    fixed = data[: _HEADER.size]
    magic, version, kind, reason, start, n_tokens, *plain, payload_check = _HEADER.unpack(fixed)
    if magic != _MAGIC:
        raise EntryCorrupt("it is not a file of ours")
    if version != FORMAT_VERSION:
        raise EntryCorrupt(f"its format is {version}, this version reads {FORMAT_VERSION}")
    tokens = data[HEADER_BYTES : HEADER_BYTES + n_tokens * TOKEN_BYTES]
    (check,) = _CHECK.unpack_from(data, _HEADER.size)
    if len(tokens) != n_tokens * TOKEN_BYTES or check != xxhash.xxh3_64_intdigest(fixed + tokens):
        raise EntryCorrupt("its header does not match its checksum")
    try:
        header = Header(
            kind=Kind(kind),
            reason=Reason(reason),
            start=start,
            tokens=tokens,
            **dict(zip(_PLAIN_FIELDS, plain, strict=True)),
        )
    except ValueError as error:
        raise EntryCorrupt(f"its header is of another version: {error}") from None
    if entry_key(header.parent, header.kind, tokens) != header.key:
        raise EntryCorrupt("its key does not match its tokens")
    # An infinity or NaN would spoil the order of eviction.
    if not (isfinite(header.compute_seconds) and isfinite(header.created_at)):
        raise EntryCorrupt("a number in its header is not finite")
    return header, payload_check
