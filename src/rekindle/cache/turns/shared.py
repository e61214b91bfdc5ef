"""Turns that all servers share: a local turn store in front, the shared store behind.

    t/<folder>/<digest of fingerprint and key>   a sealed turn; the last written one, if several
                                                 have the key; the folder stands for a namespace

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
from rekindle.cache.shared.deletion import TURN
from rekindle.cache.shared.heads import MAX_TURN_BYTES, OWNER_BYTES, decode_owner, encode_owner
from rekindle.errors import EntryCorrupt, EntryForgotten, TierFailed
from rekindle.generation.forgetting import Tombstone, Tombstones
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
_FORMAT = 2
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
        forgotten: Tombstones,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local = local
        self._forgotten = forgotten
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

    def find(self, keys: Sequence[bytes], *, namespace: str = "") -> list[StoredTurn]:
        found = {turn.id: turn for turn in self._local.find(keys)}
        found_keys = {key for turn in found.values() for key in turn.keys}
        missing = [key for key in dict.fromkeys(keys) if key not in found_keys]
        for turn in self._ask(missing, namespace):
            found.setdefault(turn.id, turn)
        with self._lock:
            for turn in found.values():
                if self._known.get(turn.id) is None:
                    self._known.put(turn.id, _KnownTurn(turn.keys, namespace))
        return list(found.values())

    def keep(self, turn: StoredTurn) -> None:
        if self._forgotten.cover(turn.owner):
            return
        self._local.keep(turn)
        namespace = turn.owner.namespace
        if namespace is None or turn.owner.session is None:
            return  # no deletion would find it in the store
        with self._lock:
            known = _KnownTurn(turn.keys, namespace, touched_at=self._now())
            self._known.put(turn.id, known)
        self._writer.put(turn.id, _TurnWrite(turn.keys, namespace, turn))

    def touch(self, ids: Sequence[bytes]) -> None:
        self._local.touch(ids)
        now = self._now()
        due = {}
        with self._lock:
            for id in ids:
                known = self._known.peek(id)
                if known is not None and now - known.touched_at >= TOUCH_SECONDS:
                    self._known.put(id, known._replace(touched_at=now))
                    due[id] = _TurnWrite(known.keys, known.namespace, None)
        self._writer.put_all(due)

    def forget(self, tombstone: Tombstone) -> int:
        for id in self._writer.unwritten():
            write = self._writer.peek(id)
            if write is not None and write.turn is not None and tombstone.covers(write.turn.owner):
                self._writer.discard(id)
        return self._local.forget(tombstone)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._writer.close(CLOSE_SECONDS)
        self._stop_listening()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._local.close()

    # -- reading --------------------------------------------------------------------------------

    def _ask(self, keys: Sequence[bytes], namespace: str) -> list[StoredTurn]:
        if not keys or not self._health.is_well:
            return []
        mine, others = self._questions(keys, namespace)
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

    def _questions(
        self, keys: Sequence[bytes], namespace: str
    ) -> tuple["_Question | None", list["_Question"]]:
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
            mine = _Question(self._readers.submit(self._read, new, namespace), until)
            self._asked.update(dict.fromkeys(new, mine))
        return mine, under_way

    def _read(self, keys: Sequence[bytes], namespace: str) -> list[StoredTurn]:
        """Read turns and keep them locally, for the next `find` if this one timed out."""
        answers: Sequence[StoredTurn | None] = ()
        try:
            answers = self._objects.read(keys, namespace)
            found = {
                turn.id: turn
                for turn in answers
                if turn is not None and not self._forgotten.cover(turn.owner)
            }
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
                if turn is None and not self._objects.touch(write.keys, write.namespace):
                    local = self._local.find(write.keys)
                    turn = next((each for each in local if each.id == id), None)
                if turn is not None and turn.owner.session is not None:
                    self._objects.write(turn, write.namespace)
            except EntryForgotten:
                pass
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
    namespace: str
    touched_at: float = float("-inf")  # in the store


class _TurnWrite(NamedTuple):
    keys: tuple[bytes, ...]
    namespace: str
    turn: StoredTurn | None  # None: the turn was used


class _TurnObjects:
    """Turns as objects of the store. Every method raises TierFailed."""

    def __init__(self, store: SharedStore, fingerprint: Key) -> None:
        self._objects = store
        self._deletions = store.deletions
        self._seal = store.seal
        self._fingerprint = fingerprint

    def read(self, keys: Sequence[bytes], namespace: str) -> list[StoredTurn | None]:
        """Return a turn for each key; None if it is missing, damaged or deleted."""
        self._deletions.ensure_fresh()
        names = self._names(keys, namespace)
        answers = self._objects.read(names, max_bytes=MAX_TURN_BYTES + 1)
        return [
            self._opened(name, key, data, namespace) if data is not None else None
            for name, key, data in zip(names, keys, answers, strict=True)
        ]

    def write(self, turn: StoredTurn, namespace: str) -> None:
        """Raises EntryForgotten if a deletion covers the turn."""
        if self._deletions.covers(turn.owner):
            raise EntryForgotten("a deletion covers the turn")
        data = _encoded(turn, self._fingerprint)
        if len(data) + self._seal.OVERHEAD_BYTES > MAX_TURN_BYTES:
            return
        for name in self._names(turn.keys, namespace):
            self._objects.write(name, [self._seal.seal(data, name)])
            if not self._deletions.note_write(name, turn.owner):
                raise EntryForgotten("a deletion covers the turn")

    def touch(self, keys: Sequence[bytes], namespace: str) -> bool:
        """Mark the objects as used. Return whether the store has all of them."""
        return all(self._objects.touch(self._names(keys, namespace)))

    def _opened(self, name: str, key: bytes, data: bytes, namespace: str) -> StoredTurn | None:
        try:
            turn = _decoded(bytes(self._seal.open(data, name)), self._fingerprint, namespace)
        except EntryCorrupt:
            return None
        is_deleted = self._deletions.forgotten.cover(turn.owner)
        return turn if key in turn.keys and not is_deleted else None

    def _names(self, keys: Sequence[bytes], namespace: str) -> list[str]:
        folder = self._seal.folder(namespace)
        digests = [blake2b(self._fingerprint + key, digest_size=KEY_BYTES).digest() for key in keys]
        return [self._seal.name(TURN, folder, digest) for digest in digests]


def _encoded(turn: StoredTurn, fingerprint: Key) -> bytes:
    head = _HEAD.pack(_MAGIC, _FORMAT, fingerprint, turn.id, len(turn.keys))
    body = b"".join((encode_owner(turn.owner), head, *turn.keys, turn.data))
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _decoded(data: bytes, fingerprint: Key, namespace: str) -> StoredTurn:
    """Raises EntryCorrupt."""
    body, check = data[: -_CHECK.size], data[-_CHECK.size :]
    end_of_head = OWNER_BYTES + _HEAD.size
    if len(body) < end_of_head or check != _CHECK.pack(xxhash.xxh3_64_intdigest(body)):
        raise EntryCorrupt("it does not match its checksum")
    owner = decode_owner(body, namespace)
    magic, version, of, id, n_keys = _HEAD.unpack_from(body, OWNER_BYTES)
    if (magic, version, of) != (_MAGIC, _FORMAT, fingerprint):
        raise EntryCorrupt("it is not a turn of Rekindle")
    end_of_keys = end_of_head + n_keys * KEY_BYTES
    if end_of_keys > len(body):
        raise EntryCorrupt("it has fewer keys than it says")
    keys = [body[at : at + KEY_BYTES] for at in range(end_of_head, end_of_keys, KEY_BYTES)]
    return StoredTurn(id, tuple(keys), body[end_of_keys:], owner)
