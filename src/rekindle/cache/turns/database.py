"""The turns of past replies, across restarts: memory in front, `turns.sqlite3` behind.

Nothing here raises: what cannot be read or written is a miss, told once in the log, and tried
again after a while. One thread writes; what it has not written yet is found in memory.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rekindle.cache.entry import Key
from rekindle.cache.turns.file import Row, TurnFile, turn_checksum
from rekindle.cache.turns.recent import MAX_TURNS, Held, RecentTurns, in_order
from rekindle.errors import TierFailed
from rekindle.generation.stored_turns import StoredTurn

_log = logging.getLogger(__name__)

MAX_BYTES, MAX_WAL_BYTES = 256 * 2**20, 4 * 2**20
RECENT_BYTES = 32 * 2**20  # in memory, and the most that waits for the disk; picked
RETRY_SECONDS = 5.0  # picked, as in transfers.py
CLOSE_SECONDS = 5.0  # for the one write that is under way, and the last one; picked


@dataclass(slots=True)
class _Pending:
    """What is not written yet. Turns are in memory until then: one that has to leave is lost."""

    kept: dict[bytes, int] = field(default_factory=dict)  # id -> when
    touched: dict[bytes, int] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)  # numbers of rows

    def __bool__(self) -> bool:
        return bool(self.kept or self.touched or self.damaged)

    def copy(self) -> "_Pending":
        return _Pending(dict(self.kept), dict(self.touched), set(self.damaged))

    def settle(self, written: "_Pending") -> None:
        """Without what was kept or touched once more since."""
        for waiting, done in ((self.kept, written.kept), (self.touched, written.touched)):
            for id, used_at in done.items():
                if waiting.get(id) == used_at:
                    del waiting[id]
        self.damaged -= written.damaged


class TurnDatabase:
    """A TurnStore in a directory that other servers may use as well."""

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: Key,
        max_turns: int = MAX_TURNS,
        max_bytes: int = MAX_BYTES,
        wal_bytes: int = MAX_WAL_BYTES,
    ) -> None:
        self._max_turns = max_turns
        self._recent = RecentTurns(max_turns=max_turns, max_bytes=min(RECENT_BYTES, max_bytes))
        self._file = TurnFile(
            directory,
            fingerprint=fingerprint,
            max_turns=max_turns,
            max_bytes=max_bytes,
            wal_bytes=wal_bytes,
        )
        self._wake = threading.Condition()  # guards what follows
        self._pending = _Pending()
        self._is_closing = False
        self._gave_up = False
        self._must_reopen = False
        self._retry_at = 0.0
        self._read_again_at = 0.0
        self._trouble: str | None = None
        self._try_to_open()
        self._thread = threading.Thread(target=self._work, name="turn-writer", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes]) -> list[StoredTurn]:
        found = {held.turn.id: held for held in self._recent.find(keys)}
        for held in self._find_stored(keys, found):
            found[held.turn.id] = held
        return in_order(list(found.values()))

    def keep(self, turn: StoredTurn) -> None:
        used_at = self._recent.keep(turn)
        with self._wake:
            self._pending.kept.pop(turn.id, None)  # the last ones stay longest
            self._pending.kept[turn.id] = used_at
            self._bound_pending()
            self._wake.notify()

    def touch(self, ids: Sequence[bytes]) -> None:
        used_at = self._recent.touch(ids)
        with self._wake:
            for id in ids:
                is_kept = self._pending.kept.pop(id, None) is not None
                waiting = self._pending.kept if is_kept else self._pending.touched
                waiting.pop(id, None)
                waiting[id] = used_at
            self._bound_pending()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("turns: the disk hangs, and what was on its way there is lost")

    # -- reading, in any thread -----------------------------------------------------------------

    def _find_stored(self, keys: Sequence[bytes], known: dict[bytes, Held]) -> list[Held]:
        """What the file has beyond what is known, or of a later use than is known."""
        if time.monotonic() < self._read_again_at or not keys:
            return []
        if not self._file.is_current():
            self._reopen_soon()
            return []
        unique = list(dict.fromkeys(keys))
        try:
            rows = self._file.look_up(unique)
            found = []
            unread = []
            for row in rows:
                held = self._held_already(row, known)
                if held is None:
                    unread.append(row.number)
                elif isinstance(row.last_used_at, int) and row.last_used_at > held.used_at:
                    found.append(held._replace(used_at=row.last_used_at))
            return found + self._read(unread, set(unique))
        except TierFailed as error:
            self._read_again_at = time.monotonic() + RETRY_SECONDS
            self._tell(error.message)
            self._reopen_soon()
            return []

    def _held_already(self, row: Row, known: dict[bytes, Held]) -> Held | None:
        held = known.get(row.id)
        if held is None or turn_checksum(held.turn) == row.checksum:
            return held
        with self._wake:  # another server replaced it, or this one is about to
            return held if row.id in self._pending.kept else None

    def _read(self, numbers: list[int], keys: set[bytes]) -> list[Held]:
        if not numbers:
            return []
        reading = self._file.read(numbers)
        # One that lies under a key it does not have is as good as damaged, but harms nobody.
        found = [held for held in reading.held if not keys.isdisjoint(held.turn.keys)]
        for held in found:
            self._recent.remember(held, spared=self._pending.kept)
        if reading.damaged:
            self._forget(reading.damaged)
        return found

    def _forget(self, damaged: list[int]) -> None:
        with self._wake:
            n_known = len(self._pending.damaged)
            self._pending.damaged.update(damaged)
            n_new = len(self._pending.damaged) - n_known
            self._wake.notify()
        if n_new:
            _log.warning("turns: damaged and forgotten: %d", n_new)

    def _reopen_soon(self) -> None:
        with self._wake:
            self._must_reopen = True
            self._wake.notify()

    # -- writing, in one thread -----------------------------------------------------------------

    def _work(self) -> None:
        while self._wait_for_work():
            try:
                self._write_pending()
            except Exception as error:  # without this thread nothing would be written any more
                _log.exception("turns could not be written")
                with self._wake:
                    self._pending = _Pending()  # or it would fail for ever
                self._rest(f"it failed: {error}")
        try:
            self._file.close()
        except TierFailed as error:
            self._tell(error.message)

    def _wait_for_work(self) -> bool:
        """False: it is time to end, and everything is written or was tried one last time."""
        with self._wake:
            while not self._is_closing:
                seconds_left = self._retry_at - time.monotonic()
                has_work = bool(self._pending) or self._must_reopen
                if has_work and seconds_left <= 0:
                    return True
                self._wake.wait(seconds_left if has_work else None)
            return bool(self._pending) and not self._gave_up

    def _write_pending(self) -> None:
        must_open = not self._file.is_current()
        if must_open and not self._try_to_open():
            return
        with self._wake:
            pending = self._pending.copy()
            self._must_reopen = False
        if not pending:
            if must_open:
                self._is_well()
            return
        kept = [held for id in pending.kept if (held := self._recent.get(id)) is not None]
        touched = {id: at for id, at in pending.touched.items() if id not in pending.kept}
        try:
            gone = self._file.write(kept, touched, sorted(pending.damaged))
        except TierFailed as error:
            self._rest(error.message)
            return
        self._is_well()
        with self._wake:
            self._pending.settle(pending)
            for id in gone:  # another server evicted it, or somebody cleared the cache
                if (held := self._recent.get(id)) is not None:
                    self._pending.kept.setdefault(id, held.used_at)

    def _bound_pending(self) -> None:
        for waiting in (self._pending.kept, self._pending.touched):
            while len(waiting) > self._max_turns:
                del waiting[next(iter(waiting))]

    def _try_to_open(self) -> bool:
        try:
            if not self._file.open():
                _log.warning("%s cannot be used; it is set aside and made anew", self._file.path)
        except TierFailed as error:
            self._rest(error.message)
            return False
        self._read_again_at = 0.0
        return True

    def _rest(self, trouble: str) -> None:
        """A disk that refused is not asked again at once."""
        with self._wake:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._must_reopen = True
            self._gave_up = self._is_closing
        self._tell(trouble)

    def _tell(self, trouble: str) -> None:
        is_new, self._trouble = self._trouble is None, trouble
        if is_new:
            _log.warning("turns are only in memory for now: %s", trouble)

    def _is_well(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            _log.info("turns are written to %s again", self._file.path)
        with self._wake:
            self._retry_at = 0.0
