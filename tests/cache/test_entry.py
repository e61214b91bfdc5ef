"""The bytes of a stored file, without a file."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    HEADER_BYTES,
    MAX_PREAMBLE_BYTES,
    Entry,
    Header,
    Kind,
    Reason,
    checksum,
    decode_preamble,
    encode_preamble,
    entry_key,
    token_bytes,
)
from rekindle.errors import EntryCorrupt
from tests.cache.entries import MODEL, make_entry

KEYS = st.binary(min_size=16, max_size=16)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    tokens = token_bytes(draw(st.lists(st.integers(0, 2**32 - 1), max_size=BLOCK_TOKENS)))
    parent, kind = draw(KEYS), draw(st.sampled_from(Kind))
    payload = draw(st.binary(max_size=200))
    header = Header(
        key=entry_key(parent, kind, tokens),
        parent=parent,
        fingerprint=draw(KEYS),
        kind=kind,
        start=draw(st.integers(0, 2**32 - 1)),
        tokens=tokens,
        payload_bytes=len(payload),
        compute_seconds=draw(st.floats(0, 1e6)),
        reason=draw(st.sampled_from(Reason)),
        created_at=draw(st.floats(0, 1e12)),
    )
    return Entry(header, payload)


@given(entries())
def test_a_header_survives_the_file(entry: Entry) -> None:
    preamble = encode_preamble(entry)
    assert decode_preamble(preamble + bytes(entry.payload)) == (
        entry.header,
        checksum(entry.payload),
    )
    assert len(preamble) == entry.header.preamble_bytes <= MAX_PREAMBLE_BYTES


@given(entries(), st.data())
def test_any_flipped_bit_of_a_header_is_noticed(entry: Entry, data: st.DataObject) -> None:
    preamble = bytearray(encode_preamble(entry))
    meaningful = HEADER_BYTES + len(entry.header.tokens)
    position = data.draw(st.integers(0, meaningful - 1))
    preamble[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EntryCorrupt):
        decode_preamble(bytes(preamble))


@given(entries(), st.data())
def test_a_shortened_header_is_noticed(entry: Entry, data: st.DataObject) -> None:
    meaningful = HEADER_BYTES + len(entry.header.tokens)
    n_bytes = data.draw(st.integers(0, meaningful - 1))
    with pytest.raises(EntryCorrupt):
        decode_preamble(encode_preamble(entry)[:n_bytes])


@given(st.binary(max_size=2 * MAX_PREAMBLE_BYTES))
def test_foreign_bytes_are_not_a_header(data: bytes) -> None:
    with pytest.raises(EntryCorrupt):
        decode_preamble(data)


def _resigned(preamble: bytes, offset: int, value: bytes) -> bytes:
    """Changed by somebody who knows where the checksum is."""
    fixed = preamble[:offset] + value + preamble[offset + len(value) : HEADER_BYTES - 8]
    tokens = preamble[HEADER_BYTES : HEADER_BYTES + BLOCK_TOKENS * 4]
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + tokens))
    return fixed + check + preamble[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("offset", "value", "complaint"),
    [
        (4, b"\x02\x00", "its format is 2"),
        (6, b"\x09", "another version"),
        (7, b"\x63", "another version"),
        (56, b"x" * 16, "its key does not match"),
    ],
)
def test_a_header_of_another_version_is_refused_with_its_reason(
    offset: int, value: bytes, complaint: str
) -> None:
    preamble = encode_preamble(make_entry(1))
    with pytest.raises(EntryCorrupt, match=complaint):
        decode_preamble(_resigned(preamble, offset, value))


def test_keys_tell_apart_parent_kind_and_tokens() -> None:
    tokens = token_bytes([1, 2, 3])
    keys = {
        entry_key(MODEL, Kind.BLOCK, tokens),
        entry_key(b"x" * 16, Kind.BLOCK, tokens),
        entry_key(MODEL, Kind.CHECKPOINT, tokens),
        entry_key(MODEL, Kind.BLOCK, token_bytes([1, 2])),
        entry_key(MODEL, Kind.BLOCK, b""),
    }
    assert len(keys) == 5


def test_token_ids_sort_as_bytes_the_way_they_sort_as_numbers() -> None:
    ids = [0, 1, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]
    assert sorted(token_bytes([id]) for id in ids) == [token_bytes([id]) for id in ids]
