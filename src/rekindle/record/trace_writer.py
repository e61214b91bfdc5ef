"""The trace file of the proxy. Lines are written by a thread: no stream waits for the disk."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rekindle.errors import StartupError
from rekindle.record.redaction import Redaction
from rekindle.record.trace_line import Exchanged, line_of

PRIVATE = 0o600


class TraceWriter:
    """Appends to the file, which only its owner may read. Raises StartupError.

    `is_new`: what the file had before is removed.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_new else 0)
        try:
            descriptor = os.open(path, flags, PRIVATE)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not a pipe, nor /dev/stdout
                os.fchmod(descriptor, PRIVATE)
        except OSError as error:
            raise StartupError(f"{path} cannot be written: {error.strerror}.") from error
        self._file = os.fdopen(descriptor, "ab")
        self._redaction = Redaction()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record-writer")
        self.n_written = 0
        self.failure: str | None = None  # of the last write

    def put(self, exchanged: Exchanged) -> None:
        self._thread.submit(self._write, exchanged)

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self._thread.shutdown()
        self._file.close()

    def _write(self, exchanged: Exchanged) -> None:
        try:
            self._file.write(line_of(exchanged, self._redaction))
            self._file.flush()
            self.n_written += 1
        except OSError as error:
            self.failure = error.strerror or str(error)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
