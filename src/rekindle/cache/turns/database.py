"""The turns of past replies across restarts: memory in front, `turns.sqlite3` behind.

Nothing here raises. A turn that cannot be read is a miss. A failure is logged once and retried
after a while. One thread writes; unwritten turns are found in memory.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.entry import Key
from rekindle.cache.turns.file import TurnFile, TurnRow, turn_checksum
from rekindle.cache.turns.recent import MAX_TURNS, Held, RecentTurns, in_order
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.stored_turns import StoredTurn
from rekindle.write_behind import WriteBehind

_log = logging.getLogger(__name__)

MAX_BYTES, MAX_WAL_BYTES = 256 * 2**20, 4 * 2**20
RECENT_BYTES = 32 * 2**20  # in memory, unwritten turns included; picked
RETRY_SECONDS = 5.0  # picked, as in transfers.py
CLOSE_SECONDS = 5.0  # for the write under way and the last one; picked


class _TurnChange(NamedTuple):
    """An unwritten change. The turn itself is in memory: a turn evicted from there is lost."""

    used_at: int
    is_kept: bool  # False: only touched, or the row is damaged


_DAMAGED_ROW = _TurnChange(0, is_kept=False)


class TurnDatabase:
    """A TurnStore in a directory that other servers may use as well."""

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: Key,
        forgotten: Tombstones,
        max_turns: int = MAX_TURNS,
        max_bytes: int = MAX_BYTES,
        wal_bytes: int = MAX_WAL_BYTES,
    ) -> None:
        self._forgotten = forgotten
        self._recent = RecentTurns(
            forgotten, max_turns=max_turns, max_bytes=min(RECENT_BYTES, max_bytes)
        )
        self._write_lock = threading.Lock()  # a deletion waits for the write that has its turns
        self._file = TurnFile(
            directory,
            fingerprint=fingerprint,
            max_turns=max_turns,
            max_bytes=max_bytes,
            wal_bytes=wal_bytes,
        )
        self._set_aside = EntryFiles(directory).set_aside
        self._read_again_at = 0.0
        # Keys: the id of a kept or touched turn, or the number of a damaged row.
        self._writer: WriteBehind[bytes | int, _TurnChange] = WriteBehind(
            "turns",
            self._write,
            retry_seconds=RETRY_SECONDS,
            max_items=2 * max_turns,
            merge=_merged,
        )
        try:
            self._file.open(self._set_aside)
        except TierFailed as error:
            self._fail(error)

    def find(self, keys: Sequence[bytes], *, namespace: str = "") -> list[StoredTurn]:
        found = {held.turn.id: held for held in self._recent.find(keys)}
        for held in self._find_stored(keys, found):
            found[held.turn.id] = held
        return in_order(list(found.values()))

    def keep(self, turn: StoredTurn) -> None:
        used_at = self._recent.keep(turn)
        if used_at is not None:
            self._writer.put(turn.id, _TurnChange(used_at, is_kept=True))

    def touch(self, ids: Sequence[bytes]) -> None:
        used_at = self._recent.touch(ids)
        self._writer.put_all(dict.fromkeys(ids, _TurnChange(used_at, is_kept=False)))

    def forget(self, tombstone: Tombstone) -> int:
        covered = self._recent.forget(tombstone)
        with self._write_lock:
            unwritten = [id for id in covered if self._is_unwritten(id)]
            for id in covered:
                self._writer.discard(id)
            if not self._file.is_current():
                self._file.open(self._set_aside)
            return self._file.forget(tombstone.covers) + len(unwritten)

    def close(self) -> None:
        if self._writer.close(CLOSE_SECONDS):
            try:
                self._file.close()
            except TierFailed as error:
                self._writer.report(error)

    # -- reading, in any thread -----------------------------------------------------------------

    def _find_stored(self, keys: Sequence[bytes], known: dict[bytes, Held]) -> list[Held]:
        """Return the turns that only the file has, or whose last use there is later."""
        if time.monotonic() < self._read_again_at or not keys:
            return []
        if not self._file.is_current():
            self._writer.wake()
            return []
        unique = list(dict.fromkeys(keys))
        try:
            found = []
            unread = []
            for row in self._file.look_up(unique):
                held = self._known_turn(row, known)
                if held is None:
                    unread.append(row.number)
                elif isinstance(row.last_used_at, int) and row.last_used_at > held.used_at:
                    found.append(held._replace(used_at=row.last_used_at))
            return found + self._read(unread, set(unique))
        except TierFailed as error:
            self._read_again_at = time.monotonic() + RETRY_SECONDS
            self._fail(error)
            return []

    def _known_turn(self, row: TurnRow, known: dict[bytes, Held]) -> Held | None:
        """Return the turn in memory, unless another server has replaced it in the file."""
        held = known.get(row.id)
        if held is None or turn_checksum(held.turn) == row.checksum:
            return held
        return held if self._is_unwritten(row.id) else None

    def _read(self, numbers: list[int], keys: set[bytes]) -> list[Held]:
        if not numbers:
            return []
        rows = self._file.read(numbers)
        # A damaged index may list a turn under a key that it does not have: a miss.
        found = [
            held
            for held in rows.values()
            if held
            and not keys.isdisjoint(held.turn.keys)
            and not self._forgotten.cover(held.turn.owner)
        ]
        for held in found:
            self._recent.remember(held, is_spared=self._is_unwritten)
        damaged = [number for number, held in rows.items() if held is None]
        if new := [number for number in damaged if self._writer.peek(number) is None]:
            self._writer.put_all(dict.fromkeys(new, _DAMAGED_ROW))
            _log.warning("turns: deleted damaged turns n=%d", len(new))
        return found

    def _is_unwritten(self, id: bytes) -> bool:
        change = self._writer.peek(id)
        return change is not None and change.is_kept

    def _fail(self, error: TierFailed) -> None:
        """Log the failure and have the writer open the file again."""
        self._writer.report(error)
        self._writer.wake()

    # -- writing, in one thread -----------------------------------------------------------------

    def _write(self, batch: dict[bytes | int, _TurnChange]) -> None:
        """Write the changes. An empty batch only opens the file again. Raises TierFailed."""
        with self._write_lock:
            if not self._file.is_current():
                self._file.open(self._set_aside)
                self._read_again_at = 0.0
            gone = self._write_changes(batch) if batch else ()
            self._writer.settle(batch)
        # Another server evicted the turn, or the cache was cleared.
        for id in gone:
            if (held := self._recent.get(id)) is not None:
                self._writer.put(id, _TurnChange(held.used_at, is_kept=True))

    def _write_changes(self, batch: dict[bytes | int, _TurnChange]) -> Sequence[bytes]:
        """Return the ids of touched turns that the file does not have."""
        ids = {key: change for key, change in batch.items() if isinstance(key, bytes)}
        kept = [
            held
            for id, change in ids.items()
            if change.is_kept and (held := self._recent.get(id)) is not None
        ]
        touched = {id: change.used_at for id, change in ids.items() if not change.is_kept}
        damaged = [key for key in batch if isinstance(key, int)]
        return self._file.write(kept, touched, damaged)


def _merged(before: _TurnChange, new: _TurnChange) -> _TurnChange:
    return _TurnChange(max(before.used_at, new.used_at), before.is_kept or new.is_kept)
