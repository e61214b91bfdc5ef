"""What a shared store shows to others."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.shared.sealing import NoSeal, Seal, new_seal
from rekindle.errors import EntryCorrupt, StartupError

SECRET = bytes(range(32))
SEAL = Seal(SECRET)


@given(data=st.binary(max_size=300), name=st.text(max_size=20))
def test_what_was_sealed_opens_under_its_name(data: bytes, name: str) -> None:
    sealed = SEAL.seal(memoryview(data), name)
    assert len(sealed) == len(data) + SEAL.OVERHEAD_BYTES
    assert SEAL.open(sealed, name) == data


@given(
    data=st.binary(min_size=1, max_size=100), where=st.integers(min_value=0), bit=st.integers(0, 7)
)
def test_a_flipped_bit_anywhere_is_a_corrupt_entry(data: bytes, where: int, bit: int) -> None:
    sealed = bytearray(SEAL.seal(data, "e/1"))
    sealed[where % len(sealed)] ^= 1 << bit
    with pytest.raises(EntryCorrupt):
        SEAL.open(bytes(sealed), "e/1")


@pytest.mark.parametrize("n_bytes", [0, 11, 12, 27])
def test_bytes_too_short_to_be_sealed_are_a_corrupt_entry(n_bytes: int) -> None:
    with pytest.raises(EntryCorrupt):
        SEAL.open(bytes(n_bytes), "e/1")


def test_an_object_moved_to_another_name_does_not_open() -> None:
    sealed = SEAL.seal(b"rows", "e/1")
    with pytest.raises(EntryCorrupt):
        SEAL.open(sealed, "e/2")


def test_another_key_opens_nothing_and_names_nothing_alike() -> None:
    other = Seal(bytes(32))
    with pytest.raises(EntryCorrupt):
        other.open(SEAL.seal(b"rows", "e/1"), "e/1")
    assert other.name("e", b"digest") != SEAL.name("e", b"digest")


def test_the_same_bytes_never_look_the_same_twice() -> None:
    assert SEAL.seal(b"rows", "e/1") != SEAL.seal(b"rows", "e/1")


def test_names_are_the_same_on_every_server_and_do_not_show_the_digest() -> None:
    digest = bytes.fromhex("00112233445566778899aabbccddeeff")
    assert SEAL.name("e", digest) == Seal(SECRET).name("e", digest)
    assert digest.hex() not in SEAL.name("e", digest)
    assert SEAL.name("e", digest).partition("/")[2] != SEAL.name("t", digest).partition("/")[2]
    assert SEAL.name("e", digest).startswith("e/")


def test_without_a_key_everything_stays_as_it_is() -> None:
    seal = new_seal(None)
    assert isinstance(seal, NoSeal)
    data = memoryview(b"rows")
    assert seal.seal(data, "e/1") is data
    assert seal.open(data, "e/1") is data
    assert seal.name("e", b"\x01\xff") == "e/01ff"
    assert seal.OVERHEAD_BYTES == 0


@pytest.mark.parametrize(
    "text", [SECRET.hex(), SECRET.hex().upper() + "\n", base64.b64encode(SECRET).decode()]
)
def test_a_key_is_hex_or_base64(text: str) -> None:
    assert new_seal(text).open(SEAL.seal(b"rows", "e/1"), "e/1") == b"rows"


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "zz" * 32, "a b" * 15, "ab" * 33])
def test_any_other_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(StartupError, match="32 bytes") as refused:
        new_seal(text)
    assert not text or text not in refused.value.message
