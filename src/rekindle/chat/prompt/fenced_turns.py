"""Turns of one namespace in a store that others use as well.

Ids and keys are digests; combined with a digest of the namespace none of them is found from
another one.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from rekindle.chat.prompt.meaning import KEY_BYTES
from rekindle.generation.stored_turns import StoredTurn, TurnStore


class FencedTurns:
    def __init__(self, store: TurnStore, namespace: str) -> None:
        self._store = store
        digest = blake2b(namespace.encode(), digest_size=KEY_BYTES).digest()
        self._fence = int.from_bytes(digest, "big")

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        return [self._crossed(turn) for turn in self._store.find([*map(self._cross, keys)])]

    def keep(self, turn: StoredTurn) -> None:
        self._store.keep(self._crossed(turn))

    def touch(self, ids: Sequence[bytes]) -> None:
        self._store.touch([*map(self._cross, ids)])

    def close(self) -> None:
        """The store is not ours to close."""

    def _crossed(self, turn: StoredTurn) -> StoredTurn:
        return replace(turn, id=self._cross(turn.id), keys=tuple(map(self._cross, turn.keys)))

    def _cross(self, digest: bytes) -> bytes:
        """There and back are the same way."""
        return (int.from_bytes(digest, "big") ^ self._fence).to_bytes(len(digest), "big")
