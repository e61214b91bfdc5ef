"""Responses that clients may go on from: memory in front, `responses.sqlite3` behind.

    responses.sqlite3    beside the catalogue; what people and models said, so for the owner only

The text of a conversation belongs to no model: all servers of a directory share the file. It is
opened anew for each use, which is rare. One thread writes; what it has not written yet is found
in memory. Only who asks for a response that the disk cannot give, or delete, hears of trouble.
"""

import logging
import threading
import time
from collections import OrderedDict
from pathlib import Path

from rekindle.cache.responses.file import ResponseFile, has_expired
from rekindle.errors import TierFailed
from rekindle.generation.stored_responses import StoredResponse

_log = logging.getLogger(__name__)

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20  # on disk, compressed
MEMORY_BYTES = 64 * 2**20  # without a disk tier
RECENT_BYTES = 16 * 2**20  # in front of the disk, and the most that waits for it; picked
RETRY_SECONDS = 5.0  # picked, as in transfers.py
CLOSE_SECONDS = 5.0  # for the last write; picked


class MemoryResponses:
    """A ResponseStore that forgets when the process ends; least recently used goes first."""

    def __init__(
        self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MEMORY_BYTES
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_bytes = 0

    def get(self, id: str) -> StoredResponse | None:
        with self._lock:
            held = self._held.get(id)
            if held is None or has_expired(held.created_at):
                return None
            self._held.move_to_end(id)
            return held

    def put(self, response: StoredResponse) -> None:
        with self._lock:
            self._drop(response.id)
            if len(response.data) > self._max_bytes:
                return  # everything else would go, and then it would
            self._held[response.id] = response
            self._n_bytes += len(response.data)
            while len(self._held) > self._max_responses or self._n_bytes > self._max_bytes:
                self._drop(next(iter(self._held)))

    def delete(self, id: str) -> bool:
        with self._lock:
            return self._drop(id)

    def close(self) -> None:
        pass

    def _drop(self, id: str) -> bool:
        held = self._held.pop(id, None)
        self._n_bytes -= len(held.data) if held else 0
        return held is not None


class ResponseDatabase:
    """A ResponseStore in a directory that other servers may use as well."""

    def __init__(
        self, directory: Path, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_responses = max_responses
        self._file = ResponseFile(directory, max_responses=max_responses, max_bytes=max_bytes)
        self._file_lock = threading.Lock()  # a delete waits for the write that may bring it back
        self._recent = MemoryResponses(max_bytes=RECENT_BYTES)
        self._wake = threading.Condition()  # guards what follows
        self._unwritten: dict[str, StoredResponse] = {}
        self._used: dict[str, int] = {}
        self._is_closing = False
        self._was_tried = False  # once more at the end
        self._retry_at = 0.0
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name="response-writer", daemon=True)
        self._thread.start()

    def get(self, id: str) -> StoredResponse | None:
        with self._wake:
            found = self._unwritten.get(id)
        found = found or self._recent.get(id) or self._file.read(id)
        if found is None or has_expired(found.created_at):
            return None
        self._recent.put(found)
        with self._wake:
            self._used[id] = time.time_ns()
            self._wake.notify()
        return found

    def put(self, response: StoredResponse) -> None:
        self._recent.put(response)
        with self._wake:
            self._unwritten[response.id] = response
            self._used[response.id] = time.time_ns()
            while sum(len(each.data) for each in self._unwritten.values()) > RECENT_BYTES:
                del self._unwritten[next(iter(self._unwritten))]  # the disk does not keep up
            while len(self._used) > self._max_responses:
                del self._used[next(iter(self._used))]
            self._wake.notify()

    def delete(self, id: str) -> bool:
        was_recent = self._recent.delete(id)
        with self._wake:
            was_unwritten = self._unwritten.pop(id, None) is not None
        with self._file_lock:
            was_written = self._file.delete(id)
        return was_written or was_recent or was_unwritten

    def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("responses: the disk hangs, and what was on its way there is lost")

    def _work(self) -> None:
        while self._wait_for_work():
            try:
                with self._file_lock:
                    self._write()
                self._tell(None)
            except TierFailed as error:
                self._rest(error.message)
            except Exception as error:  # without this thread nothing would be written any more
                _log.exception("responses could not be written")
                self._rest(f"it failed: {error}")

    def _wait_for_work(self) -> bool:
        """False: it is time to end, and everything is written or was tried one last time."""
        with self._wake:
            while not self._is_closing:
                seconds_left = self._retry_at - time.monotonic()
                has_work = bool(self._unwritten or self._used)
                if has_work and seconds_left <= 0:
                    return True
                self._wake.wait(seconds_left if has_work else None)
            was_tried, self._was_tried = self._was_tried, True
            return bool(self._unwritten or self._used) and not was_tried

    def _write(self) -> None:
        with self._wake:
            written, used = list(self._unwritten.values()), dict(self._used)
        self._file.write(written, used)
        with self._wake:
            for response in written:
                if self._unwritten.get(response.id) is response:
                    del self._unwritten[response.id]
            for id, used_at in used.items():
                if self._used.get(id) == used_at:
                    del self._used[id]
            self._retry_at = 0.0

    def _rest(self, trouble: str) -> None:
        """A disk that refused is not asked again at once."""
        with self._wake:
            self._retry_at = time.monotonic() + RETRY_SECONDS
        self._tell(trouble)

    def _tell(self, trouble: str | None) -> None:
        was_well, self._trouble = self._trouble is None, trouble
        if trouble is not None and was_well:
            _log.warning("responses are only in memory for now: %s", trouble)
        elif trouble is None and not was_well:
            _log.info("responses are written to %s again", self._file.path)
