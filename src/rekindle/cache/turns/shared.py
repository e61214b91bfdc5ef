"""Turns that all servers share: a local turn store in front, the shared store behind.

    t/<digest of fingerprint and key>   a sealed turn; the last written one, if several have the key

Nothing here raises: a turn that cannot be read is a miss. `find` waits for a bounded time. One
thread writes.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

import xxhash

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.entry import KEY_BYTES, Key
from rekindle.cache.shared.connection import SharedStore
from rekindle.errors import EntryCorrupt, TierFailed
from rekindle.generation.stored_turns import StoredTurn, TurnStore
from rekindle.write_behind import WriteBehind

_log = logging.getLogger(__name__)

# All of these are picked.
WAIT_SECONDS, DEAR_WAIT_SECONDS = 0.05, 0.5  # longest wait for a read; DEAR: with S3
N_READERS = 4
ABSENT_SECONDS = 5.0  # until a missing key is read again: another server may be writing it
MAX_ABSENT = 10_000
MAX_WAITING, MAX_WAITING_BYTES = 1000, 16 * 2**20  # unwritten turns
TOUCH_SECONDS = 3600.0  # between two touches of a turn in the store
MAX_KNOWN = 10_000  # turns with a known time of the last touch
CLOSE_SECONDS = 2.0

_MAGIC = b"RKTN"
_FORMAT = 1
_HEAD = struct.Struct("<4sH16s16sI")
_CHECK = struct.Struct("<Q")


class SharedTurns:
    """A TurnStore. Does not close the shared store."""

    def __init__(
        self,
        local: TurnStore,
        store: SharedStore,
        *,
        fingerprint: Key,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._health = store.health
        self._now = now
        self._objects = _TurnObjects(store, fingerprint)
        self._wait_seconds = DEAR_WAIT_SECONDS if store.reads_are_dear else WAIT_SECONDS
        self._readers = ThreadPoolExecutor(N_READERS, thread_name_prefix="shared-turns")
        self._lock = threading.Lock()  # guards the fields below
        self._is_closed = False
        self._asked: dict[bytes, _Question] = {}  # reads under way, by key
        self._absent: BoundedCache[bytes, float] = BoundedCache(max_items=MAX_ABSENT)  # expiry
        self._known: BoundedCache[bytes, _KnownTurn] = BoundedCache(max_items=MAX_KNOWN)  # by id
        self._writer: WriteBehind[bytes, _TurnWrite] = WriteBehind(
            "shared-turns",
            self._write,
            retry_seconds=None,
            max_batch=1,
            max_items=MAX_WAITING,
            max_bytes=MAX_WAITING_BYTES,
            size_of=lambda write: len(write.turn.data) if write.turn else 0,
            merge=lambda before, new: new if new.turn else before,
            is_ready=lambda: self._health.is_well,
            on_dropped=self._forget,
        )
        self._stop_listening = store.health.on_change(self._writer.wake)

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        found = {turn.id: turn for turn in self._local.find(keys)}
        found_keys = {key for turn in found.values() for key in turn.keys}
        for turn in self._ask([key for key in dict.fromkeys(keys) if key not in found_keys]):
            found.setdefault(turn.id, turn)
        with self._lock:
            for turn in found.values():
                if self._known.get(turn.id) is None:
                    self._known.put(turn.id, _KnownTurn(turn.keys))
        return list(found.values())

    def keep(self, turn: StoredTurn) -> None:
        self._local.keep(turn)
        with self._lock:
            self._known.put(turn.id, _KnownTurn(turn.keys, touched_at=self._now()))
        self._writer.put(turn.id, _TurnWrite(turn.keys, turn))

    def touch(self, ids: Sequence[bytes]) -> None:
        self._local.touch(ids)
        now = self._now()
        due = {}
        with self._lock:
            for id in ids:
                known = self._known.peek(id)
                if known is not None and now - known.touched_at >= TOUCH_SECONDS:
                    self._known.put(id, known._replace(touched_at=now))
                    due[id] = _TurnWrite(known.keys, None)
        self._writer.put_all(due)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._writer.close(CLOSE_SECONDS)
        self._stop_listening()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._local.close()

    # -- reading --------------------------------------------------------------------------------

    def _ask(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        if not keys or not self._health.is_well:
            return []
        mine, others = self._questions(keys)
        found = []
        for question in (*others, *([mine] if mine else [])):
            try:
                found += question.answer.result(max(question.until - time.monotonic(), 0.0))
            except TimeoutError:
                if question is mine and question.answer.running():  # else it is still queued
                    self._health.note_failure(f"turns took more than {self._wait_seconds} s")
            except (TierFailed, CancelledError):
                pass
            except Exception:
                _log.exception("turns: reading from the shared store failed")
        wanted = set(keys)
        return [turn for turn in found if not wanted.isdisjoint(turn.keys)]

    def _questions(self, keys: Sequence[bytes]) -> tuple["_Question | None", list["_Question"]]:
        """Start a read of the new keys. Return it, and the reads under way of other keys."""
        with self._lock:
            if self._is_closed:
                return None, []
            now = self._now()
            under_way = list(dict.fromkeys(self._asked[key] for key in keys if key in self._asked))
            new = [
                key
                for key in keys
                if key not in self._asked and (self._absent.peek(key) or now) <= now
            ]
            if not new:
                return None, under_way
            until = time.monotonic() + self._wait_seconds
            mine = _Question(self._readers.submit(self._read, new), until)
            self._asked.update(dict.fromkeys(new, mine))
        return mine, under_way

    def _read(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        """Read turns and keep them locally, for the next `find` if this one timed out."""
        answers: Sequence[StoredTurn | None] = ()
        try:
            answers = self._objects.read(keys)
            found = {turn.id: turn for turn in answers if turn is not None}
            for each in found.values():
                self._local.keep(each)
            return list(found.values())
        finally:
            until = self._now() + ABSENT_SECONDS
            with self._lock:
                for key in keys:
                    self._asked.pop(key, None)
                for key, turn in zip(keys, answers, strict=False):
                    if turn is None:
                        self._absent.put(key, until)

    # -- writing --------------------------------------------------------------------------------

    def _write(self, batch: "dict[bytes, _TurnWrite]") -> None:
        """Write the turns. A turn that was only used is written if the store lost it."""
        for id, write in batch.items():
            turn = write.turn
            try:
                if turn is None and not self._objects.touch(write.keys):
                    local = self._local.find(write.keys)
                    turn = next((each for each in local if each.id == id), None)
                if turn is not None:
                    self._objects.write(turn)
            except TierFailed:  # logged by the health of the store
                self._forget(id)

    def _forget(self, id: bytes) -> None:
        """Have the next use of the turn reach the store."""
        with self._lock:
            self._known.pop(id)


class _Question(NamedTuple):
    answer: Future[list[StoredTurn]]
    until: float  # monotonic deadline of all callers


class _KnownTurn(NamedTuple):
    keys: tuple[bytes, ...]
    touched_at: float = float("-inf")  # in the store


class _TurnWrite(NamedTuple):
    keys: tuple[bytes, ...]
    turn: StoredTurn | None  # None: the turn was used


class _TurnObjects:
    """Turns as objects of the store. Every method raises TierFailed."""

    def __init__(self, store: SharedStore, fingerprint: Key) -> None:
        self._objects = store
        self._seal = store.seal
        self._fingerprint = fingerprint

    def read(self, keys: Sequence[bytes]) -> list[StoredTurn | None]:
        """Return a turn for each key; None if it is missing or damaged."""
        names = [self._name(key) for key in keys]
        answers = self._objects.read(names)
        return [
            self._opened(name, key, data) if data is not None else None
            for name, key, data in zip(names, keys, answers, strict=True)
        ]

    def write(self, turn: StoredTurn) -> None:
        data = _encoded(turn, self._fingerprint)
        for name in map(self._name, turn.keys):
            self._objects.write(name, [self._seal.seal(data, name)])

    def touch(self, keys: Sequence[bytes]) -> bool:
        """Mark the objects as used. Return whether the store has all of them."""
        return all(self._objects.touch([self._name(key) for key in keys]))

    def _opened(self, name: str, key: bytes, data: bytes) -> StoredTurn | None:
        try:
            turn = _decoded(bytes(self._seal.open(data, name)), self._fingerprint)
        except EntryCorrupt:
            return None
        return turn if key in turn.keys else None

    def _name(self, key: bytes) -> str:
        digest = blake2b(self._fingerprint + key, digest_size=KEY_BYTES).digest()
        return self._seal.name("t", digest)


def _encoded(turn: StoredTurn, fingerprint: Key) -> bytes:
    head = _HEAD.pack(_MAGIC, _FORMAT, fingerprint, turn.id, len(turn.keys))
    body = b"".join((head, *turn.keys, turn.data))
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _decoded(data: bytes, fingerprint: Key) -> StoredTurn:
    """Raises EntryCorrupt."""
    body, check = data[: -_CHECK.size], data[-_CHECK.size :]
    if len(body) < _HEAD.size or check != _CHECK.pack(xxhash.xxh3_64_intdigest(body)):
        raise EntryCorrupt("it does not match its checksum")
    magic, version, of, id, n_keys = _HEAD.unpack_from(body)
    if (magic, version, of) != (_MAGIC, _FORMAT, fingerprint):
        raise EntryCorrupt("it is not a turn of Rekindle")
    end_of_keys = _HEAD.size + n_keys * KEY_BYTES
    if end_of_keys > len(body):
        raise EntryCorrupt("it has fewer keys than it says")
    keys = [body[at : at + KEY_BYTES] for at in range(_HEAD.size, end_of_keys, KEY_BYTES)]
    return StoredTurn(id, tuple(keys), body[end_of_keys:])
