"""Encryption of the shared store: without the key, readers learn neither contents nor names."""

import base64
import os
from hashlib import blake2b

from rekindle.errors import EntryCorrupt, StartupError
from rekindle.generation.model_state import Payload

_SECRET_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_NAME_BYTES = 32
_BAD_KEY = "The key of the shared store must be 32 bytes, as 64 hex digits or in base64."


class NoSeal:
    """No key: contents and names stay in clear."""

    OVERHEAD_BYTES = 0

    def seal(self, data: Payload, name: str) -> Payload:
        return data

    def open(self, sealed: Payload, name: str) -> Payload:
        return sealed

    def name(self, kind: str, digest: bytes) -> str:
        return f"{kind}/{digest.hex()}"


class Seal:
    """AES-256-GCM: a random nonce, the encrypted bytes, a tag that covers the name as well.

    Names are keyed too: a digest in clear would let readers of the store test their guesses.
    """

    OVERHEAD_BYTES = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(secret) == _SECRET_BYTES
        self._cipher = AESGCM(_derived(secret, b"payloads"))
        self._name_key = _derived(secret, b"names")
        self._invalid_tag = InvalidTag

    def seal(self, data: Payload, name: str) -> Payload:
        sealed = memoryview(bytearray(len(data) + self.OVERHEAD_BYTES))
        nonce = os.urandom(_NONCE_BYTES)
        sealed[:_NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, data, name.encode(), sealed[_NONCE_BYTES:])
        return sealed.toreadonly()

    def open(self, sealed: Payload, name: str) -> Payload:
        """Raises EntryCorrupt."""
        if len(sealed) < self.OVERHEAD_BYTES:
            raise EntryCorrupt("it is too short to be sealed")
        view = memoryview(sealed)
        try:
            return self._cipher.decrypt(view[:_NONCE_BYTES], view[_NONCE_BYTES:], name.encode())
        except self._invalid_tag:
            raise EntryCorrupt("it was changed, or sealed with another key") from None

    def name(self, kind: str, digest: bytes) -> str:
        message = b"%s/%s" % (kind.encode(), digest)
        return f"{kind}/{blake2b(message, key=self._name_key, digest_size=_NAME_BYTES).hexdigest()}"


def new_seal(key: str | None) -> Seal | NoSeal:
    """Raises StartupError."""
    return NoSeal() if key is None else Seal(_secret(key))


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
