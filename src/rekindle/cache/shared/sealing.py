"""Protection of the shared store's objects: none, authentication, or encryption.

    no key                     Unsealed        checksums find accidents, not a writer
    key, no encryption         Authenticated   AES-GMAC: only servers with the key can write
    key                        Encrypted       AES-GCM: only servers with the key can read, too

Names depend on the key and on the kind of protection. Servers with different settings
never meet at one name, and neither removes what the other wrote.
"""

import base64
import os
import struct
from hashlib import blake2b
from typing import Protocol

from rekindle.errors import EntryCorrupt, StartupError
from rekindle.generation.model_state import Payload

_SECRET_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_NAME_BYTES = 32
_FOLDER_BYTES = 16
_BAD_KEY = "The key of the shared store must be 32 bytes, as 64 hex digits or in base64."
_TOO_SHORT = "it is too short to be sealed"
_CHANGED = "it was changed, or sealed with another key"
_NAME_LENGTH = struct.Struct("<H")


class Seal(Protocol):
    OVERHEAD_BYTES: int

    def seal(self, data: Payload, name: str) -> Payload:
        """Return the bytes to store under the name."""
        ...

    def open(self, sealed: Payload, name: str) -> Payload:
        """Return the data that was sealed for the name. Raises EntryCorrupt."""
        ...

    def folder(self, namespace: str) -> str:
        """Return the folder of a namespace's objects."""
        ...

    def name(self, kind: str, folder: str, digest: bytes) -> str: ...


class Unsealed:
    """No key: contents stay in clear, and any writer can change them."""

    OVERHEAD_BYTES = 0

    def seal(self, data: Payload, name: str) -> Payload:
        return data

    def open(self, sealed: Payload, name: str) -> Payload:
        return sealed

    def folder(self, namespace: str) -> str:
        return blake2b(namespace.encode(), digest_size=_FOLDER_BYTES, person=b"folder").hexdigest()

    def name(self, kind: str, folder: str, digest: bytes) -> str:
        return f"{kind}/{folder}/{digest.hex()}"


class _KeyedNames:
    def __init__(self, name_key: bytes) -> None:
        self._name_key = name_key

    def folder(self, namespace: str) -> str:
        message = b"folder/%s" % namespace.encode()
        return blake2b(message, key=self._name_key, digest_size=_FOLDER_BYTES).hexdigest()

    def name(self, kind: str, folder: str, digest: bytes) -> str:
        message = b"%s/%s" % (kind.encode(), digest)
        keyed = blake2b(message, key=self._name_key, digest_size=_NAME_BYTES).hexdigest()
        return f"{kind}/{folder}/{keyed}"


class Authenticated(_KeyedNames):
    """AES-256-GMAC: a random nonce, a tag over name and data, the data in clear.

    GMAC is the half of AES-GCM that authenticates, and faster than HMAC-SHA256.
    """

    OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        assert len(secret) == _SECRET_BYTES
        super().__init__(_derived(secret, b"names of mac"))
        self._cipher, self._mode = Cipher, modes.GCM
        self._key = algorithms.AES(_derived(secret, b"mac"))
        self._invalid_tag = InvalidTag

    def seal(self, data: Payload, name: str) -> Payload:
        nonce = os.urandom(_NONCE_BYTES)
        mac = self._cipher(self._key, self._mode(nonce)).encryptor()
        mac.authenticate_additional_data(_bound(name))
        mac.authenticate_additional_data(data)
        mac.finalize()
        return b"".join((nonce, mac.tag, data))

    def open(self, sealed: Payload, name: str) -> Payload:
        if len(sealed) < self.OVERHEAD_BYTES:
            raise EntryCorrupt(_TOO_SHORT)
        view = memoryview(sealed)
        nonce, tag = view[:_NONCE_BYTES], view[_NONCE_BYTES : self.OVERHEAD_BYTES]
        data = view[self.OVERHEAD_BYTES :]
        mac = self._cipher(self._key, self._mode(bytes(nonce), bytes(tag))).decryptor()
        mac.authenticate_additional_data(_bound(name))
        mac.authenticate_additional_data(data)
        try:
            mac.finalize()
        except self._invalid_tag:
            raise EntryCorrupt(_CHANGED) from None
        return data


class Encrypted(_KeyedNames):
    """AES-256-GCM: a random nonce, the encrypted bytes, a tag that covers the name as well.

    Names are keyed too: a digest in clear would let readers of the store test their guesses.
    """

    OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(secret) == _SECRET_BYTES
        super().__init__(_derived(secret, b"names"))
        self._cipher = AESGCM(_derived(secret, b"payloads"))
        self._invalid_tag = InvalidTag

    def seal(self, data: Payload, name: str) -> Payload:
        sealed = memoryview(bytearray(len(data) + self.OVERHEAD_BYTES))
        nonce = os.urandom(_NONCE_BYTES)
        sealed[:_NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, data, name.encode(), sealed[_NONCE_BYTES:])
        return sealed.toreadonly()

    def open(self, sealed: Payload, name: str) -> Payload:
        if len(sealed) < self.OVERHEAD_BYTES:
            raise EntryCorrupt(_TOO_SHORT)
        view = memoryview(sealed)
        try:
            return self._cipher.decrypt(view[:_NONCE_BYTES], view[_NONCE_BYTES:], name.encode())
        except self._invalid_tag:
            raise EntryCorrupt(_CHANGED) from None


def new_seal(key: str | None, *, encrypts: bool = True) -> Seal:
    """Raises StartupError."""
    if key is None:
        return Unsealed()
    return Encrypted(_secret(key)) if encrypts else Authenticated(_secret(key))


def _secret(key: str) -> bytes:
    text = key.strip()
    is_hex = len(text) == 2 * _SECRET_BYTES
    try:
        secret = bytes.fromhex(text) if is_hex else base64.b64decode(text, validate=True)
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise StartupError(_BAD_KEY)
    return secret


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=secret, digest_size=32, person=b"rekindle").digest()


def _bound(name: str) -> bytes:
    """Return the name with its length, so that no part of the data can pass for it."""
    encoded = name.encode()
    return _NAME_LENGTH.pack(len(encoded)) + encoded
