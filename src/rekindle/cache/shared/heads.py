"""The heads of objects. Each begins with its owner: whose request stored it, and when that arrived.

    offset size field
    0      8    when the request arrived, unix time (f64)
    8      2    bytes of the session's name
    10     128  the session's name, UTF-8, zeros behind it
    138    8    xxh3 of bytes 0..138

All numbers are little-endian. The namespace is not in the head: an object's folder stands for it.
In the head of an entry, the preamble follows, padded to the longest one.
"""

import math
import struct
import time
from functools import lru_cache
from typing import NamedTuple

import msgspec
import xxhash

from rekindle.cache.entry import (
    HEADER_BYTES,
    MAX_PREAMBLE_BYTES,
    Entry,
    Header,
    Key,
    Kind,
    Retention,
    decode_preamble,
    encode_preamble,
)
from rekindle.cache.shared.sealing import Seal
from rekindle.errors import EntryCorrupt, EntryForgotten
from rekindle.generation.forgetting import Owner
from rekindle.generation.model_state import Payload

MAX_SESSION_BYTES = 128  # longer names are rare, and every lookup reads heads by the hundred
_OWNER = struct.Struct(f"<dH{MAX_SESSION_BYTES}s")
_CHECK = struct.Struct("<Q")
OWNER_BYTES = _OWNER.size + _CHECK.size
HEAD_BYTES = OWNER_BYTES + MAX_PREAMBLE_BYTES  # of an entry, before it is sealed
# All of these are picked.
MAX_TURN_BYTES = 8 * 2**20  # of a turn's object
MAX_PAYLOAD_BYTES = 512 * 2**20  # as much as Redis holds under one name
SLACK_BYTES = 2**20  # of a block's payload beyond its rows


def encode_owner(owner: Owner) -> bytes:
    """Raises EntryForgotten if no deletion would find an object of this owner."""
    session = (owner.session or "").encode()
    if not 0 < len(session) <= MAX_SESSION_BYTES:
        raise EntryForgotten("its session has no name, or one that is too long")
    fixed = _OWNER.pack(owner.asked_at, len(session), session)
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed))


def decode_owner(head: Payload, namespace: str | None) -> Owner:
    """Return the owner at the beginning of the bytes. Raises EntryCorrupt.

    No request arrived later than now: the clock of the server that wrote it was ahead. A deletion
    on this server must cover it.
    """
    owner = _decoded_owner(bytes(head[:OWNER_BYTES]), namespace)
    now = time.time()
    return owner if owner.asked_at <= now else msgspec.structs.replace(owner, asked_at=now)


def given_to(head: bytes, session: str, asked_at: float) -> bytes:
    """Return an entry's head with another owner."""
    return (
        encode_owner(Owner(namespace=None, session=session, asked_at=asked_at)) + head[OWNER_BYTES:]
    )


@lru_cache(maxsize=64)  # the blocks of one turn have one owner
def _decoded_owner(head: bytes, namespace: str | None) -> Owner:
    fixed, check = head[: _OWNER.size], head[_OWNER.size :]
    if check != _CHECK.pack(xxhash.xxh3_64_intdigest(fixed)) or len(fixed) != _OWNER.size:
        raise EntryCorrupt("its owner does not match its checksum")
    asked_at, n_bytes, session = _OWNER.unpack(fixed)
    if not math.isfinite(asked_at) or n_bytes > len(session):
        raise EntryCorrupt("its owner is not one of ours")
    try:
        name = session[:n_bytes].decode()
    except UnicodeDecodeError:
        raise EntryCorrupt("its owner is not one of ours") from None
    return Owner(namespace=namespace, session=name, asked_at=asked_at)


class Head(NamedTuple):
    header: Header
    owner: Owner
    payload_check: int

    @property
    def retention(self) -> Retention:
        assert self.owner.session is not None
        return Retention(session=self.owner.session, asked_at=self.owner.asked_at)


class EntryHeads:
    """Seals and opens the heads of one model's entries. `row_bytes`: about; 0: unknown."""

    def __init__(self, seal: Seal, *, fingerprint: Key, row_bytes: int) -> None:
        self._seal = seal
        self._fingerprint = fingerprint
        self._row_bytes = row_bytes
        self.n_bytes = HEAD_BYTES + seal.OVERHEAD_BYTES

    def sealed(self, entry: Entry, owner: Owner, name: str) -> Payload:
        preamble = encode_preamble(entry).ljust(MAX_PREAMBLE_BYTES, b"\0")
        return self._seal.seal(encode_owner(owner) + preamble, name)

    def opened(self, sealed: Payload, name: str, key: Key, namespace: str) -> Head:
        """Return the verified head of the entry with this key. Raises EntryCorrupt."""
        if len(sealed) != self.n_bytes:
            raise EntryCorrupt(f"its head has {len(sealed)} bytes instead of {self.n_bytes}")
        data = bytes(self._seal.open(sealed, name))
        owner = decode_owner(data, namespace)
        preamble = data[OWNER_BYTES:]
        header, payload_check = decode_preamble(preamble)
        if any(preamble[HEADER_BYTES + len(header.tokens) :]):
            raise EntryCorrupt("there are unexpected bytes between its header and its payload")
        if header.key != key:
            raise EntryCorrupt(f"it holds the entry {header.key.hex()}")
        if header.fingerprint != self._fingerprint:
            raise EntryCorrupt("it belongs to another model")
        if header.payload_bytes > self._max_payload_bytes(header):
            raise EntryCorrupt(f"it claims a payload of {header.payload_bytes} bytes")
        if not 0 <= header.compute_seconds < math.inf or not math.isfinite(header.created_at):
            raise EntryCorrupt("its times are not numbers")
        return Head(header, owner, payload_check)

    def _max_payload_bytes(self, header: Header) -> int:
        if header.kind is Kind.CHECKPOINT or not self._row_bytes:
            return MAX_PAYLOAD_BYTES
        return min(2 * self._row_bytes * header.n_tokens + SLACK_BYTES, MAX_PAYLOAD_BYTES)
