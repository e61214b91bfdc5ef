"""Responses that clients may continue from: memory in front, `responses.sqlite3` behind.

The text of a conversation belongs to no model, so all servers of a directory share the file.
One thread writes; unwritten responses are found in memory. A failing disk raises TierFailed only
for a request that reads or deletes a response on it.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from rekindle.bounded_cache import BoundedCache
from rekindle.cache.responses.file import ResponseFile, has_expired
from rekindle.errors import TierDamaged, TierFailed
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.generation.stored_responses import StoredResponse
from rekindle.write_behind import WriteBehind

T = TypeVar("T")

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20  # on disk, compressed
MEMORY_BYTES = 64 * 2**20  # without a disk tier
RECENT_BYTES = 16 * 2**20  # in front of the disk, and again for unwritten responses; picked
RETRY_SECONDS = 5.0  # picked, as in transfers.py
CLOSE_SECONDS = 5.0  # for the last write; picked


class MemoryResponses:
    """A ResponseStore that ends with the process; the least recently used are evicted first."""

    def __init__(
        self,
        forgotten: Tombstones,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._forgotten = forgotten
        self._lock = threading.Lock()
        self._held: BoundedCache[str, StoredResponse] = BoundedCache(
            max_items=max_responses, max_bytes=max_bytes
        )

    def get(self, id: str) -> StoredResponse | None:
        with self._lock:
            held = self._held.get(id)
        return None if held is None or has_expired(held.created_at) else held

    def ids(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(id for id in self._held if id.startswith(prefix))

    def put(self, response: StoredResponse) -> None:
        with self._lock:
            if not self._forgotten.cover(response.owner):
                self._held.put(response.id, response, n_bytes=len(response.data))

    def delete(self, id: str) -> bool:
        with self._lock:
            return self._held.pop(id) is not None

    def forget(self, tombstone: Tombstone) -> int:
        with self._lock:
            covered = [id for id, each in self._held.items() if tombstone.covers(each.owner)]
            for id in covered:
                self._held.pop(id)
            return len(covered)

    def close(self) -> None:
        pass


class _ResponseChange(NamedTuple):
    used_at: int  # Unix time in nanoseconds
    response: StoredResponse | None  # None: an existing one was used


class ResponseDatabase:
    """A ResponseStore in a directory that other servers may use as well."""

    def __init__(
        self,
        directory: Path,
        *,
        forgotten: Tombstones,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._forgotten = forgotten
        self._file = ResponseFile(directory, max_responses=max_responses, max_bytes=max_bytes)
        self._file_lock = threading.Lock()  # a delete waits for the write that may bring it back
        self._recent = MemoryResponses(forgotten, max_bytes=RECENT_BYTES)
        self._writer: WriteBehind[str, _ResponseChange] = WriteBehind(
            "responses",
            self._write,
            retry_seconds=RETRY_SECONDS,
            max_items=max_responses,
            max_bytes=RECENT_BYTES,
            size_of=lambda change: len(change.response.data) if change.response else 0,
            merge=lambda before, new: new._replace(response=new.response or before.response),
        )

        try:
            self._file.migrate()
        except TierFailed as error:
            self._writer.report(error)

    def get(self, id: str) -> StoredResponse | None:
        """Raises TierFailed."""
        found = self._unwritten(id) or self._recent.get(id)
        if found is None:
            with self._file_lock:  # a delete in between would be undone in memory
                if (found := self._asked(self._file.read, id)) is not None:
                    self._recent.put(found)
        if found is None or has_expired(found.created_at) or self._forgotten.cover(found.owner):
            return None
        self._writer.put(id, _ResponseChange(time.time_ns(), None))
        return found

    def ids(self, prefix: str) -> list[str]:
        """Raises TierFailed."""
        with self._file_lock:
            written = self._asked(self._file.ids, prefix) or ()
            unwritten = [id for id in self._writer.unwritten() if id.startswith(prefix)]
            return sorted({*written, *self._recent.ids(prefix), *unwritten})

    def put(self, response: StoredResponse) -> None:
        self._recent.put(response)
        self._writer.put(response.id, _ResponseChange(time.time_ns(), response))

    def delete(self, id: str) -> bool:
        """Delete the response everywhere. Return whether it was there. Raises TierFailed."""
        with self._file_lock:
            was_recent = self._recent.delete(id)
            unwritten = self._writer.discard(id)
            was_unwritten = unwritten is not None and unwritten.response is not None
            was_written = self._file.delete(id)
        return was_written or was_recent or was_unwritten

    def forget(self, tombstone: Tombstone) -> int:
        with self._file_lock:
            self._recent.forget(tombstone)
            # What is written may be about to be written again.
            written = {*(self._asked(self._file.ids, "") or ())}
            n_unwritten = 0
            for id in self._writer.unwritten():
                response = self._unwritten(id)
                if response is not None and tombstone.covers(response.owner):
                    is_discarded = self._writer.discard(id) is not None
                    n_unwritten += is_discarded and id not in written
            return self._file.forget(tombstone.covers) + n_unwritten

    def close(self) -> None:
        self._writer.close(CLOSE_SECONDS)

    def _unwritten(self, id: str) -> StoredResponse | None:
        change = self._writer.peek(id)
        return change.response if change else None

    def _asked(self, read: Callable[[str], T], id: str) -> T | None:
        """Return what the file says; None: it is damaged."""
        try:
            return read(id)
        except TierDamaged:
            self._writer.wake()  # only the writer replaces a damaged file
            return None
        except TierFailed:
            self._writer.wake()
            raise

    def _write(self, batch: dict[str, _ResponseChange]) -> None:
        """Write the changes. An empty batch only checks the file. Raises TierFailed."""
        used = {id: change.used_at for id, change in batch.items()}
        with self._file_lock:
            # A response may have been deleted since the batch was taken.
            responses = [found for id in batch if (found := self._unwritten(id)) is not None]
            kept = [each for each in responses if not self._forgotten.cover(each.owner)]
            self._file.write(kept, used)
            self._writer.settle(batch)
