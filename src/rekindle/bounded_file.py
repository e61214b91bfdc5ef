"""Read files of unknown origin, plain or gzipped, up to a limit. Failures raise UnreadableFile.

A few kilobytes of gzip can hold gigabytes. A pipe may never end: only files that a user names on
the command line may be one.
"""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path

from rekindle.errors import UnreadableFile

GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 64 * 2**20  # twice the longest body that a client may send


def read_file(path: Path, max_bytes: int, *, may_be_pipe: bool) -> bytes:
    """Return the bytes of the file as they are."""
    with _failures_named(path), _opened(path, may_be_pipe=may_be_pipe) as file:
        return _all_of(file, path, max_bytes)


def unpacked(content: bytes, path: Path, max_bytes: int) -> bytes:
    """Return what a gzip file holds. `path` names it in errors."""
    with _failures_named(path):
        return _all_of(gzip.GzipFile(fileobj=BytesIO(content)), path, max_bytes)


def read_unpacked(path: Path, max_bytes: int) -> bytes:
    """Return the content of the file or pipe. Its first bytes say whether it is gzipped."""
    with _failures_named(path), _opened(path, may_be_pipe=True) as file:
        return _all_of(_plain(file), path, max_bytes)


def lines_of(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of the file or pipe, plain or gzipped."""
    n_bytes = 0
    with _failures_named(path), _opened(path, may_be_pipe=True) as file:
        plain = _plain(file)
        while line := plain.readline(MAX_LINE_BYTES + 1):
            n_bytes += len(line)
            if len(line) > MAX_LINE_BYTES:
                raise UnreadableFile(f"{path}: a line is longer than {MAX_LINE_BYTES >> 20} MiB.")
            _check_size(n_bytes, path, max_bytes)
            yield line


def _plain(file: BufferedReader) -> BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=file) if file.peek(2).startswith(GZIP_MAGIC) else file


def _all_of(file: BufferedReader | gzip.GzipFile, path: Path, max_bytes: int) -> bytes:
    content = file.read(max_bytes + 1)
    _check_size(len(content), path, max_bytes)
    return content


def _check_size(n_bytes: int, path: Path, max_bytes: int) -> None:
    if n_bytes > max_bytes:
        raise UnreadableFile(f"{path} has more than {max_bytes >> 20} MiB of content. Split it.")


def _opened(path: Path, *, may_be_pipe: bool) -> BufferedReader:
    if may_be_pipe and path.is_fifo():
        return BufferedReader(FileIO(path))  # waits for its writer
    file = FileIO(path, opener=_without_waiting)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnreadableFile(f"{path} is not a plain file.")
    return BufferedReader(file)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnreadableFile(f"{path} is not a complete gzip file: {error}.") from error
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror or error}.") from error
