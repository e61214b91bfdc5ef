"""Turns that every server finds: those of this one in front, the shared store behind.

    t/<digest of fingerprint and key>   a turn, sealed; of several with one key, the last written

Nothing here raises: what cannot be read or written is a miss. Whoever asks waits for a bounded
time; one thread writes.
"""

import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import xxhash

from rekindle.cache.entry import KEY_BYTES, Key
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.health import StoreHealth
from rekindle.errors import EntryCorrupt, TierFailed
from rekindle.generation.stored_turns import StoredTurn, TurnStore

_log = logging.getLogger(__name__)

# All of these are picked.
WAIT_SECONDS, DEAR_WAIT_SECONDS = 0.05, 0.5  # for an answer; DEAR: where reads are
N_READERS = 4
ABSENT_SECONDS = 5.0  # another server may be writing it right now
MAX_ABSENT = 10_000
MAX_WAITING, MAX_WAITING_BYTES = 1000, 16 * 2**20
TOUCH_SECONDS = 3600.0
MAX_KNOWN = 10_000  # turns of which it is remembered when the store was told of their use
CLOSE_SECONDS = 2.0

_MAGIC = b"RKTN"
_FORMAT = 1
_HEAD = struct.Struct("<4sH16s16sI")
_CHECK = struct.Struct("<Q")

Kept = TypeVar("Kept")


class SharedTurns:
    """A TurnStore. The shared store is not ours to close."""

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
        self._wait_seconds = DEAR_WAIT_SECONDS if store.objects.reads_are_dear else WAIT_SECONDS
        self._readers = ThreadPoolExecutor(N_READERS, thread_name_prefix="shared-turns")
        self._writer = _Writer(self._write, store.health, on_dropped=self._forget)
        self._lock = threading.Lock()  # guards what follows
        self._is_closed = False
        self._asked: dict[bytes, _Question] = {}  # by key, while there is no answer
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # key -> until when
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # by id

    @property
    def n_dropped(self) -> int:
        """Turns that the store was not told of, because it failed or was too slow."""
        return self._writer.n_dropped

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        found = {turn.id: turn for turn in self._local.find(keys)}
        found_keys = {key for turn in found.values() for key in turn.keys}
        for turn in self._ask([key for key in dict.fromkeys(keys) if key not in found_keys]):
            found.setdefault(turn.id, turn)
        self._get_to_know(found.values())
        return list(found.values())

    def keep(self, turn: StoredTurn) -> None:
        self._local.keep(turn)
        with self._lock:
            self._note(turn.id, _Known(turn.keys, told_at=self._now()))
        self._writer.put(_Job(turn.id, turn.keys, turn))

    def touch(self, ids: Sequence[bytes]) -> None:
        self._local.touch(ids)
        now = self._now()
        due = []
        with self._lock:
            for id in ids:
                known = self._known.get(id)
                if known is not None and now - known.told_at >= TOUCH_SECONDS:
                    self._note(id, known._replace(told_at=now))
                    due.append(_Job(id, known.keys, None))
        for job in due:
            self._writer.put(job)

    def flush(self, timeout_seconds: float) -> bool:
        """Whether all is written; a store that is not well is not waited for."""
        return self._writer.flush(timeout_seconds)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._writer.close(CLOSE_SECONDS)
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
                if question is mine and question.answer.running():  # else others were before it
                    self._health.note_slow(f"turns took more than {self._wait_seconds} s")
            except (TierFailed, CancelledError):
                pass
            except Exception:
                _log.exception("turns could not be read from the shared store")
        wanted = set(keys)
        return [turn for turn in found if not wanted.isdisjoint(turn.keys)]

    def _questions(self, keys: Sequence[bytes]) -> tuple["_Question | None", list["_Question"]]:
        """A new one for what nobody has asked for, and those of others that are under way."""
        with self._lock:
            if self._is_closed:
                return None, []
            now = self._now()
            under_way = list(dict.fromkeys(self._asked[key] for key in keys if key in self._asked))
            new = [
                key for key in keys if key not in self._asked and self._absent.get(key, now) <= now
            ]
            if not new:
                return None, under_way
            until = time.monotonic() + self._wait_seconds
            mine = _Question(self._readers.submit(self._read, new), until)
            self._asked.update(dict.fromkeys(new, mine))
        return mine, under_way

    def _read(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        """Also when nobody waits any more: the next one who asks finds it here."""
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
                        _put_last(self._absent, key, until, limit=MAX_ABSENT)

    # -- writing --------------------------------------------------------------------------------

    def _write(self, job: "_Job") -> None:
        """Of a turn that was only used: unless the store still has it. Raises TierFailed."""
        turn = job.turn
        if turn is None:
            if self._objects.touch(job.keys):
                return
            turn = next((each for each in self._local.find(job.keys) if each.id == job.id), None)
        if turn is not None:
            self._objects.write(turn)

    def _get_to_know(self, turns: Iterable[StoredTurn]) -> None:
        with self._lock:
            for turn in turns:
                self._note(turn.id, self._known.get(turn.id) or _Known(turn.keys))

    def _note(self, id: bytes, known: "_Known") -> None:
        _put_last(self._known, id, known, limit=MAX_KNOWN)

    def _forget(self, id: bytes) -> None:
        """So that the store is told when it is used next."""
        with self._lock:
            self._known.pop(id, None)


class _Question(NamedTuple):
    answer: Future[list[StoredTurn]]
    until: float  # by the monotonic clock; nobody waits longer


class _Known(NamedTuple):
    keys: tuple[bytes, ...]
    told_at: float = float("-inf")  # when the store heard of its last use


class _Job(NamedTuple):
    id: bytes
    keys: tuple[bytes, ...]
    turn: StoredTurn | None  # None: it was used

    @property
    def n_bytes(self) -> int:
        return len(self.turn.data) if self.turn else 0


class _Writer:
    """A bounded queue and the thread that works it off while the store is well."""

    def __init__(
        self,
        write: Callable[[_Job], None],
        health: StoreHealth,
        *,
        on_dropped: Callable[[bytes], None],
    ) -> None:
        self.n_dropped = 0
        self._write = write
        self._health = health
        self._on_dropped = on_dropped
        self._wake = threading.Condition()  # guards what follows
        self._waiting: OrderedDict[bytes, _Job] = OrderedDict()  # by the turn's id
        self._n_bytes = 0
        self._is_writing = False
        self._is_closing = False
        self._stop_listening = health.on_change(self._look_again)
        self._thread = threading.Thread(target=self._work, name="shared-turn-writer", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        dropped = []
        with self._wake:
            before = self._take(job.id) if job.id in self._waiting else None
            if job.turn is None and before is not None:
                job = before
            self._waiting[job.id] = job
            self._n_bytes += job.n_bytes
            while len(self._waiting) > MAX_WAITING or self._n_bytes > MAX_WAITING_BYTES:
                dropped.append(self._take(next(iter(self._waiting))))
            self._wake.notify_all()
        for each in dropped:
            self._drop(each)

    def flush(self, timeout_seconds: float) -> bool:
        with self._wake:
            self._wake.wait_for(
                lambda: not self._has_work or not self._health.is_well, timeout_seconds
            )
            return not self._has_work

    def close(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        self.flush(timeout_seconds)
        self._stop_listening()
        with self._wake:
            self._is_closing = True
            self.n_dropped += len(self._waiting)
            self._wake.notify_all()
        self._thread.join(max(until - time.monotonic(), 0.0))

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._is_writing

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._write(job)
            except TierFailed:
                self._drop(job)
            except Exception:  # without this thread nothing would be written any more
                _log.exception("a turn could not be written to the shared store")
                self._drop(job)
            with self._wake:
                self._is_writing = False
                self._wake.notify_all()

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._is_closing:
                if self._waiting and self._health.is_well:
                    self._is_writing = True
                    return self._take(next(iter(self._waiting)))
                self._wake.wait()
        return None

    def _take(self, id: bytes) -> _Job:
        job = self._waiting.pop(id)
        self._n_bytes -= job.n_bytes
        return job

    def _drop(self, job: _Job) -> None:
        with self._wake:
            self.n_dropped += 1
        self._on_dropped(job.id)

    def _look_again(self) -> None:
        with self._wake:
            self._wake.notify_all()


class _TurnObjects:
    """Turns as objects of the store. Raises TierFailed."""

    def __init__(self, store: SharedStore, fingerprint: Key) -> None:
        self._objects = store.objects
        self._seal = store.seal
        self._fingerprint = fingerprint

    def read(self, keys: Sequence[bytes]) -> list[StoredTurn | None]:
        """None: there is none, or none that is sound."""
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
        """Whether there is something under each of them."""
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
        raise EntryCorrupt("it is not a turn of ours")
    end_of_keys = _HEAD.size + n_keys * KEY_BYTES
    if end_of_keys > len(body):
        raise EntryCorrupt("it has fewer keys than it says")
    keys = [body[at : at + KEY_BYTES] for at in range(_HEAD.size, end_of_keys, KEY_BYTES)]
    return StoredTurn(id, tuple(keys), body[end_of_keys:])


def _put_last(kept: OrderedDict[bytes, Kept], key: bytes, value: Kept, *, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limit:
        kept.popitem(last=False)
