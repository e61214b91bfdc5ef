"""What a shared store shows to others, and what others can change in it."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.shared.sealing import Authenticated, Encrypted, Seal, Unsealed, new_seal
from rekindle.errors import EntryCorrupt, StartupError

SECRET = bytes(range(32))
SEALS: dict[str, Seal] = {"encrypted": Encrypted(SECRET), "authenticated": Authenticated(SECRET)}
both_seals = pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
any_seal = st.sampled_from(list(SEALS.values()))


@given(seal=any_seal, data=st.binary(max_size=300), name=st.text(max_size=20))
def test_what_was_sealed_opens_under_its_name(seal: Seal, data: bytes, name: str) -> None:
    sealed = seal.seal(memoryview(data), name)
    assert len(sealed) == len(data) + seal.OVERHEAD_BYTES
    assert seal.open(sealed, name) == data


@given(
    seal=any_seal,
    data=st.binary(min_size=1, max_size=100),
    where=st.integers(min_value=0),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_anywhere_is_a_corrupt_entry(
    seal: Seal, data: bytes, where: int, bit: int
) -> None:
    sealed = bytearray(seal.seal(data, "e/1"))
    sealed[where % len(sealed)] ^= 1 << bit
    with pytest.raises(EntryCorrupt):
        seal.open(bytes(sealed), "e/1")


@given(seal=any_seal, data=st.binary(max_size=100), n_bytes=st.integers(1, 200))
def test_bytes_more_or_less_are_a_corrupt_entry(seal: Seal, data: bytes, n_bytes: int) -> None:
    sealed = bytes(seal.seal(data, "e/1"))
    for changed in (sealed[:-n_bytes], sealed + bytes(n_bytes)):
        with pytest.raises(EntryCorrupt):
            seal.open(changed, "e/1")


@both_seals
def test_an_object_moved_to_another_name_does_not_open(seal: Seal) -> None:
    sealed = seal.seal(b"1rows", "e/")
    for name, data in (("e/2", sealed), ("e/1", sealed), ("e", sealed)):
        with pytest.raises(EntryCorrupt):
            seal.open(data, name)


@both_seals
def test_another_key_opens_nothing_and_names_nothing_alike(seal: Seal) -> None:
    other = type(seal)(bytes(32))  # type: ignore[call-arg]
    with pytest.raises(EntryCorrupt):
        other.open(seal.seal(b"rows", "e/1"), "e/1")
    assert other.folder("people") != seal.folder("people")
    assert other.name("e", "f", b"digest") != seal.name("e", "f", b"digest")


def test_servers_with_different_settings_never_meet_at_one_name() -> None:
    seals = [*SEALS.values(), Unsealed()]
    assert len({seal.folder("") for seal in seals}) == 3
    assert len({seal.name("e", "f", b"0123456789abcdef") for seal in seals}) == 3
    encrypted, authenticated = SEALS.values()
    with pytest.raises(EntryCorrupt):
        authenticated.open(encrypted.seal(b"rows", "e/1"), "e/1")
    with pytest.raises(EntryCorrupt):
        encrypted.open(authenticated.seal(b"rows", "e/1"), "e/1")


@both_seals
def test_the_same_bytes_never_look_the_same_twice(seal: Seal) -> None:
    assert seal.seal(b"rows", "e/1") != seal.seal(b"rows", "e/1")


@both_seals
def test_names_are_the_same_on_every_server_and_do_not_show_the_digest(seal: Seal) -> None:
    digest = bytes.fromhex("00112233445566778899aabbccddeeff")
    again = type(seal)(SECRET)  # type: ignore[call-arg]
    assert seal.name("e", "f", digest) == again.name("e", "f", digest)
    assert seal.folder("people") == again.folder("people") != again.folder("others")
    assert digest.hex() not in seal.name("e", "f", digest)
    assert seal.name("e", "f", digest)[1:] != seal.name("t", "f", digest)[1:]
    assert seal.name("e", "f", digest).startswith("e/f/")


def test_authentication_hides_nothing_and_encryption_hides_all() -> None:
    assert b"rows" in bytes(SEALS["authenticated"].seal(b"rows", "e/1"))
    assert b"rows" not in bytes(SEALS["encrypted"].seal(b"rows", "e/1"))


def test_without_a_key_everything_stays_as_it_is() -> None:
    seal = new_seal(None)
    assert isinstance(seal, Unsealed)
    data = memoryview(b"rows")
    assert seal.seal(data, "e/1") is data
    assert seal.open(data, "e/1") is data
    assert seal.name("e", "f", b"\x01\xff") == "e/f/01ff"
    assert "people" not in seal.folder("people")
    assert seal.OVERHEAD_BYTES == 0


@pytest.mark.parametrize(
    "text", [SECRET.hex(), SECRET.hex().upper() + "\n", base64.b64encode(SECRET).decode()]
)
def test_a_key_is_hex_or_base64(text: str) -> None:
    for encrypts, seal in zip((True, False), SEALS.values(), strict=True):
        assert new_seal(text, encrypts=encrypts).open(seal.seal(b"rows", "e/1"), "e/1") == b"rows"


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "zz" * 32, "a b" * 15, "ab" * 33])
def test_any_other_key_is_refused_and_not_shown(text: str) -> None:
    for encrypts in (True, False):
        with pytest.raises(StartupError, match="32 bytes") as refused:
            new_seal(text, encrypts=encrypts)
        assert not text or text not in refused.value.message
